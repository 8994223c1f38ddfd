"""The base class `FederatedDataset`, and data sets split among clients.

The samples are one pool that is split, or separate data per client.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from fedloom.config import make_config
from fedloom.core.rng import RngStreams
from fedloom.data.array_samples import (
    check_array_sample_labels,
    count_array_classes,
    make_array_samples,
    match_array_samples,
)
from fedloom.data.samples import Array, InputTransform, Samples
from fedloom.errors import InputError
from fedloom.utils.formatting import short_repr

MOST_COUNTED = 2000
"""Clients up to which label counts are computed: a larger table is not useful, and may require loading all data."""


class FederatedDataset(ABC):
    """The clients of a run, the samples of each client, and the properties that a network depends on.

    A subclass provides `__len__`, `client_samples`, `classes` and `shape`. It may load samples on demand, so a million
    clients cost nothing until they train. `client_samples(k)` must return the same samples each time.

    Example:
        >>> import torch
        >>> clients = [(torch.rand(20, 8), torch.arange(20) % 2) for _ in range(3)]
        >>> data = FederatedDataset.from_arrays(clients)
        >>> len(data), data.classes, data.shape
        (3, 2, (8,))
    """

    name: str
    """Name in reports; the name of the class by default."""
    classes: int
    """Number of classes; 0 for a regression."""
    shape: tuple[int, ...]
    """Shape of one network input, such as (1, 28, 28)."""
    vocabulary_size: int = 0
    """Number of different tokens, if inputs are tokens; 0 if unknown."""
    transform: InputTransform = InputTransform.identity()
    test: Samples | None = None
    test_owners: NDArray[np.int64] | None = None
    """The client of each test sample, if each client has test samples of its own."""
    server_data: Samples | None = None
    """Samples of the server for methods that need them, with inputs like those of the clients."""
    is_remote: bool = False
    """Whether the samples are on other machines, so `client_samples` cannot return them."""
    is_in_memory: bool = False
    """Whether all samples are in memory, so that reading those of every client is cheap."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of clients."""

    @abstractmethod
    def client_samples(self, client_id: int) -> Samples:
        """Return the training samples of a client.

        Args:
            client_id: The client, from 0.
        """

    @property
    def available_client_ids(self) -> Sequence[int]:
        """The clients whose samples `client_samples` can return."""
        return () if self.is_remote else range(len(self))

    def num_examples(self, client_id: int) -> int:
        """Return the number of training samples of a client. Override it if you know it without loading them.

        Args:
            client_id: The client, from 0.
        """
        return len(self.client_samples(client_id))

    def label_counts(self) -> NDArray[np.int64] | None:
        """Return how often each client (row) has each class (column), or None if it is unknown or expensive."""
        return None

    @staticmethod
    def from_arrays(
        clients: Sequence[tuple[Array, Array]],
        test: tuple[Array, Array] | Samples | None = None,
        classes: int | None = None,
        name: str = "own",
        transform: InputTransform | None = None,
    ) -> "FederatedDataset":
        """Make a federated data set from one `(x, y)` pair per client.

        Inputs of dtype uint8 and shape n x H x W x C or n x H x W are images. Other integers are tokens and reach the
        network as int64. All other inputs reach it as float32. Integer labels mean classification, float labels
        regression.

        Args:
            clients: Inputs and labels of each client, as numpy arrays or tensors. A client may have no samples.
            test: Common test samples for the server.
            classes: Number of classes. By default the largest label plus 1.
            name: Name in reports.
            transform: Turns stored inputs into network inputs. By default images are scaled to 0..1.

        Returns:
            The federated data set, with all samples in memory.

        Raises:
            InputError: If the arrays of a client do not match each other or those of the other clients.
        """
        held = [make_array_samples(*_pair(client, f"client {k}"), f"client {k}") for k, client in enumerate(clients)]
        sizes = [len(samples) for samples in held]
        example = held[_first(sizes, name)]
        if test is not None and not isinstance(test, Samples):
            test = make_array_samples(*_pair(test, "the test set"), "the test set")
        federated_data = _PerClientDataset(sizes, held.__getitem__, example, test, classes, name, transform)
        federated_data.is_in_memory = True
        for k in range(len(held)):
            federated_data.client_samples(k)  # check the arrays now, not in the middle of a run
        if example.are_tokens:
            parts = [samples.x for samples in (*held, federated_data.test) if samples is not None and samples.x.numel()]
            federated_data.vocabulary_size = 1 + max(int(x.max()) for x in parts)
        return federated_data

    @staticmethod
    def from_pool(
        x: Array,
        y: Array,
        partition: str | None = None,
        clients: int | None = None,
        seed: int = 0,
        owner: Any = None,
        test: tuple[Array, Array] | float | None = None,
        name: str = "own",
    ) -> "PartitionedDataset":
        """Make a federated data set from one array of inputs and one of labels, split among clients.

        The types of arrays mean the same as in `from_arrays`. The command `fedloom run --data mine.npz` with the same
        arrays, partition, clients and seed makes the same clients.

        Args:
            x: Inputs, one row per sample.
            y: Labels, one per sample.
            partition: The scheme, such as "iid" or "dirichlet:0.1"; see `available_partitions`. By default "natural" if
                `owner` is given, else "dirichlet:0.3".
            clients: Number of clients. By default 20, or as many as the partition defines.
            seed: Seed of the partition.
            owner: The owner of each sample, integers or texts, for the partition "natural": one client per owner.
            test: Inputs and labels for testing, or the share of each owner's samples to hold out. By default 0.2.
            name: Name in reports.

        Returns:
            The clients and their samples.

        Raises:
            InputError: If the arrays do not match each other, or the partition cannot split them.

        Example:
            >>> import numpy as np
            >>> x, y = np.zeros((100, 4)), np.arange(100) % 2
            >>> len(FederatedDataset.from_pool(x, y, partition="iid", clients=5))
            5
        """
        from fedloom.data.array_pool import TEST_SHARE, make_array_dataset
        from fedloom.data.partitions import partition_dataset

        if not isinstance(test, int | float | tuple | list | None) or (
            isinstance(test, tuple | list) and len(test) != 2
        ):
            raise InputError(f"test is {short_repr(test)}; expected a pair (x, y), or a share above 0 and below 1.")
        if isinstance(test, int | float) and not 0 < test < 1:
            raise InputError(f"test is {test!r}; expected a share above 0 and below 1, or a pair (x, y).")
        plain = "dirichlet:0.3" if owner is None else "natural"
        config = make_config({"partition": partition or plain, "clients": clients, "seed": seed})
        held = TEST_SHARE if test is None else test if isinstance(test, int | float) else (test[0], test[1])
        dataset = make_array_dataset(x, y, owner=owner, test=held, name=name)
        return partition_dataset(dataset, config.partition, config.clients, RngStreams(config.seed).numpy("partition"))

    @staticmethod
    def from_datasets(
        datasets: Sequence[TorchDataset[Any]],
        test: TorchDataset[Any] | Samples | None = None,
        classes: int | None = None,
        name: str = "own",
        transform: InputTransform | None = None,
        keep_in_memory: bool = True,
    ) -> "FederatedDataset":
        """Make a federated data set from one map-style torch data set with `(x, y)` items per client.

        Args:
            datasets: The data set of each client. It is read when the client is used for the first time.
            test: Common test samples for the server.
            classes: Number of classes. Without it every item is read at the start to find the largest label.
            name: Name in reports.
            transform: Turns stored inputs into network inputs. By default images are scaled to 0..1.
            keep_in_memory: Whether to keep samples in memory after reading them. If False, read them again each time.

        Returns:
            The federated data set.

        Raises:
            InputError: If a data set has no length, or its items do not match those of the other clients.
        """
        sizes = [_size(data, f"client {k}") for k, data in enumerate(datasets)]
        first = _first(sizes, name)
        example = _read(datasets[first], 1, f"client {first}")
        if test is not None and not isinstance(test, Samples):
            test = _read(test, _size(test, "the test set"), "the test set")

        def read(k: int) -> Samples:
            return _read(datasets[k], sizes[k], f"client {k}")

        return _PerClientDataset(sizes, read, example, test, classes, name, transform, keep_in_memory)


class PartitionedDataset(FederatedDataset):
    """A pool of samples that is split among clients.

    Args:
        pool: All samples.
        client_indices: The positions of each client's samples in the pool; no two clients may share one.
        classes: Number of classes; 0 for a regression.
        shape: Shape of one network input. By default that of the pool.
        transform: Turns stored inputs into network inputs. By default images are scaled to 0..1.
        test: Common test samples for the server.
        name: Name in reports.
        vocabulary_size: Number of different tokens, if inputs are tokens.

    Raises:
        InputError: If a label or a position is out of range, or two clients share a sample.
    """

    def __init__(
        self,
        pool: Samples,
        client_indices: Sequence[NDArray[np.integer]],
        *,
        classes: int,
        shape: tuple[int, ...] | None = None,
        transform: InputTransform | None = None,
        test: Samples | None = None,
        name: str = "own",
        vocabulary_size: int = 0,
    ) -> None:
        # Copies: take() needs writable arrays, and a later change by the caller must have no effect.
        self.pool, self.client_indices = pool, [np.array(indices, dtype=np.int64) for indices in client_indices]
        self.classes, self.test, self.name, self.vocabulary_size = classes, test, name, vocabulary_size
        self.shape = pool.shape if shape is None else shape
        self.transform = pool.default_transform() if transform is None else transform
        if classes and len(pool) and (pool.y.min() < 0 or pool.y.max() >= classes):
            span = f"labels from {pool.y.min()} to {pool.y.max()}"
            raise InputError(f"the pool has {span}; expected labels from 0 to {classes - 1}.")
        used = np.zeros(len(pool), dtype=np.bool_)
        for client_id, indices in enumerate(self.client_indices):
            if indices.size and (indices.min() < 0 or indices.max() >= len(pool)):
                span = f"positions from {indices.min()} to {indices.max()}"
                raise InputError(f"client {client_id} holds {span}; the pool has {len(pool)} samples.")
            if used[indices].any() or len(np.unique(indices)) < len(indices):
                raise InputError(f"client {client_id} holds a sample that is already held; expected disjoint parts.")
            used[indices] = True

    def __len__(self) -> int:
        return len(self.client_indices)

    def client_samples(self, client_id: int) -> Samples:
        return self.pool.take(self.client_indices[client_id])

    def num_examples(self, client_id: int) -> int:
        return len(self.client_indices[client_id])

    def label_counts(self) -> NDArray[np.int64] | None:
        labels = self.pool.y.cpu()
        return _count_client_labels(
            (labels[torch.from_numpy(part)] for part in self.client_indices), len(self), self.classes
        )


def _count_client_labels(client_labels: Iterable[Tensor], num_clients: int, classes: int) -> NDArray[np.int64] | None:
    """Return the table of `FederatedDataset.label_counts`, or None for regressions and for many clients."""
    if classes == 0 or num_clients > MOST_COUNTED:
        return None
    return np.stack([torch.bincount(y.flatten(), minlength=classes).numpy() for y in client_labels])


class _PerClientDataset(FederatedDataset):
    """Separate samples of each client, read by `read_client(client_id)` and kept if `keep_in_memory` is set."""

    def __init__(
        self,
        sizes: Sequence[int],
        read_client: Callable[[int], Samples],
        example: Samples,
        test: Samples | None,
        classes: int | None,
        name: str,
        transform: InputTransform | None,
        keep_in_memory: bool = True,
    ) -> None:
        if classes is not None and (not isinstance(classes, int | np.integer) or classes < 0):
            raise InputError(f"classes must be a whole number, 0 or more, not {short_repr(classes)}.")
        self._sizes, self._read_client, self._example, self._keep_in_memory = (
            list(sizes),
            read_client,
            example,
            keep_in_memory,
        )
        self._samples_in_memory: dict[int, Samples] = {}
        self.name, self.shape = name, example.shape
        self.transform = example.default_transform() if transform is None else transform
        self.test = None if test is None else match_array_samples(test, example, "the test set")
        self.classes = 0
        if classes is None and not example.y.is_floating_point():
            labels = [self.client_samples(k).y for k in range(len(self))] + ([self.test.y] if self.test else [])
            classes = count_array_classes(labels, ", or say how many there are with classes")
        self.classes = classes or 0
        if self.test is not None:
            check_array_sample_labels(self.test.y, self.classes, "the test set")
        for k, held in self._samples_in_memory.items():
            check_array_sample_labels(held.y, self.classes, f"client {k}")

    def __len__(self) -> int:
        return len(self._sizes)

    def num_examples(self, client_id: int) -> int:
        return self._sizes[client_id]

    def client_samples(self, client_id: int) -> Samples:
        if client_id in self._samples_in_memory:
            return self._samples_in_memory[client_id]
        if self._sizes[client_id] == 0:
            return self._example.take(np.arange(0))
        samples = match_array_samples(self._read_client(client_id), self._example, f"client {client_id}")
        check_array_sample_labels(samples.y, self.classes, f"client {client_id}")
        if self._keep_in_memory:
            self._samples_in_memory[client_id] = samples
        return samples

    def label_counts(self) -> NDArray[np.int64] | None:
        if len(self._samples_in_memory) < np.count_nonzero(self._sizes):
            return None
        return _count_client_labels((self.client_samples(k).y for k in range(len(self))), len(self), self.classes)


def _pair(given: object, who: str) -> tuple[Array, Array]:
    """Return the inputs and labels of one client; an array with two rows is not a pair."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise InputError(f"{who} is {short_repr(given)}; expected a pair (x, y) of its inputs and its labels.")
    return given[0], given[1]


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
    """Read the first `size` items of a data set."""
    items = [data[i] for i in range(size)]
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise InputError(f"{who} has items that are not pairs; expected (x, y).")
    try:
        x, y = (np.stack([np.asarray(value) for value in column]) for column in zip(*items, strict=True))
    except ValueError:
        raise InputError(f"{who} has items of different shapes; expected one shape.") from None
    return make_array_samples(x, y, who)
