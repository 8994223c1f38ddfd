"""SCAFFOLD: control variates correct the drift of the clients.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

The server keeps c, each client k its own c_k, all zero at first. Client k takes steps v <- v - eta (g - c_k + c). After
tau of them it sets (option II) c_k+ = c_k - c + (w - v) / (tau eta), or (option I) c_k+ = the full gradient of its loss
at w. It sends the model and c_k+ - c_k. The server adds 1/N of the sum of these to c, so c stays the mean of all c_k.

Not specified in the paper: option II computes the mean gradient from the difference of w and v, which is exact only for
plain SGD. Weight decay is part of the gradient, and so of c_k. With momentum beta the difference is larger by the
factor 1 / (1 - beta) once momentum has built up, and is divided by it. For the few steps before that, and for clipped
gradients, c_k is an approximation. Adam takes steps of another scale, so it needs option I. A client that took no step
keeps its c_k. Control variates cover trainable parameters only, never batch-norm statistics. The mean over clients is
uniform, as in the paper (`fedavg.weighting`), with a server step `fedavg.server_lr`.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientUpdate, Shapes
from fedloom.errors import InputError
from fedloom.methods.base import Client, Extras, Options
from fedloom.methods.registry import Method, register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer


class ScaffoldOptions(Options):
    option: Literal["I", "II"] = "II"
    """how a client updates c_k: II from its model update (free), I by one more pass over its samples"""


class ScaffoldClient(Client[ScaffoldOptions]):
    """Client that corrects its gradients; its state is its control variate c_k."""

    def start(self) -> None:
        context, options = self.context, self.options
        if options.option == "II" and context.config.optimizer != "sgd":
            raise InputError(
                f"scaffold's option II works only with sgd, not with {context.config.optimizer}; "
                "use --optimizer sgd or --set scaffold.option=I."
            )

    def state_shapes(self, layout: Layout) -> Shapes:
        return {"c": (layout.trainable,)}

    def upload_shapes(self, layout: Layout) -> Shapes:
        return {"delta_c": (layout.trainable,)}

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        c, c_k, delta_c = trainer.extras["c"], trainer.client_state["c"], trainer.uploads["delta_c"]
        w, v = trainer.received[: trainer.layout.trainable], trainer.weights
        if self.options.option == "I":
            full = trainer.scratch["full"] = torch.zeros_like(v)
            yield LocalSteps(self.observe, epochs=1)
            new_c_k = full / trainer.num_examples if trainer.num_examples else c_k  # Eq. 4, option I
            trainer.restart()
            yield LocalSteps(self.training_step)
        else:
            yield LocalSteps(self.training_step)
            way = trainer.lr * trainer.steps / (1 - trainer.config.momentum)
            new_c_k = c_k - c + (w - v) / way if way else c_k  # Eq. 4, option II
        torch.sub(new_c_k, c_k, out=delta_c)
        c_k.copy_(new_c_k)

    def observe(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        """Sum the gradient at the received model, without a training step (option I)."""
        loss = trainer.loss(batch)
        trainer.backward(loss)
        trainer.scratch["full"].add_(trainer.gradient, alpha=len(batch))
        return loss

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        trainer.gradient.sub_(trainer.client_state["c"]).add_(trainer.extras["c"])  # Eq. 3


class ScaffoldExtras(Extras[ScaffoldOptions]):
    """The server's control variate c."""

    needs = "mean"

    def start(self) -> None:
        context = self.context
        self._bank = context.server.make_bank(1, context.layout.trainable)
        self.c = self._bank.rows[0]
        self._sum = torch.zeros_like(self.c, dtype=torch.float64)

    def send_to_client(self, round: int, client_id: int) -> Mapping[str, Tensor]:
        return {"c": self.c}

    def receive_update(self, round: int, update: ClientUpdate) -> None:
        self._sum.add_(update.extras["delta_c"])

    def end_round(self, round: int) -> None:
        self.c.add_(self._sum / self.context.num_clients)  # Eq. 5
        self._sum.zero_()


register(
    Method(
        name="scaffold",
        summary="Correct the drift of the clients with control variates",
        reference="Karimireddy et al., ICML 2020",
        options=ScaffoldOptions,
        client=ScaffoldClient,
        extras=ScaffoldExtras,
        defaults={"fedavg.weighting": "uniform"},
    )
)
