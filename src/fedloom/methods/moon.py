"""MOON: a client's representation is drawn to the global model's and away from that of its own past.

Li et al., "Model-Contrastive Federated Learning", CVPR 2021. With the representations z, z_g, z_p of a batch by the
model in training, by the model w that was received and by the model that this client returned last,

    loss = CE + mu * mean of -log( e^(s+/tau) / (e^(s+/tau) + e^(s-/tau)) ),    s+ = cos(z, z_g),  s- = cos(z, z_p)

which is CE + mu * mean log(1 + e^((s- - s+)/tau)), the form used here: on a client's first visit, where its own past is
w itself, the difference is exactly 0, the term exactly mu log 2, and its gradient exactly 0.

The representation is what goes into the network's last linear layer. The paper's networks have a projection of two
layers (to 256) before the classifier: that is `--model NAME+projection` (models/projection.py), to be given to FedAvg
too where the two are compared. The two frozen models compute as in a test, with batch norm's running statistics, where
the authors' code leaves them in training mode. mu is the authors' for CIFAR-10; it is 1 for CIFAR-100, and they tune it
in {0.001, ..., 10}.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.core.tasks import Shapes
from fedloom.methods._support.classifier_head import capture_head_inputs, find_classifier_head
from fedloom.methods.base import Client, MethodContext, Options
from fedloom.methods.registry import Method, register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer


class MoonOptions(Options):
    mu: float = Field(5.0, ge=0)
    """weight of the contrast; 0 is FedAvg"""
    tau: float = Field(0.5, gt=0)
    """temperature of the contrast"""


class MoonClient(Client[MoonOptions]):
    """Training with the contrast; the client keeps its last model at home."""

    def __init__(self, context: MethodContext, options: MoonOptions) -> None:
        super().__init__(context, options)
        find_classifier_head(context.make_module(), "moon")  # says so now where there is none

    def home(self, layout: Layout) -> Shapes:
        return {"previous": (layout.size,)}

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        previous = bench.scratch["previous"] = bench.buffer("moon previous", bench.layout.size)
        previous.copy_(bench.received if bench.first_visit else bench.home["previous"])
        yield LocalSteps(self.step)
        bench.home["previous"].copy_(bench.row)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        if not self.options.mu:
            return super().step(bench, batch)
        z_g, z_p = (self.frozen(bench, row, batch) for row in (bench.received, bench.scratch["previous"]))
        bench.bind(bench.row)
        with capture_head_inputs(find_classifier_head(bench.module, "moon")[1]) as seen:
            loss = bench.loss(batch)
        bench.backward(loss + self.options.mu * moon_contrastive_loss(seen[-1], z_g, z_p, self.options.tau))
        self.correct(bench)
        bench.descend()
        return loss

    @torch.no_grad()
    def frozen(self, bench: LocalTrainer, row: Tensor, batch: Batch) -> Tensor:
        """The representation of a batch by a model that is not trained, and stays as it is."""
        modes = [(module, module.training) for module in bench.module.modules()]
        bench.bind(row)
        bench.module.eval()
        with capture_head_inputs(find_classifier_head(bench.module, "moon")[1]) as seen:
            bench.module(batch.x)
        for module, training in modes:
            module.training = training
        return seen[-1]


def moon_contrastive_loss(z: Tensor, z_g: Tensor, z_p: Tensor, tau: float) -> Tensor:
    """The mean over a batch of log(1 + e^((s- - s+)/tau))."""
    z, z_g, z_p = (F.normalize(each.flatten(1).float(), eps=1e-8) for each in (z, z_g, z_p))
    return F.softplus((z * (z_p - z_g)).sum(1) / tau).mean()


register(
    Method(
        name="moon",
        summary="draw a client's representation to the global model's, away from its own past",
        reference="Li et al., CVPR 2021",
        options=MoonOptions,
        local=MoonClient,
        neutral={"mu": 0.0},
        models_sent="2K",
        client_keeps="last model",
        extra_compute="client 2 tests",
    )
)
