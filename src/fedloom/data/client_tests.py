"""Test samples from the clients themselves: each holds a share of its own out, and all are tested on together.

The authors of LSS do so: they merge the training and the test samples of a data set, spread them over the clients, and
cut each client's part in two. A client then is tested on its own mixture of classes, or its own domain.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.content import NOBODY, Dataset
from fedloom.data.federation import PooledFederation
from fedloom.data.samples import Samples
from fedloom.errors import InputError

Marks = NDArray[np.int64]
"""Whose each sample is, or where it comes from."""


def merge(dataset: Dataset) -> Dataset:
    """All samples for training and none for testing.

    Where it is known whose the training samples are, or where they come from, but not of all test samples, these are
    left out.
    """
    owners, domains = (dataset.owners, dataset.test_owners), (dataset.domains, dataset.test_domains)
    merged = replace(dataset, test=dataset.test[:0], test_owners=None, test_domains=None)
    if not all(train is None or (test is not None and NOBODY not in test) for train, test in (owners, domains)):
        note = f"the {len(dataset.test)} test samples of {dataset.name!r} are left out: whose they are is not known."
        return replace(merged, notes=(*dataset.notes, note))
    both = (dataset.train, dataset.test)
    train = Samples(torch.cat([part.x for part in both]), torch.cat([part.y for part in both]))
    return replace(merged, train=train, owners=_joined(*owners), domains=_joined(*domains))


def _joined(train: Marks | None, test: Marks | None) -> Marks | None:
    return None if train is None or test is None else np.concatenate([train, test])


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
