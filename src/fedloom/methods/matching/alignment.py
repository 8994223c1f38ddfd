"""Base of FedMA and GAMF: permute units of client models, then average.

Two networks with their neurons in different order can compute the same function, but their mean does not. The server
first permutes the units of a round's models into one order; the function of each model does not change (symmetries.py).
The model with the most samples defines the order, so the mean of a model and its permuted copies is exactly that model.
If nothing has to move, the result is FedAvg's, bit for bit.

Matching with layers that may grow: the maximum a posteriori estimate of a beta-Bernoulli process, which FedMA uses.
Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019. A client's neuron is a
global neuron plus noise of variance sigma^2. Global neurons are drawn around mu0 with variance sigma0^2; their number
is unknown. With s = 1/sigma^2, s0 = 1/sigma0^2, and for global neuron i the number n_i of clients that have it,
S_i = s0 + n_i s and G_i = s0 mu0 + s (sum of theirs), a client's neuron u gains

    ||s u + G_i||^2 / (S_i + s) - ||G_i||^2 / S_i + log(n_i / (J - n_i))                by being neuron i,
    ||s u + s0 mu0||^2 / (s0 + s) - ||s0 mu0||^2 / s0 + 2 log(gamma / J) - 2 log e      by being the e-th new one.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Generic, Literal, TypeVar

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedloom.core.averaging import average_models
from fedloom.core.tasks import ClientUpdate
from fedloom.methods.base import Options
from fedloom.methods.matching.symmetries import find_run_symmetries
from fedloom.methods.servers import AveragingServer


class AlignmentOptions(Options):
    weighting: Literal["samples", "uniform"] = "samples"
    """weights of the clients in the mean: their numbers of samples, or all equal"""


A = TypeVar("A", bound=AlignmentOptions)


class AlignmentServer(AveragingServer[A], Generic[A]):
    """Server with one model: the mean of the client models after `align`."""

    def start(self) -> None:
        self._symmetries = find_run_symmetries(self.context)
        self._last: dict[str, float] = {}

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._last = {}
        received = [(u.row.clone(), u.num_examples, u.client_id) for u in updates if u.num_examples]
        rows = [row for row, _, _ in received]
        weights = [n if self.options.weighting == "samples" else 1 for _, n, _ in received]
        # Sorted by size, so that the matching does not depend on the order of arrival.
        order = sorted(range(len(rows)), key=lambda i: (-received[i][1], received[i][2]))
        if len(rows) > 1:
            before = [row.clone() for row in rows]
            self.align(round, [rows[i] for i in order], [weights[i] for i in order])
            moved = [not torch.equal(row, old) for row, old in zip(rows, before, strict=True)]
            self._last = {"models permuted": sum(moved) / len(moved)}
        if rows:
            self.bank.rows[0] = average_models(self.context.layout, rows, weights)

    @abstractmethod
    def align(self, round: int, rows: list[Tensor], weights: list[float]) -> None:
        """Permute the units of `rows`, in place, to match the first one, which has the most samples."""

    def diagnostics(self) -> dict[str, float]:
        return dict(self._last)


def align_units_by_cost(cost_matrix: Tensor) -> Tensor:
    """Return the unit for each place with the least sum of cost[place, unit]; among ties units stay."""
    cost_matrix = cost_matrix.detach().double().cpu()
    # The bonus is below any real difference and above rounding: equal units, such as dead ones, stay.
    bonus = 1e-9 * float(cost_matrix.abs().mean())
    return torch.from_numpy(linear_sum_assignment((cost_matrix - bonus * torch.eye(len(cost_matrix))).numpy())[1])


COUNT_LIMIT = 10
"""Upper bound of n_i, as in the authors' code."""


@dataclass(frozen=True)
class AlignmentPrior:
    """The prior distribution of neurons."""

    sigma: float
    sigma0: float
    gamma: float
    mu0: Tensor | float = 0.0
    """The mean of global neurons: a number per weight, or one for all."""

    def gains(self, u: Tensor, total: Tensor, counts: Tensor, clients: int, new: int) -> Tensor:
        """Return the gain of each neuron of `u` as each known neuron (`total`, `counts`) and as each of `new` more."""
        s, s0 = 1 / self.sigma**2, 1 / self.sigma0**2
        prior = torch.zeros_like(u[:1]) + s0 * self.mu0
        G, S = prior + s * total, s0 + s * counts
        squares = (s * u).square().sum(1)
        cross = squares[:, None] + 2 * s * u @ G.T + G.square().sum(1)
        capped = counts.clamp(max=min(COUNT_LIMIT, clients - 1))  # at most all other clients, so never log(x / 0)
        known = cross / (S + s) - G.square().sum(1) / S + torch.log(capped / (clients - capped))
        e = torch.arange(1, new + 1, dtype=u.dtype)
        alone = (s * u + prior).square().sum(1) / (s0 + s) - prior.square().sum() / s0
        fresh = alone[:, None] + 2 * log(self.gamma / clients) - 2 * torch.log(e)
        return torch.cat([known, fresh], dim=1)


def find_growing_alignment(
    vectors: Sequence[Tensor],
    first_places: Tensor,
    width: int,
    prior: AlignmentPrior,
    sweeps: int,
    rng: np.random.Generator,
) -> list[Tensor]:
    """Return the place, below `width`, of each neuron of each client; the first client starts in `first_places`."""
    clients = len(vectors)
    total = torch.zeros(width, vectors[0].shape[1], dtype=torch.float64)
    counts = torch.zeros(width, dtype=torch.float64)
    places = [first_places]
    total[places[0]], counts[places[0]] = vectors[0].double(), 1.0
    places += [torch.empty(0, dtype=torch.int64)] * (clients - 1)
    once = (1 + rng.permutation(clients - 1)).tolist()
    again = [k for _ in range(sweeps) for k in rng.permutation(clients).tolist()] if clients > 1 else []
    for k in (*once, *again):
        u = vectors[k].double()
        if len(places[k]):
            total[places[k]] -= u
            counts[places[k]] -= 1
        known = torch.nonzero(counts > 0).flatten()
        empty = torch.nonzero(counts == 0).flatten()
        gains = prior.gains(u, total[known], counts[known], clients, min(len(empty), len(u)))
        chosen = linear_sum_assignment(gains.numpy(), maximize=True)[1].tolist()
        # All empty places are equivalent. A new neuron keeps its own if it was alone there before.
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
        total[empty] = 0.0  # remove rounding errors
        total[places[k]] += u
        counts[places[k]] += 1
    return places
