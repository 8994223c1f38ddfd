"""FedSAM: clients look for flat minima, by descending along the gradient at the worst point near by.

Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022; Caldarola et al., "Improving
Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022. With a batch's gradient g at v,

    v' = v + rho g / ||g||,        v <- v - eta * gradient of the same batch at v'

with one norm over all trainable parameters. Twice the computation of FedAvg. rho is from Caldarola's script for
CIFAR-10; tune it in {0.01, 0.05, 0.1, 0.5}.

Weight decay, momentum and clipping act on the second gradient only. Batch norm sees the batch at v and at v'; only
the former counts in its running statistics, because v' is no model that anyone will use. The loss that is recorded
is the one at v.
"""

from abc import ABC, abstractmethod

import torch
from pydantic import Field
from torch import Tensor

from fedloom.methods.base import Client, O, Options
from fedloom.methods.registry import Method, register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalTrainer

TINY = 1e-12
"""Added to norms: where there is no gradient there is no ascent."""


class FedSAMOptions(Options):
    rho: float = Field(0.1, ge=0)
    """how far away the worst point is looked for; 0 is FedAvg"""


class SharpnessAwareClient(Client[O], ABC):
    """Steps along the gradient at v + ascent(v), of the same batch."""

    @abstractmethod
    def radius(self) -> float:
        """How far the ascent goes; 0 leaves it out."""

    @abstractmethod
    def ascent(self, bench: LocalTrainer) -> Tensor:
        """The way from v to v', from `bench.gradient`, the gradient at v."""

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        if not self.radius():
            return super().step(bench, batch)
        loss = bench.loss(batch)
        bench.backward(loss)
        before = bench.row.clone()  # v, and the statistics that the batch left at v
        bench.weights.add_(self.ascent(bench))
        bench.backward(bench.loss(batch))
        bench.row.copy_(before)
        self.correct(bench)
        bench.descend()
        return loss


class FedSAMClient(SharpnessAwareClient[FedSAMOptions]):
    """The worst point of a ball."""

    def radius(self) -> float:
        return self.options.rho

    def ascent(self, bench: LocalTrainer) -> Tensor:
        g = bench.gradient
        return g.mul(self.options.rho / (torch.linalg.vector_norm(g) + TINY))


register(
    Method(
        name="fedsam",
        summary="clients descend along the gradient at the worst point near by",
        reference="Qu et al., ICML 2022",
        options=FedSAMOptions,
        local=FedSAMClient,
        neutral={"rho": 0.0},
        models_sent="2K",
        extra_compute="client 2x",
    )
)
