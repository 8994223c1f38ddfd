"""FedExP: the server steps further than the mean if the client updates differ.

Jhunjhunwala et al., "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023. With the updates
Delta_k = w_k - w and their mean Delta = sum_k p_k Delta_k,

    eta_g = max(1, sum_k p_k ||Delta_k||^2 / (2 (||Delta||^2 + epsilon))),        w <- w + eta_g Delta

Training continues from the last w. The global model is the mean of the last two, because extrapolated iterates
oscillate; after the first round there is only one. p_k are shares of samples, or 1/K with `weighting=uniform`, as in
the paper's listing. The authors' code adds K epsilon instead of epsilon, and decreases it with the square of the
learning rate; here epsilon is constant. Norms and the step cover trainable parameters only; batch-norm statistics are
the plain mean, because an extrapolated variance may turn negative.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import average_models
from fedloom.core.tasks import ClientUpdate
from fedloom.methods.base import Options
from fedloom.methods.registry import register
from fedloom.methods.servers import AveragingServer


class FedExPOptions(Options):
    epsilon: float = Field(1e-3, ge=0)
    """constant added to the squared norm of the mean update; the authors use 0.001 for CIFAR and 0.1 for EMNIST"""
    weighting: Literal["samples", "uniform"] = "samples"
    """weights of the clients in the mean: their numbers of samples, or all equal"""
    average: bool = True
    """use the mean of the last two models as global model, otherwise the last one"""


@register(
    "fedexp",
    reference="Jhunjhunwala et al., ICLR 2023",
    neutral={"epsilon": 1e300, "average": False},  # so large that the step is always 1
)
class FedExPServer(AveragingServer[FedExPOptions]):
    """Extrapolate beyond the mean if the client updates differ.

    Row 0 of the bank is the last model, row 1 the one before.
    """

    needs_reason = "needs the length of each client's update"

    def start(self) -> None:
        self.bank = self.context.bank(2)
        self.bank.rows[:] = self.context.initial
        self.aggregations = 0
        self._eta: float | None = None
        self._p: list[float] = []
        self._squares: list[Tensor] = []

    def weight(self, update: ClientUpdate) -> float:
        return update.num_examples if self.options.weighting == "samples" else 1

    def observe(self, round: int, update: ClientUpdate) -> None:
        p, trainable = self.weight(update), self.context.layout.trainable
        delta = update.row[:trainable] - self.bank.rows[0, :trainable]
        self._p.append(p)
        self._squares.append(p * delta.square().sum().double())

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        self.bank.rows[1] = self.bank.rows[0]
        self.aggregations += 1
        delta = mean - old
        squared = sum(torch.stack(self._squares).tolist()) / sum(self._p)
        self._eta = fedexp_step_size(squared, float(delta.square().sum()), self.options.epsilon)
        return old + self._eta * delta if self._eta > 1 else mean

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._eta, self._p, self._squares = None, [], []
        super().aggregate(round, updates)

    def global_model(self) -> Tensor:
        if not self.options.average or self.aggregations < 2:
            return self.bank.rows[0]
        return average_models(self.context.layout, self.bank.rows)

    def models(self) -> Tensor:
        return self.bank.rows[:1]

    def diagnostics(self) -> dict[str, float]:
        return {} if self._eta is None else {"eta_g": self._eta}


def fedexp_step_size(mean_squared_norm: float, squared_norm_of_mean: float, epsilon: float) -> float:
    """Return eta_g from the mean squared norm of the updates and the squared norm of their mean."""
    below = 2 * (squared_norm_of_mean + epsilon)
    return max(1.0, mean_squared_norm / below) if below > 0 else 1.0  # all updates are zero or cancel out
