"""Label skew among clients of equal size: DynaFed's balanced Dirichlet, and Hsu's draw for each client."""

from bisect import bisect_right
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedloom.data.partitions.request import Indices, Request, Rng, deal, parts_of
from fedloom.errors import InputError

STEPS = 1000
SMALLEST = 1e-3
"""An alpha of `balanced`: with less, clients hold one class wherever they can, as they do with this."""
TINIEST = 1e-12
"""A parameter of `by_client`: with less, the logarithms of its draws overflow; this is one class a client already."""


def balanced(request: Request) -> list[Indices]:
    """Dirichlet shares of all classes at once, scaled until every client holds equally many (DynaFed's code)."""
    alpha, classes = request.alpha(), request.classes()
    sizes = np.bincount(classes)
    shape = (len(sizes), request.clients)
    logs = _log_gamma(np.full(shape, max(alpha, SMALLEST)), request.rng)
    shares = _balance(logs, sizes, len(classes) / request.clients)
    ends = np.cumsum(shares, axis=1)
    cuts = np.rint(ends / ends[:, -1:] * sizes[:, None]).astype(np.int64)
    levelled = _level(np.diff(cuts, axis=1, prepend=0), len(sizes))
    return parts_of(deal(levelled, classes, request.rng), request.clients)


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


def by_client(request: Request) -> list[Indices]:
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
    return parts_of(owner, clients)


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
