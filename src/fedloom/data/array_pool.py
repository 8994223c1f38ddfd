"""One array of inputs and one of labels as a data set.

It has training and test samples, and the owner of each."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.array_samples import (
    check_array_sample_labels,
    count_array_classes,
    make_array_samples,
    match_array_samples,
)
from fedloom.data.dataset import Dataset
from fedloom.data.readers.tables import select_table_test_rows
from fedloom.data.samples import Array, Samples
from fedloom.errors import InputError

TEST_SHARE = 0.2
"""The share of samples for testing, if there are no test samples."""


def make_array_dataset(
    x: Array,
    y: Array,
    *,
    owner: Any = None,
    test: tuple[Array, Array] | float = TEST_SHARE,
    name: str = "own",
    parts: tuple[str, str] = ("the pool", "the test set"),
) -> Dataset:
    """Make a data set from arrays.

    Args:
        x: Inputs, one row per sample.
        y: Labels: integers for a classification, floats for a regression.
        owner: The owner of each sample, as integers or texts.
        test: Inputs and labels for testing, or the share of each owner's samples to hold out, always the same ones.
        name: Name in reports.
        parts: What errors call the samples and the test samples.

    Raises:
        InputError: If the arrays do not match each other, or hold values that cannot be used.
    """
    train = _check_pool(make_array_samples(x, y, parts[0]), parts[0])
    if not len(train):
        raise InputError(f"{parts[0]} has no samples.")
    owners, owner_names = (None, ()) if owner is None else _number_owners(owner, len(train))
    test_owners = None
    if isinstance(test, tuple):
        held = _check_pool(make_array_samples(*test, parts[1]), parts[1])
        held = match_array_samples(held, train, parts[1], "the training set")
    else:
        rows = select_table_test_rows(owners, len(train), test)
        if not rows.any():
            raise InputError(f"{parts[0]} has too few samples to hold out a share of {test} for testing.")
        held, train = train.take(np.flatnonzero(rows)), train.take(np.flatnonzero(~rows))
        if owners is not None:
            owners, test_owners = owners[~rows], owners[rows]
    dataset = Dataset(train, held, (), owners, owner_names, test_owners=test_owners, name=name)
    if train.are_tokens:
        largest = max(int(part.x.max()) for part in (train, held) if part.x.numel())
        dataset = replace(dataset, vocabulary_size=1 + largest)
    if train.y.is_floating_point():
        return dataset
    classes = count_array_classes([train.y, held.y])
    if classes < 2:
        raise InputError(f"{parts[0]} has only the label 0; there must be two to tell apart.")
    return replace(dataset, class_names=tuple(str(label) for label in range(classes)))


def _check_pool(samples: Samples, who: str) -> Samples:
    """Return the samples with labels of shape n, or n x 1 for a regression; raise an error for unusable values."""
    x, y = samples.x.cpu(), samples.y.cpu()
    if x.ndim == 1:
        raise InputError(f"{who} has inputs of shape {tuple(x.shape)}; expected a row for each sample, such as n x 5.")
    if samples.are_images and x.shape[1] in (1, 3) and x.shape[2] == x.shape[3] > 4:
        shape = " x ".join(map(str, x.shape))
        raise InputError(f"{who} has images of shape {shape}; expected n x height x width x channels: transpose them.")
    if samples.are_tokens and x.numel() and int(x.min()) < 0:
        raise InputError(
            f"{who} has the integer input {int(x.min())}; integers are token ids from 0 on, so store quantities as "
            "floats."
        )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y.flatten()
    if y.ndim != 1 and not y.is_floating_point():
        raise InputError(f"{who} has labels of shape {tuple(y.shape)}; expected one integer for each sample.")
    check_array_sample_labels(y, 0, who)
    return Samples(x, y.unsqueeze(1) if y.is_floating_point() and y.ndim == 1 else y)


def _number_owners(owner: Any, count: int) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the owner of each sample as a position, and the sorted names of the owners."""
    values = owner.cpu().numpy() if isinstance(owner, torch.Tensor) else np.asarray(owner)
    if values.dtype.kind not in "iuU" or values.shape != (count,):
        raise InputError(
            f"the owners are of type {values.dtype} and shape {values.shape}; expected {count} integers or texts, one "
            "for each sample."
        )
    names, positions = np.unique(values, return_inverse=True)
    return positions.astype(np.int64), tuple(str(name) for name in names.tolist())
