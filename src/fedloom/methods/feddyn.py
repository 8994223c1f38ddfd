"""FedDyn: a regulariser that changes from round to round makes the clients' optima agree with the global one.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021. Client k keeps g_k, the server h, all zero
at first. With w the model it received, client k minimises

    f_k(v) - <g_k, v> + (alpha / 2) ||v - w||^2,       and then sets  g_k <- g_k - alpha (w_k - w)

and the server, with the sums over those that answered and N clients in all,

    h <- h - (alpha / N) sum_k (w_k - w),              w <- mean_k w_k - h / alpha

so that h = mean of all g_k for ever. The mean is uniform. Where clients differ in size the authors' code divides alpha
by n_k N / sum n for each client; as in the paper, alpha is the same for all here.

The authors measure the mean of the clients' models, not w, which runs ahead of it: `deploy` says which. g_k and h are
for trainable parameters only; batch norm's statistics are the plain mean. A client that is lost keeps its g_k.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, ClientUpdate, Shapes
from fedloom.methods.base import Client, MethodContext, Options, Server
from fedloom.methods.registry import Method, register
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedDynOptions(Options):
    alpha: float = Field(0.01, gt=0)
    """strength of the regulariser; the authors tune it in {0.1, 0.01, 0.001}"""
    deploy: Literal["mean", "model"] = "mean"
    """what is deployed: the mean of the clients' models, or the model that the next round starts from"""


class FedDynClient(Client[FedDynOptions]):
    """Training with the gradient of the two regularisers; the client keeps g_k at home."""

    def home(self, layout: Layout) -> Shapes:
        return {"g": (layout.trainable,)}

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.step)
        w = bench.received[: bench.layout.trainable]
        bench.home["g"].sub_(bench.weights - w, alpha=self.options.alpha)

    def correct(self, bench: LocalTrainer) -> None:
        w = bench.received[: bench.layout.trainable]
        bench.gradient.add_(bench.weights - w, alpha=self.options.alpha).sub_(bench.home["g"])


class FedDynServer(Server[FedDynOptions]):
    """The model w, the last mean of the clients, and h."""

    kept = ("bank", "h")

    def __init__(self, context: MethodContext, options: FedDynOptions) -> None:
        super().__init__(context, options)
        self.bank = context.bank(2)
        self.bank.rows[:] = context.initial
        self.h = torch.zeros_like(context.initial[: context.layout.trainable])

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client, self.bank.rows[0]) for client in clients]

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        w, m = self.bank.rows
        alpha, trainable = self.options.alpha, self.context.layout.trainable
        mean, count = WeightedMean(self.context.layout), 0
        for update in updates:
            mean.add(update.row)
            count += 1
        if not mean.into(m):
            return
        # The sum of w_k - w over those that answered is their number times mean - w.
        self.h.sub_(m[:trainable] - w[:trainable], alpha=alpha * count / self.context.clients)
        w.copy_(m)
        w[:trainable].sub_(self.h, alpha=1 / alpha)

    def deploy(self) -> Tensor:
        return self.bank.rows[1 if self.options.deploy == "mean" else 0]

    def models(self) -> Tensor:
        """w, and the mean where that is deployed: a refiner must have seen what is deployed."""
        return self.bank.rows[: 2 if self.options.deploy == "mean" else 1]

    def diagnostics(self) -> dict[str, float]:
        return {"h": float(self.h.norm())}


register(
    Method(
        name="feddyn",
        summary="a dynamic regulariser makes the clients' optima agree with the global one",
        reference="Acar et al., ICLR 2021",
        options=FedDynOptions,
        server=FedDynServer,
        local=FedDynClient,
        models_sent="2K",
        needs_each="",
        client_keeps="1 vector",
        server_keeps="3 models",
    )
)
