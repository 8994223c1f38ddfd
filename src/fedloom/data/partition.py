"""Partitions: which client holds which samples of a data set.

Every scheme decides on an owner for each sample; the parts follow from that, so they are disjoint and
nothing is dropped by construction.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedloom.data.datasets import Dataset
from fedloom.data.federation import PooledFederation
from fedloom.errors import InputError, unknown

Indices = NDArray[np.int64]
Labels = NDArray[np.generic]
Rng = np.random.Generator

TRIES = 1000
SECONDS = 20.0
SMALLEST = 1e-3
"""An alpha of dirichlet-equal: with less, clients hold one class wherever they can, as they do with this."""


@dataclass(frozen=True)
class PartitionInfo:
    """A scheme: how it is written and what it does."""

    spec: str
    summary: str


def catalogue() -> list[PartitionInfo]:
    """All schemes."""
    return [info for info, _ in SCHEMES.values()]


def partition(spec: str, labels: Labels, clients: int, rng: Rng) -> list[Indices]:
    """The sorted positions of each client's samples, by a scheme such as `dirichlet:0.1`."""
    name, value, options = _parse(spec)
    if name not in SCHEMES:
        raise unknown("partition", name, SCHEMES)
    if clients < 1:
        raise InputError(f"cannot share samples among {clients} clients; expected at least 1.")
    if clients > len(labels):
        raise InputError(f"cannot share {len(labels)} samples among {clients} clients; expected fewer clients.")
    owner = SCHEMES[name][1](value, options, labels, clients, rng)
    if options:
        raise InputError(f"partition {name!r} has no option {next(iter(options))!r}.")
    order = np.argsort(owner, kind="stable").astype(np.int64)
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def build(dataset: Dataset, spec: str, clients: int, rng: Rng) -> PooledFederation:
    """The training samples of `dataset` shared among `clients`, and its test samples for the server."""
    parts = partition(spec, dataset.train.y.numpy(), clients, rng)
    return PooledFederation(
        dataset.train,
        parts,
        classes=dataset.classes,
        shape=dataset.shape,
        prepare=dataset.prepare,
        test=dataset.test,
        name=dataset.name,
    )


def _iid(value: str, _options: dict[str, str], labels: Labels, clients: int, rng: Rng) -> Indices:
    if value:
        raise InputError(f"partition 'iid' takes no value; {value!r} was given.")
    return rng.permutation(np.arange(len(labels)) % clients)


def _shards(value: str, _options: dict[str, str], labels: Labels, clients: int, rng: Rng) -> Indices:
    each = _whole(value, "shards", 1)
    shards, n = clients * each, len(labels)
    if shards > n:
        raise InputError(f"cannot cut {n} samples into {clients} x {each} shards; expected at most {n} shards.")
    owner_of_shard = rng.permutation(np.arange(shards) % clients)
    owner = np.empty(n, dtype=np.int64)
    owner[np.argsort(labels, kind="stable")] = owner_of_shard[np.arange(n) * shards // n]
    return owner


def _dirichlet(value: str, options: dict[str, str], labels: Labels, clients: int, rng: Rng) -> Indices:
    alpha = _positive(value, "dirichlet")
    least = _whole(options.pop("min", "10"), "min", 0)
    n = len(labels)
    _want_classes(labels, "dirichlet")
    if least * clients > n:
        raise InputError(
            f"cannot give {clients} clients {least} samples each out of {n}; ask for fewer clients or a smaller min."
        )
    _, inverse = np.unique(labels, return_inverse=True)
    shares = _class_shares(alpha, least, np.bincount(inverse), clients, rng)
    return _deal(shares, inverse, rng)


def _want_classes(labels: Labels, name: str) -> None:
    if not np.issubdtype(labels.dtype, np.integer):
        raise InputError(f"partition {name!r} wants integer labels; these are {labels.dtype}.")


def _deal(shares: Indices, inverse: Indices, rng: Rng) -> Indices:
    """The owners, when of each class (row) each client (column) gets so many samples, whichever they are."""
    owner = np.empty(len(inverse), dtype=np.int64)
    for label, share in enumerate(shares):
        owner[rng.permutation(np.flatnonzero(inverse == label))] = np.repeat(np.arange(len(share)), share)
    return owner


def _class_shares(alpha: float, least: int, class_sizes: Indices, clients: int, rng: Rng) -> Indices:
    """How many samples of each class (row) each client (column) gets: drawn until all have `least`."""
    n = int(class_sizes.sum())
    shares = np.zeros((len(class_sizes), clients), dtype=np.int64)
    best, tries, end = -1, 0, time.monotonic() + SECONDS
    while tries < TRIES and (tries == 0 or time.monotonic() < end):
        tries += 1
        held = np.zeros(clients, dtype=np.int64)
        for label, size in enumerate(class_sizes):
            # Clients that hold their even share get nothing more. Dropping them from a Dirichlet draw and
            # renormalising it is the same as a draw over the others, which cannot end up all zero.
            open_ = np.flatnonzero(held < n / clients)
            ends = np.cumsum(_draw(alpha, len(open_), rng))
            cuts = (ends / ends[-1] * size).astype(np.int64)
            shares[label] = 0
            shares[label, open_] = np.diff(cuts, prepend=0)
            held += shares[label]
        if held.min() >= least:
            return shares
        best = max(best, int(held.min()))
    raise InputError(
        f"none of {tries} draws of dirichlet:{alpha:g} gave each of {clients} clients {least} of the {n} "
        f"samples (the smallest client had {best} at best); ask for a larger alpha, fewer clients or "
        "a smaller min."
    )


def _dirichlet_equal(value: str, _options: dict[str, str], labels: Labels, clients: int, rng: Rng) -> Indices:
    alpha = _positive(value, "dirichlet-equal")
    _want_classes(labels, "dirichlet-equal")
    _, inverse = np.unique(labels, return_inverse=True)
    sizes = np.bincount(inverse)
    # A Dirichlet draw is a row of Gamma(alpha) draws divided by its sum. We balance rows and columns anyway, so the
    # sum does not matter; and we keep logarithms, because at a small alpha most of the draws would underflow.
    alpha, shape = max(alpha, SMALLEST), (len(sizes), clients)
    logs = np.log(rng.standard_gamma(alpha + 1, shape)) + np.log1p(-rng.random(shape)) / alpha
    balanced = _balance(logs, sizes, len(labels) / clients)
    ends = np.cumsum(balanced, axis=1)
    cuts = np.rint(ends / ends[:, -1:] * sizes[:, None]).astype(np.int64)
    return _deal(_level(np.diff(cuts, axis=1, prepend=0), len(sizes)), inverse, rng)


def _balance(logs: NDArray[np.float64], sizes: Indices, each: float) -> NDArray[np.float64]:
    """Scale rows and columns in turn until row c sums to `sizes[c]` and every column to `each`, or nearly so."""
    for _ in range(TRIES):
        logs = logs - logsumexp(logs, axis=0, keepdims=True) + np.log(each)
        rows = logsumexp(logs, axis=1)
        if np.abs(np.exp(rows) - sizes).max() < 0.5:
            break
        logs = logs - (rows - np.log(sizes))[:, None]
    return np.asarray(np.exp(logs))


def _level(shares: Indices, slack: int) -> Indices:
    """Move single samples from the largest client to the smallest until no two differ by more than `slack`.

    Balancing does not always come to its end, and cutting rounds. The sample moved is of the class of which the
    smaller client already has most, so that nobody gets a new class without need.
    """
    held = shares.sum(axis=0)
    while held.max() - held.min() > slack:
        largest, smallest = int(held.argmax()), int(held.argmin())
        label = int(np.where(shares[:, largest] > 0, shares[:, smallest], -1).argmax())
        shares[label, [largest, smallest]] += (-1, 1)
        held[[largest, smallest]] += (-1, 1)
    return shares


def _draw(alpha: float, size: int, rng: Rng) -> NDArray[np.float64]:
    """A Dirichlet draw; at an alpha so extreme that it over- or underflows, the limit it stands for."""
    with np.errstate(all="ignore"):
        draw = rng.dirichlet(np.full(size, alpha))
    if np.isfinite(draw).all() and draw.sum() > 0.5:
        return draw
    return np.ones(size) if alpha > 1 else np.eye(1, size, int(rng.integers(size)))[0]


def _parse(spec: str) -> tuple[str, str, dict[str, str]]:
    """`name:value,key=value` in its parts."""
    head, *rest = spec.strip().split(",")
    name, _, value = head.partition(":")
    pairs = [item.partition("=") for item in rest]
    if bad := next((item for item, (key, mark, _) in zip(rest, pairs, strict=True) if not (key and mark)), None):
        raise InputError(f"cannot read {bad!r} in the partition {spec!r}; expected an option such as min=10.")
    return name.strip(), value.strip(), {key.strip(): given.strip() for key, _, given in pairs}


def _whole(text: str, what: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise InputError(f"{what} is {text!r}; expected a whole number of at least {least}, as in shards:2.")
    return number


def _positive(text: str, name: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not 0 < alpha < math.inf:
        raise InputError(f"the alpha of {name!r} is {text!r}; expected a number above 0, as in {name}:0.1.")
    return alpha


Scheme = Callable[[str, dict[str, str], Labels, int, Rng], Indices]

SCHEMES: dict[str, tuple[PartitionInfo, Scheme]] = {
    "iid": (PartitionInfo("iid", "a random, equally large part for everyone"), _iid),
    "dirichlet": (
        PartitionInfo("dirichlet:A[,min=M]", "shares of each class drawn from Dirichlet(A): small A, large skew"),
        _dirichlet,
    ),
    "dirichlet-equal": (
        PartitionInfo("dirichlet-equal:A", "Dirichlet(A) shares, balanced until all clients are equally large"),
        _dirichlet_equal,
    ),
    "shards": (
        PartitionInfo("shards:S", "sorted by label, cut into shards, S random ones for everyone"),
        _shards,
    ),
}
