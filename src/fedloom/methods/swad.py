"""SWAD: each client returns the mean of all iterates between two moments that its validation loss names.

Cha et al., "SWAD: Domain Generalization by Seeking Flat Minima", NeurIPS 2021, algorithm 1. With the validation losses
E(1), E(2), ... of a training,

    start  t_s = the first check whose loss is the least of itself and the N_s - 1 checks after it;
           l = r times the mean of those N_s losses
    end    t_e = the last check before N_e checks in a row that are all above l

and the mean is over every iterate from t_s to t_e. Training stops when the end is seen.

As in the authors' code, there is a check after every few steps; the iterates between two checks are one segment, which
is in or out as a whole, and the loss of a check is that of its last iterate. The paper gives no rule for a loss that
never starts to rise or never passes l: as in their code, the last segment alone is returned where there was no start,
and all segments from the start on where there was no end. 32 checks are one at each of the 32 steps that the paper on
Local Superior Soups gives SWAD. Batch norm's statistics of the mean are found by one more pass, as the authors do.
"""

from collections.abc import Iterator
from statistics import fmean

from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.methods.base import Client, Options
from fedloom.methods.registry import Method, register
from fedloom.methods.swa import swa_snapshot_steps, swa_statistics_notes
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer


class SwadOptions(Options):
    optimum_patience: int = Field(3, ge=1)
    """N_s: checks in a row of which the first must be the lowest, for averaging to start at it"""
    overfit_patience: int = Field(6, ge=1)
    """N_e: checks in a row above the tolerated loss, for averaging to have ended before them"""
    tolerance: float = Field(1.3, ge=1)
    """r: the tolerated loss, in means of the losses at the start"""
    checks: int = Field(32, ge=1)
    """validation checks in a client's training, evenly spread, at most one a step"""
    validation: float = Field(0.2, ge=0, lt=1)
    """share of each client's samples held out to validate, unless --validation is given"""
    estimate: bool = True
    """estimate batch norm's statistics of the mean anew from the client's samples; otherwise they are averaged"""


class SwadValley:
    """Algorithm 1: takes segments and the losses of their checks, and keeps what the mean may still need."""

    def __init__(self, mean: WeightedMean, options: SwadOptions) -> None:
        self.mean = mean
        self.threshold: float | None = None
        """l; None before the start."""
        self.ended = False
        self._options = options
        self._losses: list[float] = []
        self._pending: list[tuple[Tensor, int]] = []  # segments of which it is not yet known whether they are in

    def check(self, segment: Tensor, steps: int, loss: float) -> None:
        """Take the mean of `steps` iterates, and the validation loss of the last of them."""
        optimum, overfit = self._options.optimum_patience, self._options.overfit_patience
        self._losses.append(loss)
        self._pending.append((segment, steps))
        if self.threshold is None:
            recent = self._losses[-optimum:]
            if len(recent) == optimum and recent[0] == min(recent):
                self.threshold = self._options.tolerance * fmean(recent)
            del self._pending[:-optimum]  # what is older lies before every start to come
        elif min(self._losses[-overfit:]) > self.threshold:
            del self._pending[-overfit:]
            self.ended = True
        while self.threshold is not None and len(self._pending) > overfit:  # these no end can cut off any more
            self.mean.add(*self._pending.pop(0))

    def finish(self) -> WeightedMean:
        """The mean, when training is over."""
        for segment in self._pending if self.threshold is not None else self._pending[-1:]:
            self.mean.add(*segment)
        return self.mean


class SwadClient(Client[SwadOptions]):
    """Ordinary training; the iterates since the last check are averaged as they come."""

    def notes(self) -> list[str]:
        return swa_statistics_notes(self.context, "swad") if self.options.estimate else []

    def holds_out(self) -> float:
        return self.options.validation

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        floats = bench.layout.floats
        segment = bench.scratch["segment"] = bench.buffer("swad segment", floats)
        count = bench.scratch["count"] = bench.buffer("swad count")
        valley = SwadValley(WeightedMean(bench.layout), self.options)
        for end in swa_snapshot_steps(bench.length(LocalSteps(self.step)), 0.0, self.options.checks):
            steps = end - bench.steps
            segment.zero_()
            count.zero_()
            yield LocalSteps(self.step, steps=steps)
            row = bench.row.clone()  # with the integer buffers of the last iterate
            row[:floats] = segment
            valley.check(row, steps, bench.validate(bench.row).loss)
            if valley.ended:
                break
        valley.finish().into(bench.row)
        if self.options.estimate and valley.mean.weight > 1:  # one iterate has its own already
            bench.estimate_statistics()

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        loss = super().step(bench, batch)
        count = bench.scratch["count"].add_(1)
        bench.scratch["segment"].lerp_(bench.row[: bench.layout.floats], 1 / count)
        return loss


register(
    Method(
        name="swad",
        summary="each client returns the mean of all iterates in the valley of its validation loss",
        reference="Cha et al., NeurIPS 2021",
        options=SwadOptions,
        local=SwadClient,
        # A check at every step, no start ever, and nothing held out: the last iterate is returned.
        neutral={"checks": 10**9, "optimum_patience": 10**9, "validation": 0.0},
        models_sent="2K",
        extra_compute="client tests",
    )
)
