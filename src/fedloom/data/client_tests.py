"""Test samples from the clients themselves: each holds a share of its own out, and all are tested on together.

The authors of LSS do so: they merge the training and the test samples of a data set, spread them over the clients, and
cut each client's part in two. A client then is tested on its own mixture of classes, or its own domain.
"""

from dataclasses import replace

import numpy as np
import torch

from fedloom.data.datasets import Dataset
from fedloom.data.federation import PooledFederation
from fedloom.data.samples import Samples
from fedloom.errors import InputError


def merge(dataset: Dataset) -> Dataset:
    """All samples for training and none for testing.

    Nobody knows whose the test samples are, so where that is known of the training samples these stay alone.
    """
    nothing = dataset.test[:0]
    if dataset.owners is not None or dataset.domains is not None:
        note = f"the {len(dataset.test)} test samples of {dataset.name!r} are left out: whose they are is not known."
        return replace(dataset, test=nothing, notes=(*dataset.notes, note))
    both = (dataset.train, dataset.test)
    return replace(dataset, train=Samples(torch.cat([s.x for s in both]), torch.cat([s.y for s in both])), test=nothing)


def hold_out(federation: PooledFederation, share: float, rng: np.random.Generator) -> PooledFederation:
    """The same clients, each with a share of its samples held out; the test set is these, client after client.

    A client keeps one sample to train on.
    """
    parts, held = [], []
    for part in federation.parts:
        order = rng.permutation(part)
        count = min(int(share * len(part) + 0.5), max(0, len(part) - 1))
        held.append(np.sort(order[:count]))
        parts.append(np.sort(order[count:]))
    test = np.concatenate(held) if held else np.zeros(0, dtype=np.int64)
    if not len(test):
        raise InputError(f"no client has enough samples to hold a share of {share} out for testing.")
    divided = PooledFederation(
        federation.pool,
        parts,
        classes=federation.classes,
        shape=federation.shape,
        prepare=federation.prepare,
        test=federation.pool.take(test),
        name=federation.name,
        tokens=federation.tokens,
    )
    divided.test_owners = np.repeat(np.arange(len(held)), [len(part) for part in held])
    return divided
