"""Partitions that the data bring along: whose sample it is, or which domain it comes from.

Partitions that need no draw from a distribution of shares: iid, shards, k labels a client.
"""

import numpy as np

from fedloom.data.dataset import NO_OWNER
from fedloom.data.partitions.base import Indices, PartitionRequest, partition_from_assignment
from fedloom.errors import InputError


def partition_natural(request: PartitionRequest) -> list[Indices]:
    """A client for each owner (writer, speaker, user) with enough samples, or for some of them, drawn by the seed.

    As LEAF does it: owners with few samples are dropped and a sample of the others is taken. Clients are in the
    order of the owners in the data.
    """
    request.no_value()
    owners, least = request.pool.owners, request.least(1)
    if owners is None:
        raise InputError(
            f"the data set {request.pool.name!r} does not say whose sample is whose; partition 'natural' wants a data "
            "set that does (by writer, speaker or user, or a column of a table)."
        )
    sizes = np.bincount(owners)
    fit = np.flatnonzero(sizes >= max(least, 1))
    several = f"{np.count_nonzero(sizes)} owners in {request.pool.name!r}"
    if len(fit) == 0:
        raise InputError(f"none of the {several} has {least} samples; the largest has {sizes.max()}.")
    clients = len(fit) if request.asked is None else request.asked
    if clients > len(fit):
        enough = f", and {len(fit)} with {least} samples or more" if least > 1 else ""
        raise InputError(f"there are {several}{enough}, but {clients} clients were asked for.")
    chosen = np.sort(request.rng.choice(fit, clients, replace=False))
    client_of = np.full(len(sizes), NO_OWNER, dtype=np.int64)
    client_of[chosen] = np.arange(clients)
    return partition_from_assignment(client_of[owners], clients)


def partition_by_domain(request: PartitionRequest) -> list[Indices]:
    """A client for each domain; with more clients, client k holds an even, random part of domain k mod D.

    With fewer clients than domains, the first domains get one and the others are left out.
    """
    request.no_value()
    domains = request.pool.domains
    if domains is None:
        raise InputError(
            f"the data set {request.pool.name!r} has no domains; partition 'domain' wants a data set made of several, "
            "such as image folders with one for each domain."
        )
    found, place = np.unique(domains, return_inverse=True)
    clients = len(found) if request.asked is None else request.asked
    owner = np.full(len(domains), NO_OWNER, dtype=np.int64)
    for at in range(min(len(found), clients)):
        here = np.arange(at, clients, len(found))
        positions = np.flatnonzero(place == at)
        if len(positions) < len(here):
            names = request.pool.domain_names
            name = names[found[at]] if found[at] < len(names) else str(found[at])
            raise InputError(
                f"{len(here)} clients are to share the domain {name!r}, which has only {len(positions)} samples; ask "
                "for fewer clients."
            )
        owner[request.rng.permutation(positions)] = here[np.arange(len(positions)) % len(here)]
    return partition_from_assignment(owner, clients)


def partition_iid(request: PartitionRequest) -> list[Indices]:
    """A random part for everyone; sizes differ by one at most."""
    request.no_value()
    return partition_from_assignment(
        request.rng.permutation(np.arange(len(request.pool)) % request.clients), request.clients
    )


def partition_shards(request: PartitionRequest) -> list[Indices]:
    """Samples sorted by label and cut into equal shards, as many random ones for each client (McMahan et al., 2017)."""
    each = request.whole("shards:2")
    clients, n = request.clients, len(request.pool)
    count = clients * each
    if count > n:
        raise InputError(f"cannot cut {n} samples into {clients} x {each} shards; expected at most {n} shards.")
    owner_of_shard = request.rng.permutation(np.arange(count) % clients)
    owner = np.empty(n, dtype=np.int64)
    owner[np.argsort(request.pool.labels, kind="stable")] = owner_of_shard[np.arange(n) * count // n]
    return partition_from_assignment(owner, clients)


def partition_k_labels(request: PartitionRequest) -> list[Indices]:
    """Client i holds label i mod C and k - 1 random others; a label is split evenly among its holders.

    NIID-Bench's "#label = k" (Li et al., 2022). With few clients nobody may hold a label; its samples are left out.
    """
    k, classes = request.whole("labels:2"), request.classes()
    clients, count = request.clients, int(classes.max()) + 1
    if k > count:
        raise InputError(f"labels:{k} gives each client {k} labels, but there are only {count}; ask for fewer.")
    holders: list[list[int]] = [[] for _ in range(count)]
    for client in range(clients):
        first = client % count
        others = np.delete(np.arange(count), first)
        for label in (first, *request.rng.choice(others, k - 1, replace=False)):
            holders[label].append(client)
    owner = np.full(len(classes), NO_OWNER, dtype=np.int64)
    for label, held_by in enumerate(holders):
        positions = request.rng.permutation(np.flatnonzero(classes == label))
        if len(positions) < len(held_by):
            name = np.unique(request.pool.labels)[label]
            raise InputError(
                f"{len(held_by)} clients are to hold label {name}, which only {len(positions)} samples have; ask for "
                "fewer clients or fewer labels a client."
            )
        for client, part in zip(held_by, np.array_split(positions, max(len(held_by), 1)), strict=False):
            owner[part] = client
    return partition_from_assignment(owner, clients)
