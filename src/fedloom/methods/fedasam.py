"""FedASAM: FedSAM with a radius that adapts to the scale of each weight, and a mean of late models on the server.

Caldarola et al., "Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022. With T = |v| + eta
for weights, and 1 for biases and all other parameters,

    v' = v + rho T^2 g / ||T g||

so that scaling a weight up and the next down by the same factor, which changes no output, changes no step either.

`fedasam-swa` adds stochastic weight averaging on the server: from a share `start` of the rounds on, the clients'
learning rate falls linearly over `cycle` rounds, again and again, and the running mean of the global models at the ends
of the cycles is deployed. Training goes on from the global model. It brings a server, `fedasam` does not: that one
goes with any. Batch norm's statistics are averaged like weights. Values are those for CIFAR-10; for CIFAR-100 rho is
0.5. Other public code has rho 0.1, eta 0 and no averaging. What is a weight the name says: it has "weight" in it.
"""

from collections.abc import Iterator
from math import ceil

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.layout import TensorKind
from fedloom.core.tasks import ClientUpdate
from fedloom.methods.base import MethodContext, Options
from fedloom.methods.fedavg import FedAvgOptions, FedAvgServer
from fedloom.methods.fedsam import TINY, SharpnessAwareClient
from fedloom.methods.registry import Method, register
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedASAMOptions(Options):
    rho: float = Field(0.7, ge=0)
    """how far away the worst point is looked for, in units of the weights; 0 is FedAvg"""
    eta: float = Field(0.2, ge=0)
    """added to the size of a weight; with 0 a weight that is 0 is never moved"""


class FedASAMSwaOptions(FedASAMOptions, FedAvgOptions):
    start: float = Field(0.75, ge=0, le=1)
    """share of the rounds before the first cycle; 1 averages nothing"""
    cycle: int = Field(10, ge=1)
    """rounds in a cycle, the model at the end of which is averaged"""
    lr_end: float = Field(1e-4, gt=0)
    """the clients' learning rate at the end of a cycle, where the run's own is above it"""


class FedASAMClient(SharpnessAwareClient[FedASAMOptions]):
    """The worst point of an ellipsoid with the shape of the model."""

    def radius(self) -> float:
        return self.options.rho

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        weights = bench.scratch["weights"] = bench.buffer("fedasam weights", bench.layout.trainable)
        for entry in bench.layout.entries:
            if entry.kind is TensorKind.PARAMETER:
                weights[entry.columns] = float("weight" in entry.name.rpartition(".")[2])
        yield LocalSteps(self.step)

    def ascent(self, bench: LocalTrainer) -> Tensor:
        g, v = bench.gradient, bench.weights
        t = torch.where(bench.scratch["weights"] > 0, v.abs() + self.options.eta, 1.0)
        tg = g.mul(t)
        return tg.mul(t).mul_(self.options.rho / (torch.linalg.vector_norm(tg) + TINY))


def fedasam_cycle_position(round: int, rounds: int, options: FedASAMSwaOptions) -> float | None:
    """How much of its cycle is over after `round` (from 0), in (0, 1]; None before the first cycle."""
    since = round - ceil(options.start * rounds)
    return (since % options.cycle + 1) / options.cycle if since >= 0 else None


class FedASAMSwaClient(FedASAMClient):
    """The same, with a learning rate that falls in cycles."""

    options: FedASAMSwaOptions

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        t = fedasam_cycle_position(bench.round, self.context.rounds, self.options)
        if t is not None:
            bench.lr = (1 - t) * bench.lr + t * min(bench.lr, self.options.lr_end)
        yield from super().train(bench)


class FedASAMSwaServer(FedAvgServer):
    """FedAvg's model in row 0, and in row 1 the mean of models at the ends of `averaged` cycles."""

    kept = ("bank", "averaged", "pending")
    options: FedASAMSwaOptions

    def __init__(self, context: MethodContext, options: FedASAMSwaOptions) -> None:
        super().__init__(context, options)
        self.bank = context.bank(2)
        self.bank.rows[:] = context.initial
        self.averaged = 0
        self.pending = False
        """Whether the model in row 0 ends a cycle. It joins the mean a round later: a refiner may still change it."""

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        if self.pending:
            self.bank.rows[1] = self.deploy()
            self.averaged += 1
        super().collect(round, updates)
        self.pending = fedasam_cycle_position(round, self.context.rounds, self.options) == 1

    def deploy(self) -> Tensor:
        if not (self.averaged or self.pending):
            return self.bank.rows[0]
        mean, row = WeightedMean(self.context.layout), self.bank.rows[0].clone()
        mean.add(self.bank.rows[1], self.averaged)
        mean.add(self.bank.rows[0], int(self.pending))
        mean.into(row)
        return row

    def models(self) -> Tensor:
        return self.bank.rows[:1]


register(
    Method(
        name="fedasam",
        summary="FedSAM with a radius that adapts to the scale of the weights",
        reference="Caldarola et al., ECCV 2022",
        options=FedASAMOptions,
        local=FedASAMClient,
        neutral={"rho": 0.0},
        models_sent="2K",
        extra_compute="client 2x",
    )
)
register(
    Method(
        name="fedasam-swa",
        summary="FedASAM, and the server deploys the mean of models at the ends of cycles of the learning rate",
        reference="Caldarola et al., ECCV 2022",
        options=FedASAMSwaOptions,
        server=FedASAMSwaServer,
        local=FedASAMSwaClient,
        neutral={"rho": 0.0, "start": 1.0},
        models_sent="2K",
        needs_each="",
        server_keeps="2 models",
        extra_compute="client 2x",
    )
)
