"""Who holds what: the clients of a run and their samples."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fedloom.data.samples import Array, Prepare, Samples
from fedloom.errors import InputError

MOST_COUNTED = 2000
"""Above this many clients nobody reads a table of label counts, and making it may mean making all data."""


class Federation(ABC):
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
    prepare: Prepare = Prepare.identity()
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
        prepare: Prepare | None = None,
    ) -> "Federation":
        """A federation of each client's own `(x, y)`, numpy arrays or tensors; a client may be empty.

        uint8 arrays n x H x W x C are images, scaled to 0..1 unless `prepare` says otherwise; other integers are
        tokens and reach the network as int64; every other array is network input as float32. Integer labels make
        a classification with as many classes as the largest label says, unless `classes` does; float labels make
        a regression.
        """
        from fedloom.data.own import federate_arrays

        return federate_arrays(clients, test, classes, name, prepare)

    @staticmethod
    def from_datasets(
        datasets: Sequence[TorchDataset[Any]],
        test: TorchDataset[Any] | Samples | None = None,
        classes: int | None = None,
        name: str = "own",
        prepare: Prepare | None = None,
        keep: bool = True,
    ) -> "Federation":
        """A federation of map-style torch data sets with `(x, y)` items, one for each client.

        A data set is read when its client is first asked for and then kept, or read anew each time with
        `keep=False`. Without `classes` every item is read once at the start to see the labels.
        """
        from fedloom.data.own import federate_datasets

        return federate_datasets(datasets, test, classes, name, prepare, keep)


class PooledFederation(Federation):
    """One pool of samples, and for each client the positions of its own in `parts`."""

    def __init__(
        self,
        pool: Samples,
        parts: Sequence[NDArray[np.integer]],
        *,
        classes: int,
        shape: tuple[int, ...] | None = None,
        prepare: Prepare | None = None,
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
        return count_labels((labels[torch.from_numpy(part)] for part in self.parts), len(self), self.classes)


def count_labels(labels: Iterable[Tensor], clients: int, classes: int) -> NDArray[np.int64] | None:
    """The table of `Federation.label_counts`, or None where it makes no sense."""
    if classes == 0 or clients > MOST_COUNTED:
        return None
    return np.stack([torch.bincount(y.flatten(), minlength=classes).numpy() for y in labels])
