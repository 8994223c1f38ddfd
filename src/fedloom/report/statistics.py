"""Means over seeds, intervals and paired differences of groups of runs.

The result of a run is its last evaluation, never its best one: choosing the round by the test data would be training on
them. The best value is kept too, under its own name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedloom.report.records import (
    Floats,
    RecordGroup,
    RunRecord,
    final_record_value,
    get_record_number,
    select_record_per_seed,
)

LATE = 10
"""Number of last evaluations to average in `late_accuracy`."""

REACH = 0.9
"""The default target, as a share of the best final accuracy, rounded down to a whole percent."""

ENOUGH = 3
"""Common seeds needed to call a difference clear. Two seeds agree by chance too easily."""


@dataclass(frozen=True)
class SeedStatistics:
    """One number for each seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def std(self) -> float | None:
        """The sample standard deviation; None for one seed."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    def show(self, scale: float = 1.0, digits: int = 2) -> str:
        mean = f"{scale * self.mean:.{digits}f}"
        return mean if self.std is None else f"{mean} ± {scale * self.std:.{digits}f}"


@dataclass(frozen=True)
class PairedDifference:
    """The difference in result between a group and `reference`, paired over their common seeds."""

    reference: str
    mean: float
    half: float | None
    """Half the width of the 95 % t-interval; None for one seed, or if all seeds agree to the last digit.

    Accuracy changes in steps of one test sample, so equal differences show only that the measure is coarse.
    """
    seeds: int

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half

    @property
    def clear(self) -> bool:
        """Whether there are enough seeds and the interval does not contain zero."""
        return self.seeds >= ENOUGH and self.half is not None and abs(self.mean) > self.half


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of runs that differ only in the seed."""

    record_group: RecordGroup
    runs: tuple[RunRecord, ...]
    """The counted runs: one for each seed, and only finished ones if there are any."""
    accuracy: SeedStatistics | None
    late_accuracy: SeedStatistics | None
    best_accuracy: SeedStatistics | None
    worst_clients: SeedStatistics | None
    personal: SeedStatistics | None
    """Accuracy of the personalized models, mean over clients; None if the method has none."""
    personal_worst: SeedStatistics | None
    loss: SeedStatistics | None
    bytes_down: SeedStatistics | None
    bytes_up: SeedStatistics | None
    seconds: SeedStatistics | None
    epsilon: SeedStatistics | None
    """Privacy spent; None without a guarantee."""
    delta: SeedStatistics | None
    """Part of every record of a run that clips updates."""
    failed: int
    """Number of failed client tasks of all counted runs."""
    asked: int
    target: float | None = None
    rounds_to_target: float | None = None
    """The median over seeds, in which a seed that misses the target counts as infinite. An infinite median is None."""
    reached: int = 0
    difference: PairedDifference | None = None

    @property
    def label(self) -> str:
        return self.record_group.label

    @property
    def short(self) -> str:
        """The label without the task."""
        return self.record_group.short

    @property
    def task(self) -> str:
        return self.record_group.task

    @property
    def members(self) -> tuple[RunRecord, ...]:
        """All runs of the group, counted or not."""
        return self.record_group.records

    @property
    def metric(self) -> str:
        return "loss" if self.accuracy is None and self.loss is not None else "accuracy"

    @property
    def result(self) -> SeedStatistics | None:
        """The final accuracy or, without one, the final loss."""
        return self.accuracy or self.loss

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)


def compute_group_statistics(record_group: RecordGroup) -> GroupStatistics:
    """Compute the statistics of one group."""
    unique = select_record_per_seed(record_group.records)
    runs = tuple([run for run in unique if run.finished] or unique)

    def over(value: Callable[[RunRecord], float | None]) -> SeedStatistics | None:
        values = [found for run in runs if (found := value(run)) is not None]
        return SeedStatistics(tuple(values)) if values else None

    def every(key: str, reduce: Callable[[Floats], Any], least: int = 1) -> SeedStatistics | None:
        return over(lambda run: float(reduce(values)) if len(values := run.series(key)[1]) >= least else None)

    return GroupStatistics(
        record_group=record_group,
        runs=runs,
        accuracy=over(lambda run: final_record_value(run, "accuracy")),
        late_accuracy=every("accuracy", lambda values: np.mean(values[-LATE:]), LATE + 1),
        best_accuracy=every("accuracy", np.max),
        worst_clients=over(lambda run: final_record_value(run, "client_accuracy_worst10")),
        personal=over(lambda run: final_record_value(run, "personal_accuracy_mean")),
        personal_worst=over(lambda run: final_record_value(run, "personal_accuracy_worst10")),
        loss=over(lambda run: final_record_value(run, "loss")),
        bytes_down=over(lambda run: run.total("bytes_down")),
        bytes_up=over(lambda run: run.total("bytes_up")),
        seconds=over(lambda run: run.total("seconds.total")),
        epsilon=over(lambda run: _final_privacy_cost(run, "epsilon")),
        delta=over(lambda run: _final_privacy_cost(run, "delta")),
        failed=round(sum(run.total("failed") or 0 for run in runs)),
        asked=round(sum(_asked(row) for run in runs for row in run.history)),
    )


def _asked(round_entry: dict[str, Any]) -> float:
    """Return the number of clients of a round. The record holds their number or a list of them."""
    clients = round_entry.get("clients")
    return float(len(clients)) if isinstance(clients, list) else get_record_number(round_entry, "clients") or 0.0


def _final_privacy_cost(run: RunRecord, key: str) -> float | None:
    """Return `key` of the privacy accountant after the last round."""
    return get_record_number(run.history[-1], key) if run.history else None


def add_target_statistics(group: GroupStatistics, target_accuracy: float) -> GroupStatistics:
    """Return `group` with the number of rounds until `target_accuracy`."""
    firsts = []
    for run in group.runs:
        rounds, values = run.series("accuracy")
        there = rounds[values >= target_accuracy]
        firsts.append(float(there[0]) if len(there) else np.inf)
    # Average the two middle values only if both are finite: inf - inf is NaN.
    middle = np.sort(firsts)[[(len(firsts) - 1) // 2, len(firsts) // 2]]
    median = float(middle.mean()) if np.isfinite(middle).all() else None
    return replace(group, target=target_accuracy, rounds_to_target=median, reached=int(np.isfinite(firsts).sum()))


def compute_paired_difference(group: GroupStatistics, reference: GroupStatistics) -> PairedDifference | None:
    """Return the difference in result, paired by seed, which cancels effects of the seed on both groups."""
    if group.metric != reference.metric:
        return None
    mine, theirs = ({run.seed: final_record_value(run, group.metric) for run in one.runs} for one in (group, reference))
    gaps = [
        value - other for seed, value in mine.items() if value is not None and (other := theirs.get(seed)) is not None
    ]
    if not gaps:
        return None
    half = None
    if len(gaps) > 1 and (spread := float(np.std(gaps, ddof=1))) > 1e-9:
        from scipy.special import stdtrit  # type: ignore[import-untyped, unused-ignore]  # scipy has no types

        half = float(stdtrit(len(gaps) - 1, 0.975) * spread / np.sqrt(len(gaps)))
    return PairedDifference(reference.short, float(np.mean(gaps)), half, len(gaps))
