"""Partitions that the data bring along: whose sample it is, or which domain it comes from."""

import numpy as np

from fedloom.data.content import NOBODY
from fedloom.data.partitions.request import Indices, Request, parts_of
from fedloom.errors import InputError


def natural(request: Request) -> list[Indices]:
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
    client_of = np.full(len(sizes), NOBODY, dtype=np.int64)
    client_of[chosen] = np.arange(clients)
    return parts_of(client_of[owners], clients)


def by_domain(request: Request) -> list[Indices]:
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
    owner = np.full(len(domains), NOBODY, dtype=np.int64)
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
    return parts_of(owner, clients)
