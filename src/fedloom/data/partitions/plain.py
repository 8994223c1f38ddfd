"""Partitions that need no draw from a distribution of shares: iid, shards, k labels a client."""

import numpy as np

from fedloom.data.content import NOBODY
from fedloom.data.partitions.request import Indices, Request, parts_of
from fedloom.errors import InputError


def iid(request: Request) -> list[Indices]:
    """A random part for everyone; sizes differ by one at most."""
    request.no_value()
    return parts_of(request.rng.permutation(np.arange(len(request.pool)) % request.clients), request.clients)


def shards(request: Request) -> list[Indices]:
    """Samples sorted by label and cut into equal shards, as many random ones for each client (McMahan et al., 2017)."""
    each = request.whole("shards:2")
    clients, n = request.clients, len(request.pool)
    count = clients * each
    if count > n:
        raise InputError(f"cannot cut {n} samples into {clients} x {each} shards; expected at most {n} shards.")
    owner_of_shard = request.rng.permutation(np.arange(count) % clients)
    owner = np.empty(n, dtype=np.int64)
    owner[np.argsort(request.pool.labels, kind="stable")] = owner_of_shard[np.arange(n) * count // n]
    return parts_of(owner, clients)


def some_labels(request: Request) -> list[Indices]:
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
    owner = np.full(len(classes), NOBODY, dtype=np.int64)
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
    return parts_of(owner, clients)
