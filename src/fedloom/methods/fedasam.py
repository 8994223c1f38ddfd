"""FedASAM: FedSAM with an adaptive radius, and SWA on the server.

The radius adapts to the scale of each weight. `fedasam-swa` adds SWA.

Caldarola et al., "Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022. With T = |v| + eta
for weights, and 1 for biases and all other parameters,

    v' = v + rho T^2 g / ||T g||

Scaling a weight up and the next one down by the same factor changes no output, and with T it changes no step either.

`fedasam-swa` adds stochastic weight averaging on the server. After a share `start` of the rounds, the clients' learning
rate falls linearly over `cycle` rounds, again and again. The global model is the running mean of the models at the ends
of the cycles; training continues from the last model. `fedasam` provides no server and combines with any. Batch-norm
statistics are averaged like weights. Defaults are those for CIFAR-10; for CIFAR-100 rho is 0.5. Other public code has
rho 0.1, eta 0 and no averaging. A parameter is a weight if its name contains "weight".
"""

from collections.abc import Iterator
from math import ceil

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import average_models
from fedloom.core.layout import TensorKind
from fedloom.core.tasks import ClientUpdate
from fedloom.methods.base import Options
from fedloom.methods.fedavg import FedAvgOptions, FedAvgServer
from fedloom.methods.fedsam import TINY, SharpnessAwareClient
from fedloom.methods.registry import Method, register
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedASAMOptions(Options):
    rho: float = Field(0.7, ge=0)
    """radius of the search for the worst point, relative to the weights; 0 is FedAvg"""
    eta: float = Field(0.2, ge=0)
    """added to the size of a weight; with 0, the search never moves a weight that is 0"""


class FedASAMSwaOptions(FedASAMOptions, FedAvgOptions):
    start: float = Field(0.75, ge=0, le=1)
    """share of the rounds before the first cycle; 1 averages nothing"""
    cycle: int = Field(10, ge=1)
    """rounds in a cycle; the model at its end is averaged"""
    lr_end: float = Field(1e-4, gt=0)
    """the clients' learning rate at the end of a cycle, if the configured one is higher"""


@register("fedasam", reference="Caldarola et al., ECCV 2022", neutral={"rho": 0.0}, extra_compute="client 2x")
class FedASAMClient(SharpnessAwareClient[FedASAMOptions]):
    """FedSAM with a radius that adapts to the scale of the weights.

    The client searches the worst point in an ellipsoid whose axes scale with the weights.
    """

    def radius(self) -> float:
        return self.options.rho

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        weights = trainer.scratch["weights"] = trainer.buffer("fedasam weights", trainer.layout.trainable)
        for entry in trainer.layout.entries:
            if entry.kind is TensorKind.PARAMETER:
                weights[entry.columns] = float("weight" in entry.name.rpartition(".")[2])
        yield LocalSteps(self.training_step)

    def ascent(self, trainer: LocalTrainer) -> Tensor:
        g, v = trainer.gradient, trainer.weights
        t = torch.where(trainer.scratch["weights"] > 0, v.abs() + self.options.eta, 1.0)
        tg = g.mul(t)
        return tg.mul(t).mul_(self.options.rho / (torch.linalg.vector_norm(tg) + TINY))


def fedasam_cycle_position(round: int, rounds: int, options: FedASAMSwaOptions) -> float | None:
    """Return the share of the cycle that is over after `round`, in (0, 1]; None before the first cycle."""
    since = round - ceil(options.start * rounds)
    return (since % options.cycle + 1) / options.cycle if since >= 0 else None


class FedASAMSwaClient(FedASAMClient):
    """FedASAM's client with a learning rate that falls in cycles."""

    options: FedASAMSwaOptions

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        t = fedasam_cycle_position(trainer.round, self.context.rounds, self.options)
        if t is not None:
            trainer.lr = (1 - t) * trainer.lr + t * min(trainer.lr, self.options.lr_end)
        yield from super().train(trainer)


class FedASAMSwaServer(FedAvgServer[FedASAMSwaOptions]):
    """FedAvg's model in row 0; in row 1 the mean of the models at the ends of `averaged` cycles."""

    needs = "mean"

    def start(self) -> None:
        self.bank = self.context.bank(2)
        self.bank.rows[:] = self.context.initial
        self.averaged = 0
        self.pending = False
        """Whether row 0 ends a cycle. It joins the mean a round later, after the refiner has changed it."""

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        if self.pending:
            self.bank.rows[1] = self.global_model()
            self.averaged += 1
        super().aggregate(round, updates)
        self.pending = fedasam_cycle_position(round, self.context.rounds, self.options) == 1

    def global_model(self) -> Tensor:
        rows = self.bank.rows
        if not (self.averaged or self.pending):
            return rows[0]
        return average_models(self.context.layout, [rows[1], rows[0]], [self.averaged, self.pending])

    def models(self) -> Tensor:
        return self.bank.rows[:1]


register(
    Method(
        name="fedasam-swa",
        summary="FedASAM whose global model is the mean of the models at the ends of learning rate cycles",
        reference="Caldarola et al., ECCV 2022",
        options=FedASAMSwaOptions,
        server=FedASAMSwaServer,
        client=FedASAMSwaClient,
        neutral={"rho": 0.0, "start": 1.0},
        extra_compute="client 2x",
    )
)
