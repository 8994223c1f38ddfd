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


def _compute_gain(
    results: SceneResults, row: str, baseline: str, measure: Measure, jump_round: int
) -> tuple[bool, str]:
    """Return whether the difference of two rows supports a claim, and the difference with its interval, in points."""

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
    mean, half = float(np.mean(gaps)), interval_half_width(gaps)
    if half is None:
        return False, format_signed(mean, 1)
    significant = len(gaps) >= ENOUGH and abs(mean) > half
    text = f"{format_signed(mean, 1)} [{format_signed(mean - half, 1)}, {format_signed(mean + half, 1)}]"
    return significant and (mean > 0) == (measure != "spread"), text


def judge_demo_claim(scene: DemoScene, claim: DemoClaim, results: SceneResults) -> str:
    """Return one sentence: whether the claim is supported here, and what else the seeds say."""

    def compare(row: str, baseline: str, measures: Sequence[Measure] = claim.measures) -> tuple[str, str]:
        gains = [_compute_gain(results, row, baseline, one, scene.jump_round) for one in measures]
        supported = [one for one, _ in gains]
        outcome = "supported" if all(supported) else "partly supported" if any(supported) else "not supported"
        if len(claim.measures) == 1:
            return outcome, gains[0][1]
        return outcome, format_list([f"{NAMES[one]} {text}" for one, (_, text) in zip(measures, gains, strict=True)])

    outcome, gain = compare(claim.row, claim.baseline)
    text = f"{claim.paper}: {outcome} at lr={scene.settings['lr']}, {gain} against {claim.baseline}"
    for finding in claim.findings:
        outcome, gain = compare(finding.row, finding.baseline, finding.measures or claim.measures)
        text += finding.text.format(outcome=outcome, gain=gain)
    return f"{text}."
