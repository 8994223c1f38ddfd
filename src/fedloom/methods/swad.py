"""SWAD: each client averages all iterates while its validation loss is low.

Cha et al., "SWAD: Domain Generalization by Seeking Flat Minima", NeurIPS 2021, algorithm 1. With the validation losses
E(1), E(2), ... of a training,

    start  t_s = the first check whose loss is the least of itself and the N_s - 1 checks after it;
           l = r times the mean of those N_s losses
    end    t_e = the last check before N_e checks in a row that are all above l

The mean is over every iterate from t_s to t_e. Training stops as soon as the end is known.

As in the authors' code, there is a check after every few steps. The iterates between two checks are one segment, which
counts as a whole or not at all; the loss of a check is that of its last iterate. The paper has no rule for a loss that
never starts to rise or never exceeds l. As in their code, without a start only the last segment counts, and without an
end all segments from the start on. The default of 32 is one check per step of the 32 steps that the paper on Local
Superior Soups gives SWAD. As in the paper, one more pass estimates the batch-norm statistics of the mean.
"""

from collections.abc import Iterator
from statistics import fmean

from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.methods.base import Client, Options
from fedloom.methods.registry import register
from fedloom.methods.swa import swa_snapshot_steps, swa_statistics_notes
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer


class SwadOptions(Options):
    optimum_patience: int = Field(3, ge=1)
    """N_s: averaging starts at the first check whose loss is the lowest of this many in a row"""
    overfit_patience: int = Field(6, ge=1)
    """N_e: averaging ends before this many checks in a row above the tolerated loss"""
    tolerance: float = Field(1.3, ge=1)
    """r: the tolerated loss, relative to the mean of the N_s losses at the start"""
    checks: int = Field(32, ge=1)
    """number of validation checks in a client's training, evenly spaced, at most one per step"""
    validation: float = Field(0.2, ge=0, lt=1)
    """share of each client's samples held out to validate, unless --validation is given"""
    estimate: bool = True
    """estimate the batch-norm statistics of the mean from the client's samples; otherwise they are averaged"""


class SwadValley:
    """Algorithm 1: receives segments and the losses of their checks; stores only what the mean may still need."""

    def __init__(self, mean: WeightedMean, options: SwadOptions) -> None:
        self.mean = mean
        self.threshold: float | None = None
        """l; None before the start."""
        self.ended = False
        self._options = options
        self._losses: list[float] = []
        self._pending: list[tuple[Tensor, int]] = []  # segments that may or may not count

    def check(self, segment: Tensor, steps: int, loss: float) -> None:
        """Add a segment: the mean of `steps` iterates, and the validation loss of the last of them."""
        optimum, overfit = self._options.optimum_patience, self._options.overfit_patience
        self._losses.append(loss)
        self._pending.append((segment, steps))
        if self.threshold is None:
            recent = self._losses[-optimum:]
            if len(recent) == optimum and recent[0] == min(recent):
                self.threshold = self._options.tolerance * fmean(recent)
            del self._pending[:-optimum]  # older ones are before any later start
        elif min(self._losses[-overfit:]) > self.threshold:
            del self._pending[-overfit:]
            self.ended = True
        while self.threshold is not None and len(self._pending) > overfit:  # no end can exclude these any more
            self.mean.add(*self._pending.pop(0))

    def finish(self) -> WeightedMean:
        """Return the mean after training."""
        for segment in self._pending if self.threshold is not None else self._pending[-1:]:
            self.mean.add(*segment)
        return self.mean


@register(
    "swad",
    reference="Cha et al., NeurIPS 2021",
    neutral={"checks": 10**9, "optimum_patience": 10**9, "validation": 0.0},
    extra_compute="client tests",
)
class SwadClient(Client[SwadOptions]):
    """Each client returns the mean of all iterates while its validation loss is low."""

    def notes(self) -> list[str]:
        return swa_statistics_notes(self.context, "swad") if self.options.estimate else []

    def validation_fraction(self) -> float:
        return self.options.validation

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        floats = trainer.layout.floats
        segment = trainer.scratch["segment"] = trainer.buffer("swad segment", floats)
        count = trainer.scratch["count"] = trainer.buffer("swad count")
        valley = SwadValley(WeightedMean(trainer.layout), self.options)
        for end in swa_snapshot_steps(trainer.num_steps(LocalSteps(self.training_step)), 0.0, self.options.checks):
            steps = end - trainer.steps
            segment.zero_()
            count.zero_()
            yield LocalSteps(self.training_step, steps=steps)
            row = trainer.row.clone()  # with the integer buffers of the last iterate
            row[:floats] = segment
            valley.check(row, steps, trainer.validate(trainer.row).loss)
            if valley.ended:
                break
        valley.finish().write_to(trainer.row)
        if self.options.estimate and valley.mean.weight > 1:  # a single iterate has its own already
            trainer.update_batch_norm_statistics()

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        loss = super().training_step(trainer, batch)
        count = trainer.scratch["count"].add_(1)
        trainer.scratch["segment"].lerp_(trainer.row[: trainer.layout.floats], 1 / count)
        return loss
