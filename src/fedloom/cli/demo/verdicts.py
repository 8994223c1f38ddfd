"""Verdicts of the demo: what its seeds say about the claims of the papers.

A claim is supported only if, in every measure, the 95 % interval of the paired difference excludes zero on the side of
the claim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.cli.demo.scene import DemoClaim, DemoScene, Measure
from fedloom.report.significance import ENOUGH, interval_half_width
from fedloom.utils.formatting import format_list, format_signed


@dataclass(frozen=True)
class SeedResult:
    """What one run came to. Accuracies are in percent."""

    accuracy: float
    """Mean of the last evaluations."""
    spread: float
    """Standard deviation of the last evaluations; 0 for one evaluation."""
    by_round: Mapping[int, float]
    """The accuracy of every evaluation."""


NAMES = {"accuracy": "accuracy", "spread": "spread", "first": "accuracy after round 1", "jump": "jump"}

SceneResults = Mapping[str, Mapping[int, SeedResult]]
"""By row and seed."""


@dataclass(frozen=True)
class _Gain:
    """The difference of two rows in one measure, paired over their common seeds."""

    measure: Measure
    mean: float
    half: float | None
    """Half the width of the 95 % t-interval; None if there is none."""
    seeds: int

    @property
    def significant(self) -> bool:
        """Whether there are enough seeds and the interval does not contain zero."""
        return self.seeds >= ENOUGH and self.half is not None and abs(self.mean) > self.half

    @property
    def supported(self) -> bool:
        """Whether the difference is significant and in the direction of the claim."""
        return self.significant and (self.mean > 0) == (self.measure != "spread")

    def show(self) -> str:
        """Format the difference and its interval, in points."""
        text = format_signed(self.mean, 1)
        if self.half is not None:
            text += f" [{format_signed(self.mean - self.half, 1)}, {format_signed(self.mean + self.half, 1)}]"
        return text


def _compute_gain(results: SceneResults, row: str, baseline: str, measure: Measure, jump_round: int = 0) -> _Gain:
    """Compare two rows in one measure."""

    def value(result: SeedResult) -> float:
        if measure == "accuracy":
            return result.accuracy
        if measure == "spread":
            return result.spread
        if measure == "first":
            return result.by_round[1]
        return result.by_round[jump_round + 1] - result.by_round[jump_round]

    ours, theirs = results[row], results[baseline]
    gaps = [value(ours[seed]) - value(theirs[seed]) for seed in ours if seed in theirs]
    return _Gain(measure, float(np.mean(gaps)), interval_half_width(gaps), len(gaps))


def judge_demo_claim(scene: DemoScene, claim: DemoClaim, results: SceneResults) -> str:
    """Return one sentence: whether the claim is supported here, and what else the seeds say."""

    def compare(row: str, baseline: str, measures: Sequence[Measure] = claim.measures) -> tuple[str, str]:
        gains = [_compute_gain(results, row, baseline, one, scene.jump_round) for one in measures]
        supported = [gain.supported for gain in gains]
        outcome = "supported" if all(supported) else "partly supported" if any(supported) else "not supported"
        if len(claim.measures) == 1:
            return outcome, gains[0].show()
        return outcome, format_list([f"{NAMES[gain.measure]} {gain.show()}" for gain in gains])

    outcome, gain = compare(claim.row, claim.baseline)
    text = f"{claim.paper}: {outcome} at lr={scene.settings['lr']}, {gain} against {claim.baseline}"
    for finding in claim.findings:
        outcome, gain = compare(finding.row, finding.baseline, finding.measures or claim.measures)
        text += finding.text.format(outcome=outcome, gain=gain)
    return f"{text}."
