"""The exact choice of one cached model per client: FedCDA's selection problem, on inner products alone.

FedCDA (Wang et al., ICLR 2024) chooses one of a few cached models for each client, minimising Eq. 5 over all m chosen
models, J = (1/m) sum F + (L/2m) sum |w|^2 - (L/2) |mean w|^2. The paper enumerates K^P combinations, greedily in
batches where that is too many. But J is a sum of one number per candidate and one per pair of candidates: here
`enumerate_all` touches scalars only, and `solve` finds the same minimum far beyond the reach of enumeration.

All vectors are relative to one reference row: J does not depend on which (see `fedloom.gram`). Differences of J below
1e-12 of the size of its terms are ties; among ties the first client's newest model wins, then the second's, and so on.
"""

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Picks = NDArray[np.intp]

TIE = 1e-12  # of the size of J's terms: smaller differences are rounding
LEAF = 60_000  # combinations that are enumerated rather than bounded: half a millisecond, less than a bound takes
SWEEPS = 2  # rounds of message passing at a node of the search; children go on where it ended
OPEN_NODES = 2000  # beyond, the search goes depth first: memory (20 kB each at P = 30, K = 3) stays bounded


@dataclass(frozen=True)
class Fixed:
    """The models already chosen: how many, the sum of their losses and of their squared norms, and |their sum|^2."""

    count: int = 0
    loss_sum: float = 0.0
    norms: float = 0.0
    sum_norm: float = 0.0


@dataclass(frozen=True)
class Choice:
    """One candidate per client (0 is the oldest), its J, and a `bound` that no choice is below.

    It is `proven` to be the minimum unless time ran out. `combinations` were evaluated, bounds excluded the others.
    """

    picks: tuple[int, ...]
    objective: float
    bound: float
    combinations: int
    proven: bool

    @property
    def gap(self) -> float:
        """How far the picks can be from the minimum."""
        return self.objective - self.bound


def objective(
    losses: Sequence[Array], gram: Array, with_fixed: Array, fixed: Fixed, L: float, picks: Sequence[int]
) -> float:
    """J (Eq. 5) of the fixed models together with candidate `picks[n]` of each client n.

    `losses` has one array per client, oldest candidate first; `gram` the inner products of all candidates, client
    after client in the same order; `with_fixed` their inner products with the sum of the fixed vectors.
    """
    rows = np.cumsum([0, *(len(own) for own in losses[:-1])]) + np.asarray(picks)
    chosen, m = gram[np.ix_(rows, rows)], fixed.count + len(losses)
    loss = fixed.loss_sum + sum(float(own[pick]) for own, pick in zip(losses, picks, strict=True))
    norms = fixed.norms + float(np.trace(chosen))
    sum_norm = fixed.sum_norm + 2 * float(with_fixed[rows].sum()) + float(chosen.sum())
    return loss / m + L / (2 * m) * norms - L / (2 * m**2) * sum_norm


def enumerate_all(losses: Sequence[Array], gram: Array, with_fixed: Array, fixed: Fixed, L: float) -> Choice:
    """The minimum of `objective` over all combinations, each evaluated: 59,049 in a millisecond, 8 bytes each."""
    problem = _Problem(losses, gram, with_fixed, fixed, L)
    picks = tuple(_enumerate(problem.unary, problem.pair, problem.dead, problem.tie)[1].tolist())
    value = objective(losses, gram, with_fixed, fixed, L, picks)
    return Choice(picks, value, value, prod(len(own) for own in losses), True)


def solve(
    losses: Sequence[Array], gram: Array, with_fixed: Array, fixed: Fixed, L: float, time_limit: float = 10.0
) -> Choice:
    """The minimum of `objective`, by branch and bound where there are too many combinations to enumerate.

    After `time_limit` seconds, the best choice and bound so far: only then does the result depend on the clock.
    """
    if prod(len(own) for own in losses) <= LEAF:
        return enumerate_all(losses, gram, with_fixed, fixed, L)
    search = _Search(_Problem(losses, gram, with_fixed, fixed, L), time.monotonic() + time_limit)
    below = search.run()
    value = objective(losses, gram, with_fixed, fixed, L, search.picks)
    gap = 0.0 if below is None else max(0.0, search.energy - below)
    return Choice(search.picks, value, value - gap, search.combinations, below is None)


class _Problem:
    """J without its constant, the energy: unary[n, a] summed over clients, and pair[n, a, n', b] over their pairs."""

    def __init__(self, losses: Sequence[Array], gram: Array, with_fixed: Array, fixed: Fixed, L: float) -> None:
        sizes = [len(own) for own in losses]
        if not sizes or min(sizes) == 0 or gram.shape != (sum(sizes),) * 2 or with_fixed.shape != (sum(sizes),):
            raise ValueError(f"{sizes} candidates do not fit gram {gram.shape} and with_fixed {with_fixed.shape}")
        P, K, m = len(sizes), max(sizes), fixed.count + len(sizes)
        real = np.arange(K) < np.array(sizes)[:, None]
        F, norms = np.concatenate(losses), gram.diagonal()
        self.unary, self.dead = np.zeros((P, K)), np.where(real, 0.0, np.inf)  # infinite: no such candidate
        self.unary[real] = F / m + L / (2 * m) * norms - L / m**2 * with_fixed - L / (2 * m**2) * norms
        self.pair = np.zeros((P, K, P, K))
        self.pair[real[:, :, None, None] & real] = -L / m**2 * gram.ravel()
        self.pair[np.arange(P), :, np.arange(P)] = 0.0
        largest = P * float((np.abs(F) + L / 2 * norms).max())
        self.tie = TIE * (abs(fixed.loss_sum) + L / 2 * fixed.norms + largest) / m


def _enumerate(unary: Array, pair: Array, dead: Array, tie: float) -> tuple[float, Picks]:
    """Least energy, and the first combination (newest models first) that has it, from all of two halves of clients."""
    (P, K), labels = unary.shape, [np.flatnonzero(own == 0)[::-1] for own in dead]
    logs = np.log([len(own) for own in labels])
    cut = int(np.argmin(np.abs(np.cumsum(logs) - logs.sum() / 2))) + 1
    halves = []
    for clients in (range(cut), range(cut, P)):
        rows = np.zeros((1, 0), dtype=np.intp)
        for n in clients:
            own = n * K + labels[n]
            rows = np.column_stack([np.repeat(rows, len(own), axis=0), np.tile(own, len(rows))])
        chosen = np.zeros((len(rows), P * K))
        np.put_along_axis(chosen, rows, 1.0, axis=1)
        with_all = chosen @ pair.reshape(P * K, P * K)
        halves.append((rows, chosen, with_all, chosen @ unary.ravel() + (with_all * chosen).sum(1) / 2))
    (rows_a, _, with_a, energy_a), (rows_b, chosen_b, _, energy_b) = halves
    second = np.flatnonzero(dead[cut:] == 0) + cut * K
    energy = with_a[:, second] @ chosen_b[:, second].T + energy_a[:, None] + energy_b
    least = float(energy.min())
    a, b = divmod(int(np.argmax(energy.ravel() <= least + tie)), len(rows_b))
    return least, np.concatenate([rows_a[a], rows_b[b]]) % K


class _Search:
    """Branch and bound. Message passing bounds a node about as well as the LP relaxation would, in a millisecond.

    A node is a mask of candidates (as `dead`) with the messages (P, K, P) of the node above: what each candidate took
    over from its pair terms with each other client. Any messages give a true bound.
    """

    def __init__(self, problem: _Problem, deadline: float) -> None:
        self.problem, self.deadline = problem, deadline
        self.energy, self.picks, self.combinations = np.inf, tuple[int, ...](), 0
        random = np.random.default_rng(0).random((12, *problem.dead.shape)) + problem.dead
        for start in (_newest(problem.dead), np.argmin(problem.unary + problem.dead, 1), *random.argmin(2)):
            if not self.picks or time.monotonic() < deadline:
                self._descend(start)

    def _descend(self, x: Picks) -> None:
        """Local search: give one client after the other its best candidate, until none changes."""
        unary, pair, at = self.problem.unary + self.problem.dead, self.problem.pair, np.arange(len(x))
        for _ in range(100):  # ties could go round in circles
            before = x.copy()
            for n in at:
                field = unary[n] + pair[n][:, at, x].sum(1)
                x[n] = np.flatnonzero(field <= field.min() + self.problem.tie)[-1]
            if np.array_equal(before, x):
                break
        self._offer(float((unary[at, x] + pair[at, x][:, at, x].sum(1) / 2).sum()), x)

    def _offer(self, energy: float, picks: Picks) -> None:
        found, tie = tuple(picks.tolist()), self.problem.tie
        if energy < self.energy - tie or (energy <= self.energy + tie and found > self.picks):
            self.energy, self.picks = min(energy, self.energy), found

    def _hopeless(self, bound: float, dead: Array) -> bool:
        """Nothing better in this part, nor an equal choice of newer models."""
        equal = bound >= self.energy - self.problem.tie
        return bound > self.energy + self.problem.tie or (equal and tuple(_newest(dead).tolist()) <= self.picks)

    def run(self) -> float | None:
        """Search, lowest bound first. None when nothing is left open, else the least bound of what is."""
        serial, (P, K) = 0, self.problem.dead.shape
        heap = [(0, -np.inf, serial, self.problem.dead, np.zeros((P, K, P)))]
        while heap:
            _, bound, _, dead, messages = heapq.heappop(heap)
            if self._hopeless(bound, dead):
                continue
            if serial and time.monotonic() > self.deadline:  # the root's bound is always had
                return min([bound, *(node[1] for node in heap)])
            for below, part, above in self._expand(bound, dead, messages):
                serial += 1
                depth_first = -int(np.isinf(part).sum()) if len(heap) > OPEN_NODES else 0
                heapq.heappush(heap, (depth_first, below, serial, part, above))
        return None

    def _expand(self, bound: float, dead: Array, messages: Array) -> list[tuple[float, Array, Array]]:
        """Bound the node, drop the candidates that no good choice has, then enumerate what is left or branch."""
        whole, dead, messages = self.problem, dead.copy(), messages.copy()
        free, done = (np.flatnonzero(((dead == 0).sum(1) > 1) == several) for several in (True, False))
        only = _newest(dead)[done]  # clients with one candidate left are folded into what the others see
        with_done = whole.pair[:, :, done, only].sum(2)
        constant = float((whole.unary + with_done / 2)[done, only].sum())
        unary, pair = (whole.unary + with_done)[free], whole.pair[free][:, :, free]
        inner = messages[free][:, :, free]
        for _ in range(SWEEPS):
            size = prod((dead == 0).sum(1).tolist())
            if size <= LEAF:
                self._offer(*_enumerate(whole.unary, whole.pair, dead, whole.tie))
                self.combinations += size
                return []
            _pass_messages(unary, pair, dead[free], inner)
            forced = constant + _forced(unary, pair, dead[free], inner)
            bound = max(bound, float(forced.min(1).max()))
            if self._hopeless(bound, dead):
                return []
            dead[free] += np.where(forced > self.energy + whole.tie, np.inf, 0.0)
        # The client whose candidates have the highest bounds gives the least promising children.
        promise = np.minimum(forced, self.energy).sum(1)
        i = int(np.argmax(np.where((dead[free] == 0).sum(1) > 1, promise, -np.inf)))
        labels, children = np.arange(dead.shape[1]), []
        messages[np.ix_(free, labels, free)] = inner
        for a in np.flatnonzero(dead[free[i]] == 0):
            part = dead.copy()
            part[free[i], labels != a] = np.inf
            children.append((max(bound, float(forced[i, a])), part, messages))
        return children


def _newest(dead: Array) -> Picks:
    return np.asarray(dead.shape[1] - 1 - np.argmin(dead[:, ::-1], axis=1), dtype=np.intp)


def _pass_messages(unary: Array, pair: Array, dead: Array, messages: Array) -> None:
    """TRW-S (Kolmogorov 2006), forth and back: a client collects all its pairs can give and hands it to those ahead."""
    last, at = len(unary) - 1, np.arange(len(unary))
    for i, ahead in [(i, at > i) for i in at] + [(i, at < i) for i in at[::-1]]:
        pulled = (pair[i] + (dead - messages[:, :, i])).min(2)  # (K, p)
        pulled[:, i] = 0.0
        whole = unary[i] + pulled.sum(1)
        messages[i] = pulled - whole[:, None] * (ahead / max(i, last - i))


def _forced(unary: Array, pair: Array, dead: Array, messages: Array) -> Array:
    """(p, K): a lower bound of every choice that contains candidate a of client i."""
    at = np.arange(len(unary))
    cheapest = (pair - messages[:, :, :, None] - messages.transpose(2, 0, 1)[:, None] + dead).min(3)  # (p, K, p)
    cheapest[at, :, at] = 0.0
    least = (cheapest + dead[:, :, None]).min(1)
    own = unary + messages.sum(2) + dead
    total = own.min(1).sum() + least.sum() / 2
    return np.asarray(total + own - own.min(1, keepdims=True) + cheapest.sum(2) - least.sum(1)[:, None])
