"""FedDyn: a dynamic regularizer aligns the local optima with the global optimum.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021. Client k keeps g_k and the server h, all
zero at first. With w the model it received, client k minimizes

    f_k(v) - <g_k, v> + (alpha / 2) ||v - w||^2,       and then sets  g_k <- g_k - alpha (w_k - w)

With sums over the clients that returned an update and N clients in total, the server sets

    h <- h - (alpha / N) sum_k (w_k - w),              w <- mean_k w_k - h / alpha

so h stays the mean of all g_k. The mean is uniform. For clients of different size the authors' code divides alpha by
n_k N / sum n for each client; here alpha is the same for all, as in the paper.

The authors evaluate the mean of the client models, not w, which runs ahead of it; `global_model` selects one. g_k and
h cover trainable parameters only; batch-norm statistics are the plain mean. A failed client keeps its g_k.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientUpdate, Shapes
from fedloom.methods.base import Client, Options
from fedloom.methods.registry import Method, register
from fedloom.methods.servers import AveragingServer
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedDynOptions(Options):
    alpha: float = Field(0.01, gt=0)
    """strength of the regularizer; the authors tune it in {0.1, 0.01, 0.001}"""
    global_model: Literal["mean", "model"] = "mean"
    """the global model: the mean of the client models, or the model that the next round starts from"""


class FedDynClient(Client[FedDynOptions]):
    """Client that adds the gradient of both regularizers; its state is g_k."""

    def state_shapes(self, layout: Layout) -> Shapes:
        return {"g": (layout.trainable,)}

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step)
        w = trainer.received[: trainer.layout.trainable]
        trainer.client_state["g"].sub_(trainer.weights - w, alpha=self.options.alpha)

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        w = trainer.received[: trainer.layout.trainable]
        trainer.gradient.add_(trainer.weights - w, alpha=self.options.alpha).sub_(trainer.client_state["g"])


class FedDynServer(AveragingServer[FedDynOptions]):
    """Server with the model w in row 0, the last mean of the client models in row 1, and h."""

    needs = "mean"

    def start(self) -> None:
        self.bank = self.context.bank(2)
        self.bank.rows[:] = self.context.initial
        self.h = self.zeros()
        self._count = 0

    def weight(self, update: ClientUpdate) -> float:
        return 1

    def observe(self, round: int, update: ClientUpdate) -> None:
        self._count += 1

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        alpha = self.options.alpha
        # The sum of w_k - w over the updates is their number times mean - w.
        self.h.sub_(mean - old, alpha=alpha * self._count / self.context.num_clients)
        self.bank.rows[1, : len(mean)] = mean
        return torch.sub(mean, self.h, alpha=1 / alpha)

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._count = 0
        super().aggregate(round, updates)
        if self._count:  # the buffers of both rows are the mean of the clients' buffers
            buffers = slice(self.context.layout.trainable, None)
            self.bank.rows[1, buffers] = self.bank.rows[0, buffers]

    def global_model(self) -> Tensor:
        return self.bank.rows[1 if self.options.global_model == "mean" else 0]

    def models(self) -> Tensor:
        """Return w, and the mean if that is the global model, so that a refiner improves both."""
        return self.bank.rows[: 2 if self.options.global_model == "mean" else 1]

    def diagnostics(self) -> dict[str, float]:
        return {"h": float(self.h.norm())}


register(
    Method(
        name="feddyn",
        summary="Add a dynamic regularizer that aligns local optima with the global optimum",
        reference="Acar et al., ICLR 2021",
        options=FedDynOptions,
        server=FedDynServer,
        client=FedDynClient,
    )
)
