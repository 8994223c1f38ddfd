"""Means over seeds, intervals and paired differences of groups of runs.

The result of a run is the mean of its last evaluations (its window), never its best one: choosing the round by the test
data would be training on them. The best value is kept too, under its own name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedloom.report.records import Floats, RecordGroup, RunRecord, get_record_number, select_record_per_seed
from fedloom.report.significance import interval_half_width, paired_p_value
from fedloom.utils.result_window import compute_window_mean, compute_window_std, select_window_values

REACH = 0.9
"""The default target, as a share of the best result, rounded down to a whole percent."""


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
    """Half the width of the 95 % t-interval; None for one seed, or if all seeds agree to the last digit."""
    seeds: int
    p: float | None
    """The p-value of a paired t-test, corrected for the other tests of the task; None with too few seeds."""

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half


@dataclass(frozen=True, kw_only=True)
class GroupStatistics(RecordGroup):
    """Statistics of runs that differ only in the seed. `records` are all of them, counted or not."""

    runs: tuple[RunRecord, ...]
    """The counted runs: one for each seed, and only finished ones if there are any."""
    windows: tuple[int, ...]
    """How many of its last evaluations a run averages; several numbers if the runs differ in it."""
    accuracy: SeedStatistics | None
    """The mean accuracy in the window of each run."""
    window_std: SeedStatistics | None
    """The standard deviation of accuracy or loss within the window of each run."""
    best_accuracy: SeedStatistics | None
    worst_clients: SeedStatistics | None
    personal: SeedStatistics | None
    """Accuracy of the personalized models, mean over clients; None if the method has none."""
    personal_worst: SeedStatistics | None
    held_out: SeedStatistics | None
    """Accuracy for the clients that never trained, mean over them; None without such clients."""
    held_out_worst: SeedStatistics | None
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
    results: dict[str, float] = field(default_factory=dict)
    """The result of each run that has one, by seed."""
    target: float | None = None
    rounds_to_target: float | None = None
    """The median over seeds, in which a seed that misses the target counts as infinite. An infinite median is None."""
    reached: int = 0
    difference: PairedDifference | None = None

    @property
    def metric(self) -> str:
        return "loss" if self.accuracy is None and self.loss is not None else "accuracy"

    @property
    def result(self) -> SeedStatistics | None:
        """The mean accuracy in the window or, without one, the mean loss."""
        return self.accuracy or self.loss

    @property
    def num_diverged(self) -> int:
        """How many of the counted runs diverged; the means leave them out."""
        return sum(run.diverged is not None for run in self.runs)

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)


def compute_group_statistics(record_group: RecordGroup, window: int | None = None) -> GroupStatistics:
    """Compute the statistics of one group. `window` replaces the setting of the runs."""
    unique = select_record_per_seed(record_group.records)
    runs = tuple([run for run in unique if run.finished] or unique)

    def over(value: Callable[[RunRecord], float | None]) -> SeedStatistics | None:
        values = [found for run in runs if (found := value(run)) is not None]
        return SeedStatistics(tuple(values)) if values else None

    def in_window(run: RunRecord, key: str) -> list[float]:
        return [] if run.diverged else select_window_values(run.history, key, run.window(window))

    def mean(key: str) -> SeedStatistics | None:
        return over(lambda run: compute_window_mean(in_window(run, key)))

    accuracy, loss = mean("accuracy"), mean("loss")
    metric = "loss" if accuracy is None else "accuracy"
    results = {run.seed: compute_window_mean(in_window(run, metric)) for run in runs}
    return GroupStatistics(
        **vars(record_group),
        runs=runs,
        windows=tuple(sorted({run.window(window) for run in runs})),
        accuracy=accuracy,
        window_std=over(lambda run: compute_window_std(in_window(run, metric))),
        best_accuracy=over(lambda run: _highest(_trained(run, "accuracy")[1])),
        worst_clients=mean("client_accuracy_worst10"),
        personal=mean("personal_accuracy_mean"),
        personal_worst=mean("personal_accuracy_worst10"),
        held_out=mean("held_out_accuracy_mean"),
        held_out_worst=mean("held_out_accuracy_worst10"),
        loss=loss,
        bytes_down=over(lambda run: run.total("bytes_down")),
        bytes_up=over(lambda run: run.total("bytes_up")),
        seconds=over(lambda run: run.total("seconds.total")),
        epsilon=over(lambda run: _final_privacy_cost(run, "epsilon")),
        delta=over(lambda run: _final_privacy_cost(run, "delta")),
        failed=round(sum(run.total("failed") or 0 for run in runs)),
        asked=round(sum(_asked(row) for run in runs for row in run.history)),
        results={seed: result for seed, result in results.items() if result is not None},
    )


def _trained(run: RunRecord, key: str) -> tuple[Floats, Floats]:
    """Return rounds and values of `key` without round 0, which is the model before training."""
    rounds, values = run.series(key)
    return rounds[rounds > 0].astype(np.float64), values[rounds > 0]


def _highest(values: Floats) -> float | None:
    return float(values.max()) if len(values) else None


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
        rounds, values = _trained(run, "accuracy")
        there = rounds[values >= target_accuracy]
        firsts.append(float(there[0]) if len(there) else np.inf)
    # Average the two middle values only if both are finite: inf - inf is NaN.
    middle = np.sort(firsts)[[(len(firsts) - 1) // 2, len(firsts) // 2]]
    median = float(middle.mean()) if np.isfinite(middle).all() else None
    return replace(group, target=target_accuracy, rounds_to_target=median, reached=int(np.isfinite(firsts).sum()))


def compute_paired_difference(group: GroupStatistics, reference: GroupStatistics) -> PairedDifference | None:
    """Return the difference in result, paired by seed, which cancels effects of the seed on both groups.

    Its p-value is not corrected for other tests yet.
    """
    if group.metric != reference.metric:
        return None
    gaps = [value - reference.results[seed] for seed, value in group.results.items() if seed in reference.results]
    if not gaps:
        return None
    return PairedDifference(
        reference.short, float(np.mean(gaps)), interval_half_width(gaps), len(gaps), paired_p_value(gaps)
    )
