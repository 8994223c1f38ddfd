"""Dirichlet partitions: by class, by size, by client, balanced, in blocks.

By client is the partition of Hsu et al., 2019; balanced is DynaFed's.

A draw that gives some client too few samples is repeated, up to a limit: with a small alpha it may never succeed.
"""

import time
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedloom.data.partitions.base import (
    Indices,
    PartitionRequest,
    Rng,
    parse_partition_integer,
    partition_from_assignment,
)
from fedloom.errors import InputError


def _assign_by_class_counts(class_counts: Indices, sample_classes: Indices, rng: Rng) -> Indices:
    """Assign random samples to clients, given how many of each class (row) each client (column) gets."""
    assignment = np.empty(len(sample_classes), dtype=np.int64)
    for label, share in enumerate(class_counts):
        assignment[rng.permutation(np.flatnonzero(sample_classes == label))] = np.repeat(np.arange(len(share)), share)
    return assignment


TRIES = 1000
SECONDS = 20.0
OTHERWISE = "fewer clients or a smaller min, or use dirichlet-equal"


@dataclass
class _RetryLimit:
    """Limit of repeated draws; `best_min_examples` is the size of the smallest client in the best draw."""

    tries: int = 0
    best_min_examples: int = -1
    deadline: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def try_again(self) -> bool:
        """Count a draw, and return whether it is allowed."""
        self.tries += 1
        return self.tries <= TRIES and (self.tries == 1 or time.monotonic() < self.deadline)

    def give_up(self, draws: str, clients: str, min_examples: int, of: str, smaller: str) -> InputError:
        return InputError(
            f"none of {self.tries - 1} draws of {draws} gave each of {clients} {min_examples} of the {of} (the "
            f"smallest client had {self.best_min_examples} at best); ask for a larger alpha, {smaller}."
        )


def partition_dirichlet_by_class(request: PartitionRequest) -> list[Indices]:
    """Draw shares of each class from Dirichlet(alpha), with NIID-Bench's balancing and minimum size."""
    alpha, min_examples = request.alpha(), request.min_examples(10)
    classes = request.class_indices()
    request.check_min_examples(min_examples)
    retry_limit = _RetryLimit()
    class_counts = _class_shares(
        alpha, min_examples, np.bincount(classes), request.num_clients, request.rng, retry_limit
    )
    if class_counts is None:
        draws, clients = f"dirichlet:{alpha:g}", f"{request.num_clients} clients"
        raise retry_limit.give_up(draws, clients, min_examples, f"{len(classes)} samples", OTHERWISE)
    return partition_from_assignment(_assign_by_class_counts(class_counts, classes, request.rng), request.num_clients)


def partition_dirichlet_blocks(request: PartitionRequest) -> list[Indices]:
    """Draw shares of each class in blocks of ten clients, then cut equal slices, as in the code of Lin et al., 2020.

    The samples are split at random into one part per block of clients. In a block, shares of the classes are drawn
    until every client has half the mean size. The samples, in the order of the clients, are then cut into slices of
    equal size. So a client gets the surplus of its neighbor.
    """
    alpha, classes = request.alpha(), request.class_indices()
    block = parse_partition_integer(request.option("block", "10"), "block", 1, "block=10")
    num_clients, n, rng = request.num_clients, len(classes), request.rng
    order = rng.permutation(n)
    assignment = np.empty(n, dtype=np.int64)
    for first in range(0, num_clients, block):
        last = min(first + block, num_clients)
        cut = order[n * first // num_clients : n * last // num_clients]
        here = np.unique(classes[cut], return_inverse=True)[1].astype(np.int64)
        min_examples, retry_limit = len(cut) // (2 * (last - first)), _RetryLimit()
        class_counts = _class_shares(alpha, min_examples, np.bincount(here), last - first, rng, retry_limit)
        if class_counts is None:
            draws, held = f"dirichlet-blocks:{alpha:g}", f"{last - first} clients of a block"
            raise retry_limit.give_up(draws, held, min_examples, f"{len(cut)} samples", "or use dirichlet-equal")
        # Sorted by class within a client, as in the authors' code, so the end of a slice has few classes.
        lined_up = cut[np.lexsort((here, _assign_by_class_counts(class_counts, here, rng)))]
        slices = np.arange(n * first // num_clients, n * last // num_clients)
        assignment[lined_up] = np.searchsorted(n * np.arange(1, num_clients + 1) // num_clients, slices, side="right")
    return partition_from_assignment(assignment, num_clients)


def partition_dirichlet_sizes(request: PartitionRequest) -> list[Indices]:
    """Draw sizes from Dirichlet(alpha), and labels at random: NIID-Bench's quantity skew."""
    alpha, min_examples = request.alpha(), request.min_examples(10)
    request.check_min_examples(min_examples)
    num_clients, n, retry_limit = request.num_clients, len(request.pool), _RetryLimit()
    while retry_limit.try_again():
        sizes = _cut(_draw(alpha, num_clients, request.rng), n)
        if sizes.min() >= min_examples:
            assignment = np.empty(n, dtype=np.int64)
            assignment[request.rng.permutation(n)] = np.repeat(np.arange(num_clients), sizes)
            return partition_from_assignment(assignment, num_clients)
        retry_limit.best_min_examples = max(retry_limit.best_min_examples, int(sizes.min()))
    draws, of = f"quantity:{alpha:g}", f"{n} samples"
    raise retry_limit.give_up(draws, f"{num_clients} clients", min_examples, of, "fewer clients or a smaller min")


def _class_shares(
    alpha: float, min_examples: int, class_sizes: Indices, num_clients: int, rng: Rng, retry_limit: _RetryLimit
) -> Indices | None:
    """Draw how many samples of each class (row) each client (column) gets, until all have `min_examples`."""
    n = int(class_sizes.sum())
    class_counts = np.zeros((len(class_sizes), num_clients), dtype=np.int64)
    while retry_limit.try_again():
        held = np.zeros(num_clients, dtype=np.int64)
        for label, size in enumerate(class_sizes):
            # Clients with an even share get nothing more. Dropping them from a Dirichlet draw and renormalizing is
            # the same as a draw over the others, which cannot be all zero.
            open_ = np.flatnonzero(held < n / num_clients)
            class_counts[label] = 0
            class_counts[label, open_] = _cut(_draw(alpha, len(open_), rng), int(size))
            held += class_counts[label]
        if held.min() >= min_examples:
            return class_counts
        retry_limit.best_min_examples = max(retry_limit.best_min_examples, int(held.min()))
    return None


def _cut(draw: NDArray[np.float64], size: int) -> Indices:
    """Split `size` samples at the cumulative shares of a draw."""
    ends = np.cumsum(draw)
    cuts = (ends / ends[-1] * size).astype(np.int64)
    return np.asarray(np.diff(cuts, prepend=0))


def _draw(alpha: float, size: int, rng: Rng) -> NDArray[np.float64]:
    """Draw from Dirichlet(alpha); if an extreme alpha over- or underflows, draw from the limit distribution."""
    with np.errstate(all="ignore"):
        draw = rng.dirichlet(np.full(size, alpha))
    if np.isfinite(draw).all() and draw.sum() > 0.5:
        return draw
    return np.ones(size) if alpha > 1 else np.eye(1, size, int(rng.integers(size)))[0]


STEPS = 1000
SMALLEST = 1e-3
"""Least alpha of `partition_dirichlet_balanced`: at this value clients have one class if possible."""
TINIEST = 1e-12
"""Least parameter of `partition_dirichlet_by_client`: logarithms of smaller draws overflow. It gives one class each."""


def partition_dirichlet_balanced(request: PartitionRequest) -> list[Indices]:
    """Draw Dirichlet shares of all classes, and scale them until all clients have equal sizes (DynaFed's code)."""
    alpha, classes = request.alpha(), request.class_indices()
    sizes = np.bincount(classes)
    shape = (len(sizes), request.num_clients)
    logs = _log_gamma(np.full(shape, max(alpha, SMALLEST)), request.rng)
    shares = _balance(logs, sizes, len(classes) / request.num_clients)
    ends = np.cumsum(shares, axis=1)
    cuts = np.rint(ends / ends[:, -1:] * sizes[:, None]).astype(np.int64)
    levelled = _level(np.diff(cuts, axis=1, prepend=0), len(sizes))
    return partition_from_assignment(_assign_by_class_counts(levelled, classes, request.rng), request.num_clients)


def _log_gamma(shape: NDArray[np.float64], rng: Rng) -> NDArray[np.float64]:
    """Draw logarithms of Gamma variables, whose normalized rows are Dirichlet draws.

    With a small alpha most draws would underflow without the logarithm. Then all shares would be zero once a class is
    used up.
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

    This is needed because balancing may not converge, and cutting rounds. The moved sample is of the class of which
    the smaller client has most, so a client gets a new class only if necessary.
    """
    held = shares.sum(axis=0)
    while held.max() - held.min() > slack:
        largest, smallest = int(held.argmax()), int(held.argmin())
        label = int(np.where(shares[:, largest] > 0, shares[:, smallest], -1).argmax())
        shares[label, [largest, smallest]] += (-1, 1)
        held[[largest, smallest]] += (-1, 1)
    return shares


def partition_dirichlet_by_client(request: PartitionRequest) -> list[Indices]:
    """Draw each client's label distribution from Dirichlet(alpha x prior), and fill it (Hsu et al., 2019).

    All clients get equally many samples. Clients take turns in a random order; each turn draws a class from the
    client's distribution, and a sample of it without replacement. A class that is used up leaves the distributions,
    which are normalized again. The prior is that of the data, or 1 for each class with `prior=ones`, as in the code of
    FedDyn and FedExP.
    """
    alpha, classes = request.alpha(), request.class_indices()
    prior = request.option("prior", "data")
    if prior not in ("data", "ones"):
        raise InputError(f"the prior of 'dirichlet-client' is {prior!r}; expected data or ones.")
    num_clients, n, rng = request.num_clients, len(classes), request.rng
    left = np.bincount(classes)
    weights = left / n if prior == "data" else np.ones(len(left))
    concentration = np.maximum(alpha * weights, TINIEST)
    logs = _log_gamma(np.broadcast_to(concentration, (num_clients, len(left))), rng)
    turns = rng.permutation(np.arange(n) % num_clients)
    taken = _take_turns(turns.tolist(), rng.random(n).tolist(), logs, left.tolist())
    assignment = np.empty(n, dtype=np.int64)
    for label in range(len(left)):
        assignment[rng.permutation(np.flatnonzero(classes == label))] = turns[taken == label]
    return partition_from_assignment(assignment, num_clients)


def _take_turns(turns: list[int], chances: list[float], logs: NDArray[np.float64], left: list[int]) -> Indices:
    """Draw the class of each turn."""
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
