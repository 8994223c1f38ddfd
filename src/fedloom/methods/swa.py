"""SWA: each client returns the mean of snapshots from the end of its training.

Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018. Train as usual; after a
share `start` of the steps take snapshots of the weights, with a constant or a cyclic learning rate, and return their
mean. The authors start at 75 to 80 % of the steps and take a snapshot after every epoch.

Local training has few epochs, so snapshots are counted here instead: they lie evenly between `start` and the end of
the client's training, the last of them on its last step. The paper on Local Superior Soups measures against 4
snapshots from the start (`start` 0). With a cyclic learning rate a snapshot ends each cycle, where the rate is lowest.
As in the paper, one more pass over the client's samples finds the mean's own statistics of batch norm (`estimate`).
"""

from collections.abc import Iterator
from math import ceil

from pydantic import Field

from fedloom.core.averaging import WeightedMean
from fedloom.core.layout import TensorKind
from fedloom.methods.base import Client, MethodContext, Options
from fedloom.methods.registry import Method, register
from fedloom.training.trainer import LocalSteps, LocalTrainer


class SwaOptions(Options):
    snapshots: int = Field(4, ge=1)
    """how many models are averaged; 1 is FedAvg"""
    start: float = Field(0.75, ge=0, lt=1)
    """share of a client's steps before the first of the stretches that end in a snapshot"""
    lr_end: float = Field(1.0, gt=0, le=1)
    """factor on the learning rate at the end of each such stretch, reached linearly; 1 keeps it constant"""
    estimate: bool = True
    """estimate batch norm's statistics of the mean anew from the client's samples; otherwise they are averaged"""


def swa_snapshot_steps(total: int, start: float, snapshots: int) -> list[int]:
    """After which of `total` steps a snapshot is taken; where there are few steps, after each of them."""
    first = int(start * total)
    count = min(snapshots, total - first)
    return [first + ceil((total - first) * i / count) for i in range(1, count + 1)]


def swa_statistics_notes(context: MethodContext, method: str) -> list[str]:
    """What to say of a method that estimates statistics anew in a run whose other methods would not."""
    if context.training.statistics == "estimated" or all(
        e.kind is not TensorKind.BUFFER for e in context.layout.entries
    ):
        return []
    return [
        f"{method} estimates batch norm's statistics of its mean anew ({method}.estimate), other methods keep those of "
        "their training: compare with --statistics estimated, which treats all alike."
    ]


class SwaClient(Client[SwaOptions]):
    """Ordinary training, cut where a snapshot is taken."""

    def notes(self) -> list[str]:
        return swa_statistics_notes(self.context, "swa") if self.options.estimate and self.options.snapshots > 1 else []

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        total, options = bench.length(LocalSteps(self.step)), self.options
        yield LocalSteps(self.step, steps=int(options.start * total))
        mean, lr = WeightedMean(bench.layout), bench.lr
        for end in swa_snapshot_steps(total, options.start, options.snapshots):
            cycle = end - bench.steps
            if options.lr_end == 1:
                yield LocalSteps(self.step, steps=cycle)
            else:
                for i in range(1, cycle + 1):
                    t = i / cycle
                    bench.lr = lr * ((1 - t) + t * options.lr_end)
                    yield LocalSteps(self.step, steps=1)
            mean.add(bench.row)
        mean.into(bench.row)
        bench.lr = lr
        if options.estimate and mean.weight > 1:  # one snapshot has its own already
            bench.estimate_statistics()


register(
    Method(
        name="swa",
        summary="each client returns the mean of snapshots from the end of its training",
        reference="Izmailov et al., UAI 2018",
        options=SwaOptions,
        local=SwaClient,
        neutral={"snapshots": 1},
        models_sent="2K",
    )
)
