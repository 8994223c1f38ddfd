"""Servers that let the units of the clients' models change places before they average: FedMA's and GAMF's frame.

Two networks may compute the same with their neurons in another order, and their mean is then neither of them. Here the
server brings the models of a round into one order first; what each of them computes stays as it is (symmetries.py).
The model with the most samples gives the order, so a model and permuted copies of it have exactly that model as their
mean. Where nothing has to move, the result is FedAvg's, bit for bit.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Generic, Literal, TypeVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedloom.exchange import Job, Update
from fedloom.methods.base import Context, Options, Server
from fedloom.methods.symmetries import find_for
from fedloom.rows import Mean


class AligningOptions(Options):
    weighting: Literal["samples", "uniform"] = "samples"
    """how clients count in the mean: by their samples, or all alike"""


A = TypeVar("A", bound=AligningOptions)


class AligningServer(Server[A], Generic[A]):
    """One model: the mean of the clients' models after they were brought into one order."""

    kept = ("bank",)

    def __init__(self, context: Context, options: A) -> None:
        super().__init__(context, options)
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial
        self.symmetries = find_for(context)
        self._last: dict[str, float] = {}

    def dispatch(self, round: int, clients: list[int]) -> Iterable[Job]:
        return [Job(client, self.bank.rows[0]) for client in clients]

    def collect(self, round: int, updates: Iterator[Update]) -> None:
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
        mean = Mean(self.context.layout)
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


def assign(cost: Tensor) -> Tensor:
    """Which unit goes to each place, so that the sum of cost[place, unit] is least; of equal ones the unit there."""
    cost = cost.detach().double().cpu()
    # The bonus is far below any real difference, and above rounding: units that are alike, dead ones above all, stay.
    bonus = 1e-9 * float(cost.abs().mean())
    return torch.from_numpy(linear_sum_assignment((cost - bonus * torch.eye(len(cost))).numpy())[1])


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """||a_i - b_j||^2, in double precision; never below 0."""
    a, b = a.double(), b.double()
    cross = a @ b.T
    return ((a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * cross).clamp_(min=0)
