"""FedSAM: clients search for flat minima by sharpness-aware minimization.

They use the gradient at the worst point nearby.

Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022; Caldarola et al., "Improving
Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022. With a batch's gradient g at v,

    v' = v + rho g / ||g||,        v <- v - eta * gradient of the same batch at v'

with one norm over all trainable parameters. This takes twice the computation of FedAvg. rho is from Caldarola's script
for CIFAR-10; tune it in {0.01, 0.05, 0.1, 0.5}.

Weight decay, momentum and clipping act on the second gradient only. Batch norm sees the batch at v and at v'. Only the
pass at v counts in its running statistics, because nobody uses v' as a model. The recorded loss is the one at v.
"""

from abc import ABC, abstractmethod

import torch
from pydantic import Field
from torch import Tensor

from fedloom.methods.base import Client, O, Options
from fedloom.methods.registry import register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalTrainer

TINY = 1e-12
"""Added to norms, so that a zero gradient gives a zero ascent."""


class FedSAMOptions(Options):
    rho: float = Field(0.1, ge=0)
    """distance of the worst point; 0 is FedAvg"""


class SharpnessAwareClient(Client[O], ABC):
    """Client whose steps use the gradient at v + ascent(v), of the same batch."""

    @abstractmethod
    def radius(self) -> float:
        """Return how far the ascent goes; 0 turns it off."""

    @abstractmethod
    def ascent(self, trainer: LocalTrainer) -> Tensor:
        """Return the step from v to v'; `trainer.gradient` is the gradient at v."""

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        if not self.radius():
            return super().training_step(trainer, batch)
        loss = trainer.loss(batch)
        trainer.backward(loss)
        before = trainer.row.clone()  # v, and the statistics that the batch left at v
        trainer.weights.add_(self.ascent(trainer))
        trainer.backward(trainer.loss(batch))
        trainer.row.copy_(before)
        self.adjust_gradient(trainer)
        trainer.optimizer_step()
        return loss


@register("fedsam", reference="Qu et al., ICML 2022", neutral={"rho": 0.0}, extra_compute="client 2x")
class FedSAMClient(SharpnessAwareClient[FedSAMOptions]):
    """Clients descend along the gradient at the worst point nearby."""

    def radius(self) -> float:
        return self.options.rho

    def ascent(self, trainer: LocalTrainer) -> Tensor:
        g = trainer.gradient
        return g.mul(self.options.rho / (torch.linalg.vector_norm(g) + TINY))
