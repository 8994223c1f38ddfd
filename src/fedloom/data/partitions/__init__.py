"""Partitions: which client holds which samples of a data set.

The schemes themselves are in `fedloom.data.partitions`; each gives disjoint parts, seeded by one generator.
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
    """A scheme: how it is written and what it does."""

    spec: str
    summary: str
    brings_clients: bool = False
    """Whether it knows by itself how many clients there are."""


def available_partitions() -> list[PartitionInfo]:
    """All schemes."""
    return [info for info, _ in SCHEMES.values()]


def partition_indices(spec: str, samples: PartitionPool | Labels, clients: int | None, rng: Rng) -> list[Indices]:
    """The sorted positions of each client's samples, by a scheme such as `dirichlet:0.1`.

    Labels are enough for most schemes; `natural` and `domain` want a `Pool` that says whose the samples are or where
    they come from. With these and `file`, `clients` may be None: as many as there are.
    """
    pool = samples if isinstance(samples, PartitionPool) else PartitionPool(samples)
    name, value, options = _parse(spec)
    if name not in SCHEMES:
        if _is_file(spec):
            raise InputError(f"{spec!r} is a file; name it as file:{spec}.")
        raise unknown_name_error("partition", name, SCHEMES)
    info, scheme = SCHEMES[name]
    if clients is not None and clients < 1:
        raise InputError(f"cannot share samples among {clients} clients; expected at least 1.")
    if not len(pool):
        raise InputError(f"{pool.name!r} has no samples to share.")
    if clients is not None and clients > len(pool) and not info.brings_clients:
        raise InputError(f"cannot share {len(pool)} samples among {clients} clients; expected fewer clients.")
    request = PartitionRequest(name, value, options, pool, clients, rng)
    parts = scheme(request)
    request.refuse_unread()
    return parts


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # nothing that a path can be
        return False


def partition_dataset(
    dataset: Dataset, spec: str, clients: int | None, rng: Rng, held: Indices | None = None
) -> PartitionedDataset:
    """The training samples of `dataset` shared among `clients`, and its test samples for the server.

    The samples at the positions `held` stay with the server: they are taken away before the rest is shared. Where
    clients are owners or domains, and it is known which test samples are theirs, these are the test set.
    """
    parts = _share(spec, make_partition_pool(dataset), clients, rng, held)
    test, whose = dataset.test, _own_tests(_parse(spec)[0], dataset, parts)
    if whose is not None and (whose == NO_OWNER).any():  # else the test set stays mapped into memory
        test, whose = test.take(np.flatnonzero(whose != NO_OWNER)), whose[whose != NO_OWNER]
    federation = PartitionedDataset(
        dataset.train,
        parts,
        classes=dataset.classes,
        shape=dataset.shape,
        prepare=dataset.prepare,
        test=test,
        name=dataset.name,
        tokens=dataset.tokens,
    )
    federation.test_owners = whose
    return federation


def _own_tests(name: str, dataset: Dataset, parts: list[Indices]) -> Indices | None:
    """The client of each test sample: of the same owner or domain. Clients of one domain take its samples in turn."""
    by_owner, by_domain = (dataset.owners, dataset.test_owners), (dataset.domains, dataset.test_domains)
    marks, test_marks = {"natural": by_owner, "domain": by_domain}.get(name, (None, None))
    if marks is None or test_marks is None:
        return None
    mark_of = np.array([marks[part[0]] for part in parts])
    whose = np.full(len(test_marks), NO_OWNER, dtype=np.int64)
    for mark in np.unique(mark_of):
        here, positions = np.flatnonzero(mark_of == mark), np.flatnonzero(test_marks == mark)
        whose[positions] = here[np.arange(len(positions)) % len(here)]
    return whose if (whose != NO_OWNER).any() else None


def _share(spec: str, pool: PartitionPool, clients: int | None, rng: Rng, held: Indices | None) -> list[Indices]:
    if held is None or not len(held):
        return partition_indices(spec, pool, clients, rng)
    if _parse(spec)[0] == "file":  # its positions are those of the whole data set
        return [part[~np.isin(part, held)] for part in partition_indices(spec, pool, clients, rng)]
    rest = np.setdiff1d(np.arange(len(pool)), held)
    return [rest[part] for part in partition_indices(spec, pool.take(rest), clients, rng)]


def _parse(spec: str) -> tuple[str, str, dict[str, str]]:
    """`name:value,key=value` in its parts."""
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
