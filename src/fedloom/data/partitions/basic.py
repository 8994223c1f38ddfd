"""Simple partitions: iid, shards, k labels, by owner, by domain."""

import numpy as np

from fedloom.data.dataset import NO_OWNER
from fedloom.data.partitions.base import Indices, PartitionRequest, partition_from_assignment
from fedloom.errors import InputError


def partition_natural(request: PartitionRequest) -> list[Indices]:
    """Make a client of each owner (writer, speaker, user) with enough samples, or of a random part of the owners.

    As in LEAF, owners with few samples are dropped. Clients are in the order of the owners in the data.
    """
    request.refuse_value()
    owners, min_examples = request.pool.owners, request.min_examples(1)
    if owners is None:
        raise InputError(
            f"the data set {request.pool.name!r} does not say whose sample is whose; partition 'natural' wants a data "
            "set that does (by writer, speaker or user, or a column of a table)."
        )
    sizes = np.bincount(owners)
    fit = np.flatnonzero(sizes >= max(min_examples, 1))
    several = f"{np.count_nonzero(sizes)} owners in {request.pool.name!r}"
    if len(fit) == 0:
        raise InputError(f"none of the {several} has {min_examples} samples; the largest has {sizes.max()}.")
    num_clients = len(fit) if request.requested_num_clients is None else request.requested_num_clients
    if num_clients > len(fit):
        enough = f", and {len(fit)} with {min_examples} samples or more" if min_examples > 1 else ""
        raise InputError(f"there are {several}{enough}, but {num_clients} clients were asked for.")
    chosen = np.sort(request.rng.choice(fit, num_clients, replace=False))
    client_of = np.full(len(sizes), NO_OWNER, dtype=np.int64)
    client_of[chosen] = np.arange(num_clients)
    return partition_from_assignment(client_of[owners], num_clients)


def partition_by_domain(request: PartitionRequest) -> list[Indices]:
    """Make a client of each of the D domains; with more clients, client k gets an even, random part of domain k mod D.

    With fewer clients than domains, the last domains are left out.
    """
    request.refuse_value()
    domains = request.pool.domains
    if domains is None:
        raise InputError(
            f"the data set {request.pool.name!r} has no domains; partition 'domain' wants a data set made of several, "
            "such as image folders with one for each domain."
        )
    found, place = np.unique(domains, return_inverse=True)
    num_clients = len(found) if request.requested_num_clients is None else request.requested_num_clients
    assignment = np.full(len(domains), NO_OWNER, dtype=np.int64)
    for at in range(min(len(found), num_clients)):
        here = np.arange(at, num_clients, len(found))
        positions = np.flatnonzero(place == at)
        if len(positions) < len(here):
            names = request.pool.domain_names
            name = names[found[at]] if found[at] < len(names) else str(found[at])
            raise InputError(
                f"{len(here)} clients are to share the domain {name!r}, which has only {len(positions)} samples; ask "
                "for fewer clients."
            )
        assignment[request.rng.permutation(positions)] = here[np.arange(len(positions)) % len(here)]
    return partition_from_assignment(assignment, num_clients)


def partition_iid(request: PartitionRequest) -> list[Indices]:
    """Give each client a random part; sizes differ by at most one."""
    request.refuse_value()
    return partition_from_assignment(
        request.rng.permutation(np.arange(len(request.pool)) % request.num_clients), request.num_clients
    )


def partition_shards(request: PartitionRequest) -> list[Indices]:
    """Sort by label, cut into equal shards, and give each client as many random shards (McMahan et al., 2017)."""
    each = request.integer_value("shards:2")
    num_clients, n = request.num_clients, len(request.pool)
    count = num_clients * each
    if count > n:
        raise InputError(f"cannot cut {n} samples into {num_clients} x {each} shards; expected at most {n} shards.")
    client_of_shard = request.rng.permutation(np.arange(count) % num_clients)
    assignment = np.empty(n, dtype=np.int64)
    assignment[np.argsort(request.pool.labels, kind="stable")] = client_of_shard[np.arange(n) * count // n]
    return partition_from_assignment(assignment, num_clients)


def partition_k_labels(request: PartitionRequest) -> list[Indices]:
    """Give client i label i mod C and k - 1 random others; split each label evenly among the clients that have it.

    NIID-Bench's "#label = k" (Li et al., 2022). With few clients a label may have no client: its samples are left out.
    """
    k, classes = request.integer_value("labels:2"), request.class_indices()
    num_clients, count = request.num_clients, int(classes.max()) + 1
    if k > count:
        raise InputError(f"labels:{k} gives each client {k} labels, but there are only {count}; ask for fewer.")
    holders: list[list[int]] = [[] for _ in range(count)]
    for client_id in range(num_clients):
        first = client_id % count
        others = np.delete(np.arange(count), first)
        for label in (first, *request.rng.choice(others, k - 1, replace=False)):
            holders[label].append(client_id)
    assignment = np.full(len(classes), NO_OWNER, dtype=np.int64)
    for label, held_by in enumerate(holders):
        positions = request.rng.permutation(np.flatnonzero(classes == label))
        if len(positions) < len(held_by):
            name = np.unique(request.pool.labels)[label]
            raise InputError(
                f"{len(held_by)} clients are to hold label {name}, which only {len(positions)} samples have; ask for "
                "fewer clients or fewer labels a client."
            )
        for client_id, part in zip(held_by, np.array_split(positions, max(len(held_by), 1)), strict=False):
            assignment[part] = client_id
    return partition_from_assignment(assignment, num_clients)
