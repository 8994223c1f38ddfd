"""The numbers of one group of runs, over its seeds, and the difference between two groups.

The result of a run is what it measured at its last evaluation, never the best it ever measured: to choose
the round on the test data is to train on them. The best is kept too, as a curiosity, and named so.
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
"""How many of the last evaluations the steadier accuracy is a mean of."""

REACH = 0.9
"""The target nobody named is this share of the best final accuracy, in whole percent."""


ENOUGH = 3
"""Common seeds from which a difference may be called clear: two agree by luck too easily."""


@dataclass(frozen=True)
class SeedStatistics:
    """One number a seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def std(self) -> float | None:
        """The sample standard deviation; one seed has none."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    def show(self, scale: float = 1.0, digits: int = 2) -> str:
        mean = f"{scale * self.mean:.{digits}f}"
        return mean if self.std is None else f"{mean} ± {scale * self.std:.{digits}f}"


@dataclass(frozen=True)
class PairedDifference:
    """How far a group's result is from that of the group `to`, paired over the seeds both have."""

    to: str
    mean: float
    half: float | None
    """Half the width of the 95 % t-interval; one seed has none.

    Nor have seeds that agree to the last digit: accuracy moves in steps of one test sample, so that says how
    coarse the measure is, and not that nothing could differ.
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
        """Whether enough seeds give an interval that leaves out zero."""
        return self.seeds >= ENOUGH and self.half is not None and abs(self.mean) > self.half


@dataclass(frozen=True)
class GroupStatistics:
    """Runs that differ in nothing but the seed."""

    name: RecordGroup
    runs: tuple[RunRecord, ...]
    """Those that are counted: one a seed, and only finished ones where there are any."""
    accuracy: SeedStatistics | None
    late_accuracy: SeedStatistics | None
    best_accuracy: SeedStatistics | None
    worst_clients: SeedStatistics | None
    personal: SeedStatistics | None
    """Accuracy of the clients' own models, mean over clients, where the method makes such models."""
    personal_worst: SeedStatistics | None
    loss: SeedStatistics | None
    bytes_down: SeedStatistics | None
    bytes_up: SeedStatistics | None
    seconds: SeedStatistics | None
    epsilon: SeedStatistics | None
    """Privacy spent, where some is guaranteed."""
    delta: SeedStatistics | None
    """Told in every record of a run that clips updates."""
    lost: int
    """Client answers that did not come, over all counted runs."""
    asked: int
    target: float | None = None
    rounds_to_target: float | None = None
    """The median over seeds, where a seed that never got there counts as never (None)."""
    reached: int = 0
    difference: PairedDifference | None = None

    @property
    def label(self) -> str:
        return self.name.label

    @property
    def short(self) -> str:
        """The label without the task."""
        return self.name.short

    @property
    def task(self) -> str:
        return self.name.task

    @property
    def members(self) -> tuple[RunRecord, ...]:
        """Every run that was given, counted or not."""
        return self.name.records

    @property
    def metric(self) -> str:
        return "loss" if self.accuracy is None and self.loss is not None else "accuracy"

    @property
    def result(self) -> SeedStatistics | None:
        """What the group is judged by: the final accuracy or, where there is none, the final loss."""
        return self.accuracy or self.loss

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)


def compute_group_statistics(name: RecordGroup) -> GroupStatistics:
    """Take the numbers of one group."""
    unique = select_record_per_seed(name.records)
    runs = tuple([run for run in unique if run.finished] or unique)

    def over(value: Callable[[RunRecord], float | None]) -> SeedStatistics | None:
        values = [found for run in runs if (found := value(run)) is not None]
        return SeedStatistics(tuple(values)) if values else None

    def every(key: str, reduce: Callable[[Floats], Any], least: int = 1) -> SeedStatistics | None:
        return over(lambda run: float(reduce(values)) if len(values := run.series(key)[1]) >= least else None)

    return GroupStatistics(
        name=name,
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
        lost=round(sum(run.total("lost") or 0 for run in runs)),
        asked=round(sum(_asked(row) for run in runs for row in run.history)),
    )


def _asked(row: dict[str, Any]) -> float:
    """How many clients a round asked; the record may hold their number or their names."""
    clients = row.get("clients")
    return float(len(clients)) if isinstance(clients, list) else get_record_number(row, "clients") or 0.0


def _final_privacy_cost(run: RunRecord, key: str) -> float | None:
    """`key` of the account of privacy after the last round."""
    return get_record_number(run.history[-1], key) if run.history else None


def add_target_statistics(group: GroupStatistics, target: float) -> GroupStatistics:
    """`group` with the rounds it took to reach `target` accuracy."""
    firsts = []
    for run in group.runs:
        rounds, values = run.series("accuracy")
        there = rounds[values >= target]
        firsts.append(float(there[0]) if len(there) else np.inf)
    # The two middle values of an even number are averaged only if both are finite: inf - inf is no number.
    middle = np.sort(firsts)[[(len(firsts) - 1) // 2, len(firsts) // 2]]
    median = float(middle.mean()) if np.isfinite(middle).all() else None
    return replace(group, target=target, rounds_to_target=median, reached=int(np.isfinite(firsts).sum()))


def compute_paired_difference(group: GroupStatistics, to: GroupStatistics) -> PairedDifference | None:
    """The difference in result, seed by seed, so that what a seed does to both cancels."""
    if group.metric != to.metric:
        return None
    mine, theirs = ({run.seed: final_record_value(run, group.metric) for run in one.runs} for one in (group, to))
    gaps = [
        value - other for seed, value in mine.items() if value is not None and (other := theirs.get(seed)) is not None
    ]
    if not gaps:
        return None
    half = None
    if len(gaps) > 1 and (spread := float(np.std(gaps, ddof=1))) > 1e-9:
        from scipy.special import stdtrit  # type: ignore[import-untyped, unused-ignore]  # scipy has no types

        half = float(stdtrit(len(gaps) - 1, 0.975) * spread / np.sqrt(len(gaps)))
    return PairedDifference(to.short, float(np.mean(gaps)), half, len(gaps))
