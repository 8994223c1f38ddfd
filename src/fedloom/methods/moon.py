"""MOON: a contrastive loss on representations, against client drift.

It pulls a client's representation to the global model's and away from its previous model's.

Li et al., "Model-Contrastive Federated Learning", CVPR 2021. z, z_g and z_p are the representations of a batch by the
model in training, the received model w, and the model that this client returned last:

    loss = CE + mu * mean of -log( e^(s+/tau) / (e^(s+/tau) + e^(s-/tau)) ),    s+ = cos(z, z_g),  s- = cos(z, z_p)

This equals CE + mu * mean log(1 + e^((s- - s+)/tau)), the form used here. On a client's first visit the previous model
is w itself: then the difference is exactly 0, the term exactly mu log 2, and its gradient exactly 0.

The representation is the input of the network's last linear layer. The paper's networks have a two-layer projection (to
256) before the classifier: use `--model NAME+projection` (models/registry.py), for FedAvg too if you compare them. The
two frozen models run in evaluation mode, with running batch-norm statistics; the authors' code leaves them in training
mode. The default mu is the authors' for CIFAR-10; they use 1 for CIFAR-100 and tune it in {0.001, ..., 10}.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.core.tasks import Shapes
from fedloom.methods._support.classifier_head import capture_head_inputs, find_classifier_head
from fedloom.methods.base import Client, Options
from fedloom.methods.registry import register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer


class MoonOptions(Options):
    mu: float = Field(5.0, ge=0)
    """weight of the contrastive loss; 0 is FedAvg"""
    tau: float = Field(0.5, gt=0)
    """temperature of the contrastive loss"""


@register("moon", reference="Li et al., CVPR 2021", neutral={"mu": 0.0}, extra_compute="client 2 tests")
class MoonClient(Client[MoonOptions]):
    """Pull a client's representation to the global model's, away from its previous model's.

    A client keeps its last model.
    """

    def start(self) -> None:
        find_classifier_head(self.context.make_model(), "moon")  # raises now if there is none

    def state_shapes(self, layout: Layout) -> Shapes:
        return {"previous": (layout.size,)}

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        previous = trainer.scratch["previous"] = trainer.buffer("moon previous", trainer.layout.size)
        previous.copy_(trainer.received if trainer.first_visit else trainer.client_state["previous"])
        yield LocalSteps(self.training_step)
        trainer.client_state["previous"].copy_(trainer.row)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        if not self.options.mu:
            return super().training_step(trainer, batch)
        z_g, z_p = (self.frozen(trainer, row, batch) for row in (trainer.received, trainer.scratch["previous"]))
        trainer.bind(trainer.row)
        with capture_head_inputs(find_classifier_head(trainer.module, "moon")[1]) as seen:
            loss = trainer.loss(batch)
        trainer.backward(loss + self.options.mu * moon_contrastive_loss(seen[-1], z_g, z_p, self.options.tau))
        self.adjust_gradient(trainer)
        trainer.optimizer_step()
        return loss

    @torch.no_grad()
    def frozen(self, trainer: LocalTrainer, row: Tensor, batch: Batch) -> Tensor:
        """Return the representation of a batch by the model in `row`, which does not change."""
        modes = [(module, module.training) for module in trainer.module.modules()]
        trainer.bind(row)
        trainer.module.eval()
        with capture_head_inputs(find_classifier_head(trainer.module, "moon")[1]) as seen:
            trainer.module(batch.x)
        for module, training in modes:
            module.training = training
        return seen[-1]


def moon_contrastive_loss(features: Tensor, global_features: Tensor, previous_features: Tensor, tau: float) -> Tensor:
    """Return the mean over a batch of log(1 + e^((s- - s+)/tau))."""
    features, global_features, previous_features = (
        F.normalize(each.flatten(1).float(), eps=1e-8) for each in (features, global_features, previous_features)
    )
    return F.softplus((features * (previous_features - global_features)).sum(1) / tau).mean()
