"""Partition a data set among clients by a scheme such as `dirichlet:0.1`.

A scheme is a function from a `PartitionRequest` to disjoint arrays of positions, one per client.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.data.dataset import NO_OWNER, Dataset
from fedloom.data.federated import PartitionedDataset
from fedloom.data.partitions import basic, dirichlet, files
from fedloom.data.partitions.base import Indices, Labels, PartitionPool, PartitionRequest, Rng, make_partition_pool
from fedloom.errors import InputError, unknown_name_error

Scheme = Callable[[PartitionRequest], list[Indices]]


@dataclass(frozen=True)
class PartitionInfo:
    """A partition scheme of `available_partitions`."""

    spec: str
    summary: str
    determines_num_clients: bool = False
    """Whether the scheme determines the number of clients if you do not give it."""


def available_partitions() -> list[PartitionInfo]:
    """Return all partition schemes."""
    return [info for info, _ in SCHEMES.values()]


def partition_indices(spec: str, samples: PartitionPool | Labels, num_clients: int | None, rng: Rng) -> list[Indices]:
    """Partition samples among clients.

    Args:
        spec: The scheme, such as "iid", "dirichlet:0.1" or "shards:2"; see `available_partitions`.
        samples: The labels. The schemes `natural` and `domain` need a `PartitionPool` with owners or domains.
        num_clients: Number of clients. With `natural`, `domain` and `file` it may be None: as many as there are.
        rng: Source of all draws.

    Returns:
        The sorted positions of each client's samples.

    Raises:
        InputError: If the scheme is unknown or cannot partition these samples.

    Example:
        >>> parts = partition_indices("iid", np.arange(100) % 10, 4, np.random.default_rng(0))
        >>> [len(part) for part in parts]
        [25, 25, 25, 25]
    """
    pool = samples if isinstance(samples, PartitionPool) else PartitionPool(samples)
    name, value, options = _parse(spec)
    if name not in SCHEMES:
        if _is_file(spec):
            raise InputError(f"{spec!r} is a file; name it as file:{spec}.")
        raise unknown_name_error("partition", name, SCHEMES)
    info, scheme = SCHEMES[name]
    if num_clients is not None and num_clients < 1:
        raise InputError(f"cannot share samples among {num_clients} clients; expected at least 1.")
    if not len(pool):
        raise InputError(f"{pool.name!r} has no samples to share.")
    if num_clients is not None and num_clients > len(pool) and not info.determines_num_clients:
        raise InputError(f"cannot share {len(pool)} samples among {num_clients} clients; expected fewer clients.")
    request = PartitionRequest(name, value, options, pool, num_clients, rng)
    client_indices = scheme(request)
    request.refuse_unused_options()
    return client_indices


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # not a valid path
        return False


def partition_dataset(
    dataset: Dataset, spec: str, num_clients: int | None, rng: Rng, server_indices: Indices | None = None
) -> PartitionedDataset:
    """Partition the training samples of a data set among clients.

    The test samples are the common test set. If clients are owners or domains, and the test samples have owners or
    domains too, only the test samples of the clients are used.

    Args:
        dataset: The data set.
        spec: The scheme, such as "dirichlet:0.1"; see `available_partitions`.
        num_clients: Number of clients, or None if the scheme determines it.
        rng: Source of all draws.
        server_indices: Positions of training samples that no client gets.

    Returns:
        The clients and their samples.

    Raises:
        InputError: If the scheme is unknown or cannot partition these samples.

    Example:
        >>> from fedloom.data import load_dataset
        >>> digits = load_dataset("digits")
        >>> len(partition_dataset(digits, "dirichlet:0.5", 10, np.random.default_rng(0)))
        10
    """
    client_indices = _share(spec, make_partition_pool(dataset), num_clients, rng, server_indices)
    test, test_owners = dataset.test, _own_tests(_parse(spec)[0], dataset, client_indices)
    if test_owners is not None and (test_owners == NO_OWNER).any():  # take() copies, so use it only if needed
        test, test_owners = test.take(np.flatnonzero(test_owners != NO_OWNER)), test_owners[test_owners != NO_OWNER]
    federated_data = PartitionedDataset(
        dataset.train,
        client_indices,
        classes=dataset.classes,
        shape=dataset.shape,
        transform=dataset.transform,
        test=test,
        name=dataset.name,
        vocabulary_size=dataset.vocabulary_size,
    )
    federated_data.test_owners = test_owners
    return federated_data


def _own_tests(name: str, dataset: Dataset, client_indices: list[Indices]) -> Indices | None:
    """Return the client of each test sample, by owner or domain; clients of one domain take its samples in turn."""
    by_owner, by_domain = (dataset.owners, dataset.test_owners), (dataset.domains, dataset.test_domains)
    marks, test_marks = {"natural": by_owner, "domain": by_domain}.get(name, (None, None))
    if marks is None or test_marks is None:
        return None
    mark_of = np.array([marks[part[0]] for part in client_indices])
    whose = np.full(len(test_marks), NO_OWNER, dtype=np.int64)
    for mark in np.unique(mark_of):
        here, positions = np.flatnonzero(mark_of == mark), np.flatnonzero(test_marks == mark)
        whose[positions] = here[np.arange(len(positions)) % len(here)]
    return whose if (whose != NO_OWNER).any() else None


def _share(
    spec: str, pool: PartitionPool, num_clients: int | None, rng: Rng, server_indices: Indices | None
) -> list[Indices]:
    if server_indices is None or not len(server_indices):
        return partition_indices(spec, pool, num_clients, rng)
    if _parse(spec)[0] == "file":  # a file lists positions in the whole data set
        return [part[~np.isin(part, server_indices)] for part in partition_indices(spec, pool, num_clients, rng)]
    rest = np.setdiff1d(np.arange(len(pool)), server_indices)
    return [rest[part] for part in partition_indices(spec, pool.take(rest), num_clients, rng)]


def _parse(spec: str) -> tuple[str, str, dict[str, str]]:
    """Parse `name:value,key=value`."""
    if spec.strip().startswith("file:"):
        return "file", spec.strip().removeprefix("file:"), {}  # a path may hold any character
    head, *rest = spec.strip().split(",")
    name, _, value = head.partition(":")
    pairs = [item.partition("=") for item in rest]
    if bad := next((item for item, (key, mark, _) in zip(rest, pairs, strict=True) if not (key and mark)), None):
        raise InputError(f"cannot read {bad!r} in the partition {spec!r}; expected an option such as min=10.")
    return name.strip(), value.strip(), {key.strip(): given.strip() for key, _, given in pairs}


SCHEMES: dict[str, tuple[PartitionInfo, Scheme]] = {
    info.spec.partition(":")[0].partition("[")[0]: (info, scheme)
    for info, scheme in (
        (PartitionInfo("iid", "a random, equally large part for everyone"), basic.partition_iid),
        (
            PartitionInfo("dirichlet:A[,min=M]", "shares of each class drawn from Dirichlet(A): small A, large skew"),
            dirichlet.partition_dirichlet_by_class,
        ),
        (
            PartitionInfo(
                "dirichlet-blocks:A[,block=B]", "the same in blocks of ten clients, then cut into equal sizes (Lin)"
            ),
            dirichlet.partition_dirichlet_blocks,
        ),
        (
            PartitionInfo(
                "dirichlet-client:A[,prior=ones]",
                "labels of each client drawn from its own Dirichlet(A x prior), equal sizes (Hsu)",
            ),
            dirichlet.partition_dirichlet_by_client,
        ),
        (
            PartitionInfo("dirichlet-equal:A", "Dirichlet(A) shares, balanced until all clients are equally large"),
            dirichlet.partition_dirichlet_balanced,
        ),
        (
            PartitionInfo("shards:S", "sorted by label, cut into shards, S random ones for everyone"),
            basic.partition_shards,
        ),
        (
            PartitionInfo("labels:K", "K labels for everyone, each split evenly among its holders"),
            basic.partition_k_labels,
        ),
        (
            PartitionInfo("quantity:A[,min=M]", "sizes drawn from Dirichlet(A), labels at random"),
            dirichlet.partition_dirichlet_sizes,
        ),
        (
            PartitionInfo("natural[,min=M]", "a client for each owner: writer, speaker, user, column", True),
            basic.partition_natural,
        ),
        (
            PartitionInfo("domain", "each client holds one domain of the data, all or part of it", True),
            basic.partition_by_domain,
        ),
        (PartitionInfo("file:PATH", "positions listed in a file, JSON or npz", True), files.partition_from_file),
    )
}
