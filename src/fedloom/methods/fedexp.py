"""FedExP: the server goes further than the mean where the clients' updates differ.

Jhunjhunwala et al., "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023. With the updates
Delta_k = w_k - w and their mean Delta = sum_k p_k Delta_k,

    eta_g = max(1, sum_k p_k ||Delta_k||^2 / (2 (||Delta||^2 + epsilon))),        w <- w + eta_g Delta

Training goes on from the last w, and the mean of the last two is deployed, because extrapolated iterates swing; after
the first round there is only one. p_k are shares of samples; with `weighting=uniform` they are 1/K, as in the paper's
listing. The authors' code adds K epsilon where the paper has epsilon, and lets it fall with the square of the
learning rate; here it is epsilon, constant. Norms and the step are of trainable parameters only; batch norm's
statistics are the plain mean, because an extrapolated variance may turn negative.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.base import MethodContext, Options, Server
from fedloom.methods.registry import Method, register


class FedExPOptions(Options):
    epsilon: float = Field(1e-3, ge=0)
    """added to the squared norm of the mean update; the authors take 0.001 for CIFAR and 0.1 for EMNIST"""
    weighting: Literal["samples", "uniform"] = "samples"
    """how clients count in the mean: by their samples, or all alike"""
    average: bool = True
    """deploy the mean of the last two models; otherwise the last one"""


class FedExPServer(Server[FedExPOptions]):
    """The last two models, in rows 0 (the newer) and 1."""

    kept = ("bank", "aggregations")

    def __init__(self, context: MethodContext, options: FedExPOptions) -> None:
        super().__init__(context, options)
        self.bank = context.bank(2)
        self.bank.rows[:] = context.initial
        self.aggregations = 0
        self._eta: float | None = None

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client, self.bank.rows[0]) for client in clients]

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._eta = None
        w, trainable = self.bank.rows[0], self.context.layout.trainable
        old = w.clone()
        mean, squares = WeightedMean(self.context.layout), list[Tensor]()
        for update in updates:
            p = update.samples if self.options.weighting == "samples" else 1
            mean.add(update.row, p)
            squares.append(p * (update.row - old)[:trainable].square().sum().double())
        if not mean.into(w):
            return
        self.bank.rows[1] = old
        self.aggregations += 1
        delta = w[:trainable] - old[:trainable]
        squared = sum(torch.stack(squares).tolist())
        self._eta = fedexp_step_size(squared / mean.weight, float(delta.square().sum()), self.options.epsilon)
        if self._eta > 1:
            w[:trainable] = old[:trainable] + self._eta * delta

    def deploy(self) -> Tensor:
        if not self.options.average or self.aggregations < 2:
            return self.bank.rows[0]
        mean, row = WeightedMean(self.context.layout), self.bank.rows[0].clone()
        for model in self.bank.rows:
            mean.add(model)
        mean.into(row)
        return row

    def models(self) -> Tensor:
        return self.bank.rows[:1]

    def diagnostics(self) -> dict[str, float]:
        return {} if self._eta is None else {"eta_g": self._eta}


def fedexp_step_size(mean_square: float, square_of_mean: float, epsilon: float) -> float:
    """eta_g, from the mean squared norm of the updates and the squared norm of their mean."""
    below = 2 * (square_of_mean + epsilon)
    return max(1.0, mean_square / below) if below > 0 else 1.0  # updates that are zero or cancel out lead nowhere


register(
    Method(
        name="fedexp",
        summary="go further than the mean where the clients' updates differ",
        reference="Jhunjhunwala et al., ICLR 2023",
        options=FedExPOptions,
        server=FedExPServer,
        neutral={"epsilon": 1e300, "average": False},  # so large that the step is always 1
        models_sent="2K",
        needs_each="needs the length of each client's update",
        server_keeps="2 models",
    )
)
