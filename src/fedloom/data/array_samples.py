"""Convert arrays of a user to samples, and check them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedloom.data.samples import Array, Samples, samples_are_integer
from fedloom.errors import InputError

MOST_CLASSES = 100_000
"""More classes than this, and than samples, are an error unless their number is given."""


def make_array_samples(x: Array, y: Array, who: str) -> Samples:
    """Convert arrays to `Samples`; `who` names them in errors.

    Inputs of uint8 with the shape n x H x W or n x H x W x C stay images. Other integers become tokens, and everything
    else float32.
    """
    inputs, labels = _tensor(x, who), _tensor(y, who)
    if inputs.dtype == torch.uint8 and inputs.ndim in (3, 4):
        inputs = inputs.unsqueeze(-1) if inputs.ndim == 3 else inputs
    elif samples_are_integer(inputs):
        inputs = inputs.to(torch.int64)
    else:
        inputs = inputs.to(torch.float32)
        if not bool(torch.isfinite(inputs).all()):
            raise InputError(f"{who} has inputs that are NaN or infinite; expected finite numbers.")
    labels = labels.to(torch.float32 if labels.is_floating_point() else torch.int64)
    if labels.is_floating_point() and not bool(torch.isfinite(labels).all()):
        raise InputError(f"{who} has labels that are NaN or infinite; expected finite numbers.")
    try:
        return Samples(inputs, labels)
    except InputError as error:
        raise InputError(f"{who}: {error}") from None


def _tensor(values: Array, who: str) -> Tensor:
    if not isinstance(values, Tensor):
        try:
            # torch rejects negative strides, and warns about read-only arrays.
            values = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        except (TypeError, ValueError):
            raise InputError(f"{who} has values that are not an array of numbers.") from None
    if values.is_complex():
        raise InputError(f"{who} has complex values; expected real numbers.")
    return values.detach()


def match_array_samples(
    samples: Samples, example: Samples, who: str, other: str = "the first client with samples"
) -> Samples:
    """Return `samples` if their types and shapes match `example` of `other`; no samples always match."""
    if not len(samples):
        return example.take(np.arange(0))
    for got, want, what in ((samples.x, example.x, "inputs"), (samples.y, example.y, "labels")):
        if got.dtype != want.dtype or got.shape[1:] != want.shape[1:]:
            raise InputError(
                f"{who} has {what} of type {got.dtype} and shape {tuple(got.shape[1:])}; expected "
                f"{want.dtype} and {tuple(want.shape[1:])}, as {other} has."
            )
    return samples


def check_array_sample_labels(y: Tensor, classes: int, who: str) -> None:
    """Raise `InputError` if a label is not from 0 to `classes` - 1; with no classes, if an integer is below 0."""
    if classes and y.is_floating_point():
        raise InputError(f"{who} has labels of type {y.dtype}; expected integers from 0 to {classes - 1}.")
    if not y.is_floating_point() and len(y) and int(y.min()) < 0:
        raise InputError(f"{who} has the label {int(y.min())}; expected labels from 0 on.")
    if classes and len(y) and int(y.max()) >= classes:
        raise InputError(f"{who} has the label {int(y.max())}; expected labels from 0 to {classes - 1}.")


def count_array_classes(labels: Sequence[Tensor], advice: str = "") -> int:
    """Return how many classes integer labels have: one more than the largest. An error ends with `advice`."""
    classes = 1 + max(int(y.max()) for y in labels if len(y))
    if classes > max(MOST_CLASSES, sum(map(len, labels))):  # IDs as labels: so many outputs never fit
        raise InputError(
            f"the largest label is {classes - 1}, so there would be {classes:,} classes; number them from 0 on{advice}."
        )
    return classes
