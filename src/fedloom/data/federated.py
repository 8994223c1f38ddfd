"""A caller's own arrays and data sets, checked, as a federation.

Who holds what: the clients of a run and their samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fedloom.data.samples import Array, InputTransform, Samples, is_integer_target
from fedloom.errors import InputError
from fedloom.utils.formatting import short_repr

MOST_COUNTED = 2000
"""Above this many clients nobody reads a table of label counts, and making it may mean making all data."""


class FederatedDataset(ABC):
    """The clients, the samples of each, and what a network must know about them.

    A subclass gives `__len__`, `client`, `classes` and `shape`; samples may be made on demand, so that a
    million clients cost nothing until they are asked for. `client(k)` must give the same samples each time.
    """

    name: str
    """What reports call it; the class's name unless set."""
    classes: int
    """How many labels there are; 0 where the task is not a classification."""
    shape: tuple[int, ...]
    """The shape of one prepared input, such as (1, 28, 28)."""
    tokens: int = 0
    """Where inputs are tokens: how many different ones there may be; 0 where nobody says."""
    prepare: InputTransform = InputTransform.identity()
    test: Samples | None = None
    test_owners: NDArray[np.int64] | None = None
    """Whose each test sample is, where the clients hold them out of their own."""
    server_data: Samples | None = None
    """What the server holds for methods that need data there; no client's, and like theirs."""
    blind: bool = False
    """Whether the samples of the clients are elsewhere, so that `client` cannot give them."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    @abstractmethod
    def __len__(self) -> int:
        """The number of clients."""

    @abstractmethod
    def client(self, k: int) -> Samples:
        """The training samples of client `k`."""

    @property
    def here(self) -> Sequence[int]:
        """The clients whose samples `client` can give."""
        return () if self.blind else range(len(self))

    def samples(self, k: int) -> int:
        """How many training samples client `k` has; override it where that is known without making them."""
        return len(self.client(k))

    def label_counts(self) -> NDArray[np.int64] | None:
        """How often each client (row) has each class (column), where that is known at little cost."""
        return None

    @staticmethod
    def from_arrays(
        clients: Sequence[tuple[Array, Array]],
        test: tuple[Array, Array] | Samples | None = None,
        classes: int | None = None,
        name: str = "own",
        prepare: InputTransform | None = None,
    ) -> "FederatedDataset":
        """A federation of each client's own `(x, y)`, numpy arrays or tensors; a client may be empty.

        uint8 arrays n x H x W x C are images, scaled to 0..1 unless `prepare` says otherwise; other integers are
        tokens and reach the network as int64; every other array is network input as float32. Integer labels make
        a classification with as many classes as the largest label says, unless `classes` does; float labels make
        a regression.
        """

        return _federate_arrays(clients, test, classes, name, prepare)

    @staticmethod
    def from_datasets(
        datasets: Sequence[TorchDataset[Any]],
        test: TorchDataset[Any] | Samples | None = None,
        classes: int | None = None,
        name: str = "own",
        prepare: InputTransform | None = None,
        keep: bool = True,
    ) -> "FederatedDataset":
        """A federation of map-style torch data sets with `(x, y)` items, one for each client.

        A data set is read when its client is first asked for and then kept, or read anew each time with
        `keep=False`. Without `classes` every item is read once at the start to see the labels.
        """

        return _federate_datasets(datasets, test, classes, name, prepare, keep)


class PartitionedDataset(FederatedDataset):
    """One pool of samples, and for each client the positions of its own in `parts`."""

    def __init__(
        self,
        pool: Samples,
        parts: Sequence[NDArray[np.integer]],
        *,
        classes: int,
        shape: tuple[int, ...] | None = None,
        prepare: InputTransform | None = None,
        test: Samples | None = None,
        name: str = "own",
        tokens: int = 0,
    ) -> None:
        # take() wants writable arrays, and a caller's later change must not reach us.
        self.pool, self.parts = pool, [np.array(part, dtype=np.int64) for part in parts]
        self.classes, self.test, self.name, self.tokens = classes, test, name, tokens
        self.shape = pool.shape if shape is None else shape
        self.prepare = pool.default_prepare() if prepare is None else prepare
        if classes and len(pool) and (pool.y.min() < 0 or pool.y.max() >= classes):
            span = f"labels from {pool.y.min()} to {pool.y.max()}"
            raise InputError(f"the pool has {span}; expected labels from 0 to {classes - 1}.")
        used = np.zeros(len(pool), dtype=np.bool_)
        for k, part in enumerate(self.parts):
            if part.size and (part.min() < 0 or part.max() >= len(pool)):
                span = f"positions from {part.min()} to {part.max()}"
                raise InputError(f"client {k} holds {span}; the pool has {len(pool)} samples.")
            if used[part].any() or len(np.unique(part)) < len(part):
                raise InputError(f"client {k} holds a sample that is already held; expected disjoint parts.")
            used[part] = True

    def __len__(self) -> int:
        return len(self.parts)

    def client(self, k: int) -> Samples:
        return self.pool.take(self.parts[k])

    def samples(self, k: int) -> int:
        return len(self.parts[k])

    def label_counts(self) -> NDArray[np.int64] | None:
        labels = self.pool.y.cpu()
        return _count_client_labels((labels[torch.from_numpy(part)] for part in self.parts), len(self), self.classes)


def _count_client_labels(labels: Iterable[Tensor], clients: int, classes: int) -> NDArray[np.int64] | None:
    """The table of `Federation.label_counts`, or None where it makes no sense."""
    if classes == 0 or clients > MOST_COUNTED:
        return None
    return np.stack([torch.bincount(y.flatten(), minlength=classes).numpy() for y in labels])


MOST_CLASSES = 100_000
"""More than this, and more than there are samples, are not believed unless somebody says so."""


class _PerClientDataset(FederatedDataset):
    """Each client's own samples, which `read(k)` gives; they are kept once read, unless `keep` is off."""

    def __init__(
        self,
        sizes: Sequence[int],
        read: Callable[[int], Samples],
        example: Samples,
        test: Samples | None,
        classes: int | None,
        name: str,
        prepare: InputTransform | None,
        keep: bool = True,
    ) -> None:
        if classes is not None and (not isinstance(classes, int | np.integer) or classes < 0):
            raise InputError(f"classes must be a whole number, 0 or more, not {short_repr(classes)}.")
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
        return _count_client_labels((self.client(k).y for k in range(len(self))), len(self), self.classes)


def _federate_arrays(
    clients: Sequence[tuple[Array, Array]],
    test: tuple[Array, Array] | Samples | None,
    classes: int | None,
    name: str,
    prepare: InputTransform | None,
) -> _PerClientDataset:
    """See `Federation.from_arrays`."""
    held = [_samples(*_pair(client, f"client {k}"), f"client {k}") for k, client in enumerate(clients)]
    sizes = [len(samples) for samples in held]
    example = held[_first(sizes, name)]
    if test is not None and not isinstance(test, Samples):
        test = _samples(*_pair(test, "the test set"), "the test set")
    federation = _PerClientDataset(sizes, held.__getitem__, example, test, classes, name, prepare)
    for k in range(len(held)):
        federation.client(k)  # what is wrong with arrays at hand is said now, not in the middle of a run
    if example.are_tokens:
        parts = [samples.x for samples in (*held, federation.test) if samples is not None and samples.x.numel()]
        federation.tokens = 1 + max(int(x.max()) for x in parts)
    return federation


def _pair(given: object, who: str) -> tuple[Array, Array]:
    """One client's inputs and labels; an array that has two rows is no pair of them."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"{who} is {short_repr(given)}; expected a pair (x, y) of its inputs and its labels.")
    return given[0], given[1]


def _federate_datasets(
    datasets: Sequence[TorchDataset[Any]],
    test: TorchDataset[Any] | Samples | None,
    classes: int | None,
    name: str,
    prepare: InputTransform | None,
    keep: bool,
) -> _PerClientDataset:
    """See `Federation.from_datasets`."""
    sizes = [_size(data, f"client {k}") for k, data in enumerate(datasets)]
    first = _first(sizes, name)
    example = _read(datasets[first], 1, f"client {first}")
    if test is not None and not isinstance(test, Samples):
        test = _read(test, _size(test, "the test set"), "the test set")

    def read(k: int) -> Samples:
        return _read(datasets[k], sizes[k], f"client {k}")

    return _PerClientDataset(sizes, read, example, test, classes, name, prepare, keep)


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
    elif is_integer_target(inputs):
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
