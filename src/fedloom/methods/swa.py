"""SWA: each client returns the mean of snapshots from the end of its training.

Izmailov et al., "Averaging Weights Leads to Wider Optima and Better Generalization", UAI 2018. Train as usual; after a
share `start` of the steps take snapshots of the weights, with a constant or a cyclic learning rate, and return their
mean. The authors start at 75 to 80 % of the steps and take a snapshot after every epoch.

Local training has few epochs, so the number of snapshots is set here instead. They are evenly spaced between `start`
and the end of the client's training; the last one is at the last step. The paper on Local Superior Soups compares with
4 snapshots from the beginning (`start` 0). With a cyclic learning rate a snapshot ends each cycle, at the lowest rate.
As in the paper, one more pass over the client's samples estimates the mean's batch-norm statistics (`estimate`).
"""

from collections.abc import Iterator
from math import ceil

from pydantic import Field

from fedloom.core.averaging import WeightedMean
from fedloom.core.layout import TensorKind
from fedloom.methods.base import Client, MethodContext, Options
from fedloom.methods.registry import register
from fedloom.training.trainer import LocalSteps, LocalTrainer


class SwaOptions(Options):
    snapshots: int = Field(4, ge=1)
    """number of models to average; 1 is FedAvg"""
    start: float = Field(0.75, ge=0, lt=1)
    """share of a client's steps before the first of the intervals that end in a snapshot"""
    lr_end: float = Field(1.0, gt=0, le=1)
    """factor on the learning rate at the end of each such interval, reached linearly; 1 keeps it constant"""
    estimate: bool = True
    """estimate the batch-norm statistics of the mean from the client's samples; otherwise they are averaged"""


def swa_snapshot_steps(total_steps: int, start: float, snapshots: int) -> list[int]:
    """Return the steps with a snapshot after them; if there are few steps, all of them."""
    first = int(start * total_steps)
    count = min(snapshots, total_steps - first)
    return [first + ceil((total_steps - first) * i / count) for i in range(1, count + 1)]


def swa_statistics_notes(context: MethodContext, method_name: str) -> list[str]:
    """Return a note if the method estimates batch-norm statistics but the run's other methods do not."""
    if context.config.statistics == "estimated" or all(e.kind is not TensorKind.BUFFER for e in context.layout.entries):
        return []
    return [
        f"{method_name} estimates the batch-norm statistics of its mean again ({method_name}.estimate), other methods "
        "keep those of training: compare with --statistics estimated, which treats all methods alike."
    ]


@register("swa", reference="Izmailov et al., UAI 2018", neutral={"snapshots": 1})
class SwaClient(Client[SwaOptions]):
    """Each client returns the mean of snapshots from the end of its training."""

    def notes(self) -> list[str]:
        return swa_statistics_notes(self.context, "swa") if self.options.estimate and self.options.snapshots > 1 else []

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        total, options = trainer.num_steps(LocalSteps(self.training_step)), self.options
        yield LocalSteps(self.training_step, steps=int(options.start * total))
        mean, lr = WeightedMean(trainer.layout), trainer.lr
        for end in swa_snapshot_steps(total, options.start, options.snapshots):
            cycle = end - trainer.steps
            if options.lr_end == 1:
                yield LocalSteps(self.training_step, steps=cycle)
            else:
                for i in range(1, cycle + 1):
                    t = i / cycle
                    trainer.lr = lr * ((1 - t) + t * options.lr_end)
                    yield LocalSteps(self.training_step, steps=1)
            mean.add(trainer.row)
        mean.write_to(trainer.row)
        trainer.lr = lr
        if options.estimate and mean.weight > 1:  # a single snapshot has its own already
            trainer.update_batch_norm_statistics()
