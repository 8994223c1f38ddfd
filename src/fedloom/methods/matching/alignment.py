"""Servers that let the units of the clients' models change places before they average: FedMA's and GAMF's frame.

Two networks may compute the same with their neurons in another order, and their mean is then neither of them. Here the
server brings the models of a round into one order first; what each of them computes stays as it is (symmetries.py).
The model with the most samples gives the order, so a model and permuted copies of it have exactly that model as their
mean. Where nothing has to move, the result is FedAvg's, bit for bit.

Matching neurons where a layer may grow: the maximum a posteriori estimate of a beta-Bernoulli process.

Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019, whose matching FedMA uses.
A neuron of a client is a global neuron plus noise of variance sigma^2; global neurons are drawn around mu0 with
variance sigma0^2; how many there are is not known. With s = 1/sigma^2, s0 = 1/sigma0^2, and for global neuron i the
number n_i of clients that have it, S_i = s0 + n_i s and G_i = s0 mu0 + s (sum of theirs), a client's neuron u gains

    ||s u + G_i||^2 / (S_i + s) - ||G_i||^2 / S_i + log(n_i / (J - n_i))                by being neuron i,
    ||s u + s0 mu0||^2 / (s0 + s) - ||s0 mu0||^2 / s0 + 2 log(gamma / J) - 2 log e      by being the e-th new one.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Generic, Literal, TypeVar

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.base import MethodContext, Options, Server
from fedloom.methods.matching.symmetries import find_run_symmetries


class AlignmentOptions(Options):
    weighting: Literal["samples", "uniform"] = "samples"
    """how clients count in the mean: by their samples, or all alike"""


A = TypeVar("A", bound=AlignmentOptions)


class AlignmentServer(Server[A], Generic[A]):
    """One model: the mean of the clients' models after they were brought into one order."""

    kept = ("bank",)

    def __init__(self, context: MethodContext, options: A) -> None:
        super().__init__(context, options)
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial
        self.symmetries = find_run_symmetries(context)
        self._last: dict[str, float] = {}

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client, self.bank.rows[0]) for client in clients]

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._last = {}
        rows: list[Tensor] = []
        weights: list[float] = []
        who: list[tuple[int, int]] = []
        for update in updates:
            if update.samples:
                rows.append(update.row.clone())
                weights.append(update.samples if self.options.weighting == "samples" else 1)
                who.append((-update.samples, update.client))
        # By size, not as they came: what is matched first should not depend on who was quicker.
        order = sorted(range(len(rows)), key=lambda i: who[i])
        if len(rows) > 1:
            before = [row.clone() for row in rows]
            self.align(round, [rows[i] for i in order], [weights[i] for i in order])
            moved = [not torch.equal(row, old) for row, old in zip(rows, before, strict=True)]
            self._last = {"models permuted": sum(moved) / len(moved)}
        mean = WeightedMean(self.context.layout)
        for row, weight in zip(rows, weights, strict=True):
            mean.add(row, weight)
        mean.into(self.bank.rows[0])

    @abstractmethod
    def align(self, round: int, rows: list[Tensor], weights: list[float]) -> None:
        """Bring the models in `rows`, in place, into the order of the first of them, which has the most samples."""

    def deploy(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows

    def diagnostics(self) -> dict[str, float]:
        return dict(self._last)


def align_units_by_cost(cost: Tensor) -> Tensor:
    """Which unit goes to each place, so that the sum of cost[place, unit] is least; of equal ones the unit there."""
    cost = cost.detach().double().cpu()
    # The bonus is far below any real difference, and above rounding: units that are alike, dead ones above all, stay.
    bonus = 1e-9 * float(cost.abs().mean())
    return torch.from_numpy(linear_sum_assignment((cost - bonus * torch.eye(len(cost))).numpy())[1])


COUNT_LIMIT = 10
"""A neuron counts as one of at most so many clients, as in the authors' code."""


@dataclass(frozen=True)
class AlignmentPrior:
    """What is believed about neurons before any is seen."""

    sigma: float
    sigma0: float
    gamma: float
    mu0: Tensor | float = 0.0
    """The mean of global neurons, a number for each weight or one for all."""

    def gains(self, u: Tensor, total: Tensor, counts: Tensor, clients: int, new: int) -> Tensor:
        """What each neuron of `u` gains by being one of those with `total` and `counts`, or one of `new` more."""
        s, s0 = 1 / self.sigma**2, 1 / self.sigma0**2
        prior = torch.zeros_like(u[:1]) + s0 * self.mu0
        G, S = prior + s * total, s0 + s * counts
        squares = (s * u).square().sum(1)
        cross = squares[:, None] + 2 * s * u @ G.T + G.square().sum(1)
        capped = counts.clamp(
            max=min(COUNT_LIMIT, clients - 1)
        )  # all clients but this one at most, so never log(x / 0)
        known = cross / (S + s) - G.square().sum(1) / S + torch.log(capped / (clients - capped))
        e = torch.arange(1, new + 1, dtype=u.dtype)
        alone = (s * u + prior).square().sum(1) / (s0 + s) - prior.square().sum() / s0
        fresh = alone[:, None] + 2 * log(self.gamma / clients) - 2 * torch.log(e)
        return torch.cat([known, fresh], dim=1)


def align_growing_neurons(
    vectors: Sequence[Tensor], first: Tensor, width: int, prior: AlignmentPrior, sweeps: int, draw: np.random.Generator
) -> list[Tensor]:
    """The place, of `width`, of each neuron of each client; those of the first client begin in the places `first`."""
    clients = len(vectors)
    total = torch.zeros(width, vectors[0].shape[1], dtype=torch.float64)
    counts = torch.zeros(width, dtype=torch.float64)
    places = [first]
    total[places[0]], counts[places[0]] = vectors[0].double(), 1.0
    places += [torch.empty(0, dtype=torch.int64)] * (clients - 1)
    once = (1 + draw.permutation(clients - 1)).tolist()
    again = [k for _ in range(sweeps) for k in draw.permutation(clients).tolist()] if clients > 1 else []
    for k in (*once, *again):
        u = vectors[k].double()
        if len(places[k]):
            total[places[k]] -= u
            counts[places[k]] -= 1
        known = torch.nonzero(counts > 0).flatten()
        empty = torch.nonzero(counts == 0).flatten()
        gains = prior.gains(u, total[known], counts[known], clients, min(len(empty), len(u)))
        chosen = linear_sum_assignment(gains.numpy(), maximize=True)[1].tolist()
        # Which of the empty places a new neuron takes is all the same: its own, if it was alone there before.
        free = set(empty.tolist())
        before = places[k].tolist() or [-1] * len(u)
        stays = [pick >= len(known) and place in free for pick, place in zip(chosen, before, strict=True)]
        kept = {place for place, stay in zip(before, stays, strict=True) if stay}
        room = iter(sorted(free - kept))
        places[k] = torch.tensor(
            [
                int(known[pick]) if pick < len(known) else place if stay else next(room)
                for pick, place, stay in zip(chosen, before, stays, strict=True)
            ]
        )
        total[empty] = 0.0  # what rounding left there
        total[places[k]] += u
        counts[places[k]] += 1
    return places
