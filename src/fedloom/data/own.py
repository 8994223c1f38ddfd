"""A caller's own arrays and data sets, checked, as a federation."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fedloom.data.federation import Federation, count_labels
from fedloom.data.samples import Array, Prepare, Samples, is_integer
from fedloom.errors import InputError, brief_repr

MOST_CLASSES = 100_000
"""More than this, and more than there are samples, are not believed unless somebody says so."""


class OwnFederation(Federation):
    """Each client's own samples, which `read(k)` gives; they are kept once read, unless `keep` is off."""

    def __init__(
        self,
        sizes: Sequence[int],
        read: Callable[[int], Samples],
        example: Samples,
        test: Samples | None,
        classes: int | None,
        name: str,
        prepare: Prepare | None,
        keep: bool = True,
    ) -> None:
        if classes is not None and (not isinstance(classes, int | np.integer) or classes < 0):
            raise InputError(f"classes must be a whole number, 0 or more, not {brief_repr(classes)}.")
        self._sizes, self._read, self._example, self._keep = list(sizes), read, example, keep
        self._held: dict[int, Samples] = {}
        self.name, self.shape = name, example.shape
        self.prepare = example.default_prepare() if prepare is None else prepare
        self.test = None if test is None else _alike(test, example, "the test set")
        self.classes = 0
        if classes is None and not example.y.is_floating_point():
            labels = [self.client(k).y for k in range(len(self))] + ([self.test.y] if self.test else [])
            classes = 1 + max(int(y.max()) for y in labels if len(y))
            if classes > max(MOST_CLASSES, sum(map(len, labels))):  # numbers of people, say: as many outputs never fit
                raise InputError(
                    f"the largest label is {classes - 1}, so there would be {classes:,} classes; number them from 0 "
                    "on, or say how many there are with classes."
                )
        self.classes = classes or 0
        if self.test is not None:
            _check_labels(self.test.y, self.classes, "the test set")
        for k, held in self._held.items():
            _check_labels(held.y, self.classes, f"client {k}")

    def __len__(self) -> int:
        return len(self._sizes)

    def samples(self, k: int) -> int:
        return self._sizes[k]

    def client(self, k: int) -> Samples:
        if k in self._held:
            return self._held[k]
        if self._sizes[k] == 0:
            return self._example.take(np.arange(0))
        samples = _alike(self._read(k), self._example, f"client {k}")
        _check_labels(samples.y, self.classes, f"client {k}")
        if self._keep:
            self._held[k] = samples
        return samples

    def label_counts(self) -> NDArray[np.int64] | None:
        if len(self._held) < np.count_nonzero(self._sizes):
            return None
        return count_labels((self.client(k).y for k in range(len(self))), len(self), self.classes)


def federate_arrays(
    clients: Sequence[tuple[Array, Array]],
    test: tuple[Array, Array] | Samples | None,
    classes: int | None,
    name: str,
    prepare: Prepare | None,
) -> OwnFederation:
    """See `Federation.from_arrays`."""
    held = [_samples(*_pair(client, f"client {k}"), f"client {k}") for k, client in enumerate(clients)]
    sizes = [len(samples) for samples in held]
    example = held[_first(sizes, name)]
    if test is not None and not isinstance(test, Samples):
        test = _samples(*_pair(test, "the test set"), "the test set")
    federation = OwnFederation(sizes, held.__getitem__, example, test, classes, name, prepare)
    for k in range(len(held)):
        federation.client(k)  # what is wrong with arrays at hand is said now, not in the middle of a run
    if example.are_tokens:
        parts = [samples.x for samples in (*held, federation.test) if samples is not None and samples.x.numel()]
        federation.tokens = 1 + max(int(x.max()) for x in parts)
    return federation


def _pair(given: object, who: str) -> tuple[Array, Array]:
    """One client's inputs and labels; an array that has two rows is no pair of them."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"{who} is {brief_repr(given)}; expected a pair (x, y) of its inputs and its labels.")
    return given[0], given[1]


def federate_datasets(
    datasets: Sequence[TorchDataset[Any]],
    test: TorchDataset[Any] | Samples | None,
    classes: int | None,
    name: str,
    prepare: Prepare | None,
    keep: bool,
) -> OwnFederation:
    """See `Federation.from_datasets`."""
    sizes = [_size(data, f"client {k}") for k, data in enumerate(datasets)]
    first = _first(sizes, name)
    example = _read(datasets[first], 1, f"client {first}")
    if test is not None and not isinstance(test, Samples):
        test = _read(test, _size(test, "the test set"), "the test set")

    def read(k: int) -> Samples:
        return _read(datasets[k], sizes[k], f"client {k}")

    return OwnFederation(sizes, read, example, test, classes, name, prepare, keep)


def _first(sizes: Sequence[int], name: str) -> int:
    for k, size in enumerate(sizes):
        if size:
            return k
    raise InputError(f"{name!r} has {len(sizes)} clients and no samples; expected at least one sample.")


def _size(data: TorchDataset[Any], who: str) -> int:
    try:
        return len(data)  # type: ignore[arg-type]  # torch does not declare it; map-style sets have it
    except TypeError:
        kind = type(data).__name__
        raise InputError(f"{who} is a {kind} without a length; expected a map-style data set.") from None


def _read(data: TorchDataset[Any], size: int, who: str) -> Samples:
    """The first `size` items of a data set."""
    items = [data[i] for i in range(size)]
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise InputError(f"{who} has items that are not pairs; expected (x, y).")
    try:
        x, y = (np.stack([np.asarray(value) for value in column]) for column in zip(*items, strict=True))
    except ValueError:
        raise InputError(f"{who} has items of different shapes; expected one shape.") from None
    return _samples(x, y, who)


def _samples(x: Array, y: Array, who: str) -> Samples:
    """Arrays as `Samples`: uint8 of four dimensions are images, other integers tokens, the rest becomes float32."""
    inputs, labels = _tensor(x, who), _tensor(y, who)
    if inputs.dtype == torch.uint8 and inputs.ndim == 4:
        pass
    elif is_integer(inputs):
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
            # torch takes neither negative strides nor, without a warning, read-only arrays.
            values = torch.from_numpy(np.require(values, requirements=["C", "W"]))
        except (TypeError, ValueError):
            raise InputError(f"{who} has values that are not an array of numbers.") from None
    if values.is_complex():
        raise InputError(f"{who} has complex values; expected real numbers.")
    return values.detach()


def _alike(samples: Samples, example: Samples, who: str) -> Samples:
    """`samples` if they are of the kind of `example`; none at all are of every kind."""
    if not len(samples):
        return example.take(np.arange(0))
    for got, want, what in ((samples.x, example.x, "inputs"), (samples.y, example.y, "labels")):
        if got.dtype != want.dtype or got.shape[1:] != want.shape[1:]:
            raise InputError(
                f"{who} has {what} of type {got.dtype} and shape {tuple(got.shape[1:])}; expected "
                f"{want.dtype} and {tuple(want.shape[1:])}, as the first client with samples has."
            )
    return samples


def _check_labels(y: Tensor, classes: int, who: str) -> None:
    if classes and y.is_floating_point():
        raise InputError(f"{who} has labels of type {y.dtype}; expected integers from 0 to {classes - 1}.")
    if not y.is_floating_point() and len(y) and int(y.min()) < 0:
        raise InputError(f"{who} has the label {int(y.min())}; expected labels from 0 on.")
    if classes and len(y) and int(y.max()) >= classes:
        raise InputError(f"{who} has the label {int(y.max())}; expected labels from 0 to {classes - 1}.")
