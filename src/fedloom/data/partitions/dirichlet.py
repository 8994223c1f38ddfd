"""Label skew by a Dirichlet draw for each class, and quantity skew by one for the sizes.

A draw that leaves some client with too little is drawn again, but not for ever: at a small alpha it may never succeed.

Label skew among clients of equal size: DynaFed's balanced Dirichlet, and Hsu's draw for each client.
"""

import time
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedloom.data.partitions.base import Indices, PartitionRequest, Rng, parse_integer_option, partition_from_assignment
from fedloom.errors import InputError


def _assign_by_class_counts(shares: Indices, classes: Indices, rng: Rng) -> Indices:
    """The owners, when of each class (row) each client (column) gets so many samples, whichever they are."""
    owner = np.empty(len(classes), dtype=np.int64)
    for label, share in enumerate(shares):
        owner[rng.permutation(np.flatnonzero(classes == label))] = np.repeat(np.arange(len(share)), share)
    return owner


TRIES = 1000
SECONDS = 20.0
OTHERWISE = "fewer clients or a smaller min, or use dirichlet-equal"


@dataclass
class _RetryLimit:
    """How often one draws again before giving up; `best` is the smallest client of the best draw."""

    tries: int = 0
    best: int = -1
    end: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def more(self) -> bool:
        """Whether to draw (again)."""
        self.tries += 1
        return self.tries <= TRIES and (self.tries == 1 or time.monotonic() < self.end)

    def give_up(self, draws: str, clients: str, least: int, of: str, smaller: str) -> InputError:
        return InputError(
            f"none of {self.tries - 1} draws of {draws} gave each of {clients} {least} of the {of} (the smallest "
            f"client had {self.best} at best); ask for a larger alpha, {smaller}."
        )


def partition_dirichlet_by_class(request: PartitionRequest) -> list[Indices]:
    """Class by class, shares drawn from Dirichlet(alpha): NIID-Bench's procedure, with its balance and its minimum."""
    alpha, least = request.alpha(), request.least(10)
    classes = request.classes()
    request.enough(least)
    patience = _RetryLimit()
    shares = _class_shares(alpha, least, np.bincount(classes), request.clients, request.rng, patience)
    if shares is None:
        draws, clients = f"dirichlet:{alpha:g}", f"{request.clients} clients"
        raise patience.give_up(draws, clients, least, f"{len(classes)} samples", OTHERWISE)
    return partition_from_assignment(_assign_by_class_counts(shares, classes, request.rng), request.clients)


def partition_dirichlet_blocks(request: PartitionRequest) -> list[Indices]:
    """The same in blocks of ten clients, then equal slices: Lin et al., 2020, as in their code.

    The samples are cut at random into one part for each block of clients. Within it, classes are shared out until
    every client has half the mean size. The samples, client by client, are then cut anew into slices of equal size:
    a client holds the tail of what its neighbour had too much of.
    """
    alpha, classes = request.alpha(), request.classes()
    block = parse_integer_option(request.option("block", "10"), "block", 1, "block=10")
    clients, n, rng = request.clients, len(classes), request.rng
    order = rng.permutation(n)
    owner = np.empty(n, dtype=np.int64)
    for first in range(0, clients, block):
        last = min(first + block, clients)
        cut = order[n * first // clients : n * last // clients]
        here = np.unique(classes[cut], return_inverse=True)[1].astype(np.int64)
        least, patience = len(cut) // (2 * (last - first)), _RetryLimit()
        shares = _class_shares(alpha, least, np.bincount(here), last - first, rng, patience)
        if shares is None:
            draws, held = f"dirichlet-blocks:{alpha:g}", f"{last - first} clients of a block"
            raise patience.give_up(draws, held, least, f"{len(cut)} samples", "or use dirichlet-equal")
        # Class by class within a client, as the authors' code lists them: a slice's tail is then of few classes.
        lined_up = cut[np.lexsort((here, _assign_by_class_counts(shares, here, rng)))]
        slices = np.arange(n * first // clients, n * last // clients)
        owner[lined_up] = np.searchsorted(n * np.arange(1, clients + 1) // clients, slices, side="right")
    return partition_from_assignment(owner, clients)


def partition_dirichlet_sizes(request: PartitionRequest) -> list[Indices]:
    """Sizes drawn from Dirichlet(alpha), labels at random: NIID-Bench's quantity skew."""
    alpha, least = request.alpha(), request.least(10)
    request.enough(least)
    clients, n, patience = request.clients, len(request.pool), _RetryLimit()
    while patience.more():
        sizes = _cut(_draw(alpha, clients, request.rng), n)
        if sizes.min() >= least:
            owner = np.empty(n, dtype=np.int64)
            owner[request.rng.permutation(n)] = np.repeat(np.arange(clients), sizes)
            return partition_from_assignment(owner, clients)
        patience.best = max(patience.best, int(sizes.min()))
    draws, of = f"quantity:{alpha:g}", f"{n} samples"
    raise patience.give_up(draws, f"{clients} clients", least, of, "fewer clients or a smaller min")


def _class_shares(
    alpha: float, least: int, class_sizes: Indices, clients: int, rng: Rng, patience: _RetryLimit
) -> Indices | None:
    """How many samples of each class (row) each client (column) gets: drawn until all have `least`."""
    n = int(class_sizes.sum())
    shares = np.zeros((len(class_sizes), clients), dtype=np.int64)
    while patience.more():
        held = np.zeros(clients, dtype=np.int64)
        for label, size in enumerate(class_sizes):
            # Clients that hold their even share get nothing more. Dropping them from a Dirichlet draw and
            # renormalising it is the same as a draw over the others, which cannot end up all zero.
            open_ = np.flatnonzero(held < n / clients)
            shares[label] = 0
            shares[label, open_] = _cut(_draw(alpha, len(open_), rng), int(size))
            held += shares[label]
        if held.min() >= least:
            return shares
        patience.best = max(patience.best, int(held.min()))
    return None


def _cut(draw: NDArray[np.float64], size: int) -> Indices:
    """`size` samples cut at the cumulative shares of a draw."""
    ends = np.cumsum(draw)
    cuts = (ends / ends[-1] * size).astype(np.int64)
    return np.asarray(np.diff(cuts, prepend=0))


def _draw(alpha: float, size: int, rng: Rng) -> NDArray[np.float64]:
    """A Dirichlet draw; at an alpha so extreme that it over- or underflows, the limit it stands for."""
    with np.errstate(all="ignore"):
        draw = rng.dirichlet(np.full(size, alpha))
    if np.isfinite(draw).all() and draw.sum() > 0.5:
        return draw
    return np.ones(size) if alpha > 1 else np.eye(1, size, int(rng.integers(size)))[0]


STEPS = 1000
SMALLEST = 1e-3
"""An alpha of `balanced`: with less, clients hold one class wherever they can, as they do with this."""
TINIEST = 1e-12
"""A parameter of `by_client`: with less, the logarithms of its draws overflow; this is one class a client already."""


def partition_dirichlet_balanced(request: PartitionRequest) -> list[Indices]:
    """Dirichlet shares of all classes at once, scaled until every client holds equally many (DynaFed's code)."""
    alpha, classes = request.alpha(), request.classes()
    sizes = np.bincount(classes)
    shape = (len(sizes), request.clients)
    logs = _log_gamma(np.full(shape, max(alpha, SMALLEST)), request.rng)
    shares = _balance(logs, sizes, len(classes) / request.clients)
    ends = np.cumsum(shares, axis=1)
    cuts = np.rint(ends / ends[:, -1:] * sizes[:, None]).astype(np.int64)
    levelled = _level(np.diff(cuts, axis=1, prepend=0), len(sizes))
    return partition_from_assignment(_assign_by_class_counts(levelled, classes, request.rng), request.clients)


def _log_gamma(shape: NDArray[np.float64], rng: Rng) -> NDArray[np.float64]:
    """Logarithms of Gamma draws, whose normalised rows are Dirichlet draws.

    Logarithms, because at a small alpha most of the draws would underflow, and what is left after a class has gone
    would be zero everywhere.
    """
    return np.asarray(np.log(rng.standard_gamma(shape + 1)) + np.log1p(-rng.random(shape.shape)) / shape)


def _balance(logs: NDArray[np.float64], sizes: Indices, each: float) -> NDArray[np.float64]:
    """Scale rows and columns in turn until row c sums to `sizes[c]` and every column to `each`, or nearly so."""
    for _ in range(STEPS):
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


def partition_dirichlet_by_client(request: PartitionRequest) -> list[Indices]:
    """A label distribution for each client from Dirichlet(alpha x prior), filled sample by sample: Hsu et al., 2019.

    Every client gets equally many samples. Clients take turns in a random order; each turn draws a class from the
    client's distribution and a sample of it, without putting it back. A class that has gone leaves the distributions,
    which are normalised again. The prior is that of the data, or 1 for each class with `prior=ones`, which is what
    the code of FedDyn and FedExP draws from.
    """
    alpha, classes = request.alpha(), request.classes()
    prior = request.option("prior", "data")
    if prior not in ("data", "ones"):
        raise InputError(f"the prior of 'dirichlet-client' is {prior!r}; expected data or ones.")
    clients, n, rng = request.clients, len(classes), request.rng
    left = np.bincount(classes)
    weights = left / n if prior == "data" else np.ones(len(left))
    concentration = np.maximum(alpha * weights, TINIEST)
    logs = _log_gamma(np.broadcast_to(concentration, (clients, len(left))), rng)
    turns = rng.permutation(np.arange(n) % clients)
    taken = _take_turns(turns.tolist(), rng.random(n).tolist(), logs, left.tolist())
    owner = np.empty(n, dtype=np.int64)
    for label in range(len(left)):
        owner[rng.permutation(np.flatnonzero(classes == label))] = turns[taken == label]
    return partition_from_assignment(owner, clients)


def _take_turns(turns: list[int], chances: list[float], logs: NDArray[np.float64], left: list[int]) -> Indices:
    """The class that is drawn at each turn."""
    taken = np.empty(len(turns), dtype=np.int64)
    ends = _cumulative(logs)
    for at, (client, chance) in enumerate(zip(turns, chances, strict=True)):
        label = bisect_right(ends[client], chance * ends[client][-1])
        taken[at] = label
        left[label] -= 1
        if not left[label] and any(left):
            logs[:, label] = -np.inf
            ends = _cumulative(logs)
    return taken


def _cumulative(logs: NDArray[np.float64]) -> list[list[float]]:
    shares = np.exp(logs - logs.max(axis=1, keepdims=True))
    return [list(accumulate(row)) for row in shares.tolist()]
