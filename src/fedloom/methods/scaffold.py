"""SCAFFOLD: control variates cancel the drift of the clients.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

The server keeps c, each client k its own c_k, all zero at first. Client k takes steps v <- v - eta (g - c_k + c),
and after tau of them sets (option II) c_k+ = c_k - c + (w - v) / (tau eta), or (option I) c_k+ = the full gradient of
its loss at w. It sends the model and c_k+ - c_k; the server adds 1/N of the sum of these to c, so that
c = mean of all c_k for ever.

Where the paper is silent: option II reads the mean gradient off the way from w to v, which is exact for plain SGD
alone. Weight decay is part of the gradient, and so part of c_k. With momentum beta the way is longer by the factor
1 / (1 - beta) once momentum has built up, and we divide by it; for the few steps before that, and for clipped
gradients, c_k is an approximation. Adam takes steps of another scale, so option I is wanted there.
A client that took no step keeps its c_k. Control variates cover trainable parameters only, never the statistics of
batch norm. The mean over clients is uniform, as in the paper (`fedavg.weighting`), with a server step
`fedavg.server_lr`.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientUpdate, Shapes
from fedloom.errors import InputError
from fedloom.methods.base import Client, Extras, MethodContext, Options
from fedloom.methods.registry import Method, register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer


class ScaffoldOptions(Options):
    option: Literal["I", "II"] = "II"
    """how a client renews its variate: II from the way it went (free), I by one more pass over its samples"""


class ScaffoldClient(Client[ScaffoldOptions]):
    """Training with corrected gradients; the client keeps its own variate at home."""

    def __init__(self, context: MethodContext, options: ScaffoldOptions) -> None:
        super().__init__(context, options)
        if options.option == "II" and context.training.optimizer != "sgd":
            raise InputError(
                f"scaffold's option II reads gradients off the steps of sgd, not of {context.training.optimizer}; "
                "use --optimizer sgd or --set scaffold.option=I."
            )

    def home(self, layout: Layout) -> Shapes:
        return {"c": (layout.trainable,)}

    def uploads(self, layout: Layout) -> Shapes:
        return {"delta_c": (layout.trainable,)}

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        c, c_k, delta_c = bench.extras["c"], bench.home["c"], bench.uploads["delta_c"]
        w, v = bench.received[: bench.layout.trainable], bench.weights
        if self.options.option == "I":
            full = bench.scratch["full"] = torch.zeros_like(v)
            yield LocalSteps(self.observe, epochs=1)
            new_c_k = full / bench.samples if bench.samples else c_k
            bench.restart()
            yield LocalSteps(self.step)
        else:
            yield LocalSteps(self.step)
            way = bench.lr * bench.steps / (1 - bench.training.momentum)
            new_c_k = c_k - c + (w - v) / way if way else c_k
        torch.sub(new_c_k, c_k, out=delta_c)
        c_k.copy_(new_c_k)

    def observe(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        """Add up the gradient at the received model, without a step (option I)."""
        loss = bench.loss(batch)
        bench.backward(loss)
        bench.scratch["full"].add_(bench.gradient, alpha=len(batch))
        return loss

    def correct(self, bench: LocalTrainer) -> None:
        bench.gradient.sub_(bench.home["c"]).add_(bench.extras["c"])


class ScaffoldExtras(Extras[ScaffoldOptions]):
    """The server's variate c."""

    kept = ("c",)

    def __init__(self, context: MethodContext, options: ScaffoldOptions) -> None:
        super().__init__(context, options)
        self._bank = context.make_bank(1, context.layout.trainable)
        self.c = self._bank.rows[0]
        self._sum = torch.zeros_like(self.c, dtype=torch.float64)

    def send(self, round: int, client: int) -> Mapping[str, Tensor]:
        return {"c": self.c}

    def take(self, round: int, update: ClientUpdate) -> None:
        self._sum.add_(update.extras["delta_c"])

    def finish(self, round: int) -> None:
        self.c.add_(self._sum / self.context.clients)
        self._sum.zero_()


register(
    Method(
        name="scaffold",
        summary="control variates cancel the drift of the clients",
        reference="Karimireddy et al., ICML 2020",
        options=ScaffoldOptions,
        local=ScaffoldClient,
        companion=ScaffoldExtras,
        defaults={"fedavg.weighting": "uniform"},
        models_sent="4K",
        needs_each="",
        client_keeps="1 vector",
        server_keeps="2 models",
    )
)
