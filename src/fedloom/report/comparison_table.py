"""Comparison table: groups of runs, their differences, targets and notes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedloom.errors import InputError
from fedloom.report.conclusion import conclude_comparison, describe_windows
from fedloom.report.file_names import hide_record_folders
from fedloom.report.records import (
    TASK,
    RunRecord,
    find_record_differences,
    flatten_record_config,
    group_records,
    select_record_per_seed,
)
from fedloom.report.significance import LEVEL, adjust_p_values, format_p_value
from fedloom.report.statistics import (
    REACH,
    GroupStatistics,
    PairedDifference,
    SeedStatistics,
    add_target_statistics,
    compute_group_statistics,
    compute_paired_difference,
)
from fedloom.utils.formatting import format_bytes, format_list, format_percent, format_seconds, format_signed
from fedloom.utils.result_window import select_evaluations

NO_CAUSE = frozenset({"method", "engine", "device", *TASK})
"""Settings that need no note if they differ: they are no other cause of a difference between methods."""
FIXED = ("own", "file")
"""Partitions that do not depend on the seed."""
SOMETIMES_FIXED = ("own by seed", "natural", "domain")
"""Partitions that may be the same for all seeds; the counts of the clients show it."""


def _comparison_notes(groups: Sequence[GroupStatistics]) -> list[str]:
    """Return the notes without which the table would mislead."""
    said = [note for group in groups for note in _about(group)]
    said += _server_data([group.runs[0] for group in groups])
    said += _shared_partition(groups)
    causes: dict[str, None] = {}
    for name in dict.fromkeys(group.task for group in groups):
        runs = [group.runs[0] for group in groups if group.task == name]
        tables = [flatten_record_config(run.config) for run in runs]
        methods = {part for group in groups for part in group.runs[0].method.split("+")}
        for key in find_record_differences(tables):
            others = {table.get(key) for run, table in zip(runs, tables, strict=True) if key not in run.own_settings}
            if key not in NO_CAUSE and key.partition(".")[0] not in methods and len(others) > 1:
                causes[key] = None
    several = len({group.runs[0].method for group in groups}) > 1
    if causes and several:
        said.append(f"The runs also differ in {format_list(list(causes))}, which may cause differences too.")
    return said


def _about(group: GroupStatistics) -> list[str]:
    """Return notes on runs of one group that are missing, repeated or without a result."""
    said, unique = [], select_record_per_seed(group.records)
    left = [run for run in unique if run not in group.runs]
    if left:
        said.append(f"{group.label}: unfinished runs are left out: {format_list([_where(run) for run in left])}.")
    elif not group.finished:
        open_runs = [run for run in group.runs if not run.finished]
        said.append(f"{group.label} has not finished: {format_list([_where(run) for run in open_runs])}.")
    if len(unique) < len(group.records):
        said.append(f"{group.label}: a seed occurs more than once and is counted once.")
    said += [f"{group.label}, seed {run.seed}: {run.diverged}." for run in group.runs if run.diverged]
    tested = [run for run in group.runs if any(group.metric in row for row in select_evaluations(run.history))]
    void = [run.seed for run in tested if run.seed not in group.results and not run.diverged]
    if any("global_model" in (run.summary or {}) for run in group.runs):
        said.append(f"{group.label} has no global model: only the clients' own models have an accuracy.")
    elif void and group.result:
        said.append(f"{group.label}: no final {group.metric} with seed {format_list(void)}; the mean leaves it out.")
    elif void:
        said.append(f"{group.label} has no result: its last evaluations are not finite.")
    if len(group.windows) > 1:
        said.append(f"{group.label}: its runs average {describe_windows(group.windows).removeprefix('mean of ')}.")
    failed, asked = (int(sum(run.total(key) or 0 for run in group.runs)) for key in ("failed", "clients"))
    if 2 * failed > asked:
        said.append(f"{group.label}: {failed} of {asked} client tasks failed; the report lists the reasons.")
    return said


def _server_data(runs: Sequence[RunRecord]) -> list[str]:
    """Return notes on the methods that used server data, which the other methods did not have."""
    users: dict[str, dict[str, None]] = {}
    for run in runs:
        names = run.config.get("server_data_used_by")
        if isinstance(names, list) and names:
            users.setdefault(str(run.config.get("server_data", "?")), {}).update(dict.fromkeys(map(str, names)))
    said = {source: " (samples that no client holds)" if source.startswith("split:") else "" for source in users}
    return [
        f"{format_list(list(names))} used data on the server, {source}{said[source]}; other methods did not."
        for source, names in users.items()
    ]


def _shared_partition(groups: Sequence[GroupStatistics]) -> list[str]:
    """Return a sentence if the seeds of a group share one partition, so that their spread leaves it out."""
    several = [group for group in groups if len({run.seed for run in group.runs}) > 1]
    shared = [group.label for group in several if _shares_partition(group.runs)]
    if not shared:
        return []
    whose = "" if len(shared) == len(several) else f" of {format_list(shared)}"
    return [f"All seeds{whose} share one partition, so the spread over seeds does not cover other partitions."]


def _shares_partition(runs: Sequence[RunRecord]) -> bool:
    kinds = {str(run.config.get("partition", "")).partition(":")[0].partition(",")[0] for run in runs}
    if kinds <= set(FIXED):
        return True
    if not kinds <= set(SOMETIMES_FIXED):
        return False
    first = runs[0].counts
    return first is not None and all(run.counts is not None and np.array_equal(run.counts, first) for run in runs[1:])


def _where(run: RunRecord) -> str:
    planned = run.config.get("rounds")
    return f"seed {run.seed} at round {run.last_round}" + (f" of {planned}" if planned else "")


NOTHING = "–"
Part = Literal["result", "cost", "brief"]


@dataclass(frozen=True)
class ComparisonTable:
    """The groups of runs, the conclusions and the notes."""

    groups: tuple[GroupStatistics, ...]
    """Ordered by task, then as given. The first group of a task is the reference."""
    headlines: tuple[str, ...]
    """The conclusion of each task."""
    notes: tuple[str, ...]
    """Facts without which the table would mislead."""

    @property
    def headline(self) -> str:
        return " ".join(self.headlines)

    def table(self, *parts: Part) -> tuple[list[str], list[list[str]]]:
        """Return column titles and one row of text for each group, without empty columns.

        `parts` are "result" and "cost" (both by default), or "brief", which fits a terminal.
        """
        wanted = set(parts or ("result", "cost")) | {"name"}
        columns = {
            title: [cell(group) for group in self.groups]
            for title, cell, *belongs in _columns(self.groups)
            if wanted & set(belongs)
        }
        kept = {title: cells for title, cells in columns.items() if set(cells) != {NOTHING}}
        return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]

    @property
    def basis(self) -> str:
        """What the results are the mean of."""
        windows = sorted({window for group in self.groups for window in group.windows})
        return describe_windows(windows) + (" (column “window”)" if len(windows) > 1 else "")

    @property
    def caption(self) -> str:
        """What the numbers of the table are, in one sentence."""
        several = any(len(group.runs) > 1 for group in self.groups)
        return f"Results on test data: {self.basis}{', ± standard deviation over seeds' if several else ''}."

    def footnote(self) -> str:
        """Return how to read the table."""
        said = [self.caption]
        if any(group.window_std for group in self.groups):
            said.append("“sd in window”: standard deviation of these evaluations within a run, mean over seeds.")
        if any(group.difference and group.difference.half is not None for group in self.groups):
            said.append("Differences are paired by seed. Brackets: 95 % t-intervals of single differences.")
        if any(group.difference and group.difference.p is not None for group in self.groups):
            said.append(
                "“p (Holm)”: paired t-test over seeds, corrected by Holm's method for all differences of the task; "
                f"below {LEVEL:g} is significant."
            )
        if any(group.worst_clients for group in self.groups):
            said.append("“Worst clients”: mean over the 10 % of clients with the lowest accuracy.")
        if any(group.personal for group in self.groups):
            said.append(
                "“Own models”: personalized models, each tested on its client's test samples, or on test data in its "
                "client's class proportions; mean over clients. “Worst own”: mean over the worst 10 %."
            )
        if any(group.held_out for group in self.groups):
            said.append("“Held-out clients”: mean over clients that never trained. “Worst held-out”: their worst 10 %.")
        if any(group.delta for group in self.groups):
            said.append("“Privacy spent”: ε and δ for one client more or less, from the requested noise.")
        if any(group.best_accuracy for group in self.groups):
            said.append("“Best round” is chosen on the test data, so it is too optimistic; do not report it.")
        return " ".join(said)


def make_comparison_table(
    records: Sequence[RunRecord], target_accuracy: float | None = None, window: int | None = None
) -> ComparisonTable:
    """Group `records` that differ only in their seed, and compare each group with the first of its task.

    `target_accuracy` is for the column "rounds to". By default it is 90 % of the best accuracy of the task, rounded
    down to a whole percent. `window` replaces the setting of the runs: how many of the last evaluations are averaged.
    """
    if not records:
        raise InputError("there are no runs to compare.")
    if target_accuracy is not None and not 0 < target_accuracy <= 1:
        raise InputError(f"the target accuracy must lie between 0 and 1, not {target_accuracy!r}.")
    if window is not None and window < 1:
        raise InputError(f"the window must be 1 evaluation or more, not {window}.")
    groups: list[GroupStatistics] = []
    notes: list[str] = []
    found = [compute_group_statistics(one, window) for one in group_records(hide_record_folders(records))]
    for task in dict.fromkeys(group.task for group in found):
        of_task = _add_differences([group for group in found if group.task == task])
        target = _choose_target(of_task, target_accuracy, notes)
        groups += of_task if target is None else [add_target_statistics(group, target) for group in of_task]
    return ComparisonTable(tuple(groups), tuple(conclude_comparison(groups)), (*_comparison_notes(groups), *notes))


def _add_differences(groups: Sequence[GroupStatistics]) -> list[GroupStatistics]:
    """Compare the groups of one task with the first; their tests are one family."""
    gaps = [compute_paired_difference(group, groups[0]) for group in groups[1:]]
    adjusted = adjust_p_values([gap.p if gap else None for gap in gaps])
    corrected = [gap and replace(gap, p=p) for gap, p in zip(gaps, adjusted, strict=True)]
    return [replace(group, difference=gap) for group, gap in zip(groups, [None, *corrected], strict=True)]


def _choose_target(groups: Sequence[GroupStatistics], given: float | None, notes: list[str]) -> float | None:
    """Return the target accuracy of one task, or None: a target that guessing reaches says nothing about training."""
    best = max((group.accuracy.mean for group in groups if group.accuracy), default=0.0)
    target = given or float(np.floor(100 * REACH * best)) / 100
    chance = max((run.chance for group in groups for run in group.runs if run.chance is not None), default=0.0)
    if target > chance:
        return target
    if given is not None:
        notes.append(
            f"The target {format_percent(given)} is not above the accuracy of guessing ({format_percent(chance)}) on "
            f"{groups[0].task}, so rounds to it are not counted."
        )
    return None


def _columns(groups: Sequence[GroupStatistics]) -> list[tuple[str, Callable[[GroupStatistics], str], *tuple[str, ...]]]:
    """Return title, cell function and table parts of each column. Accuracies are in percent."""
    references = {group.difference.reference for group in groups if group.difference}
    targets = {group.target for group in groups if group.target}
    against = f"against {references.pop()}" if len(references) == 1 else "against first of task"
    to = f"rounds to {100 * targets.pop():g} %" if len(targets) == 1 else "rounds to target"
    several_windows = len({group.windows for group in groups}) > 1
    only = "brief" if all(group.accuracy is None for group in groups) else ""
    return [
        ("method", lambda group: group.label, "name"),
        ("seeds", lambda group: str(len(group.runs)), "result", "brief"),
        ("accuracy %", _accuracy, "result", "brief"),
        ("sd in window", _window_std, "result", "brief"),
        ("window", lambda group: _window(group) if several_windows else NOTHING, "result", "brief"),
        (against, lambda group: _gap(group.difference, group.metric), "result"),
        (against, lambda group: _gap(group.difference, group.metric, with_interval=False), "brief"),
        ("p (Holm)", _p_value, "result", "brief"),
        ("worst clients %", lambda group: _spread(group.worst_clients, 100), "result"),
        ("own models %", lambda group: _spread(group.personal, 100), "result", "brief"),
        ("worst own %", lambda group: _spread(group.personal_worst, 100), "result"),
        ("held-out clients %", lambda group: _spread(group.held_out, 100), "result", "brief"),
        ("worst held-out %", lambda group: _spread(group.held_out_worst, 100), "result", "brief"),
        ("loss", lambda group: _spread(group.loss, 1, 3), "result", only),
        ("best round %", lambda group: _spread(group.best_accuracy, 100), "result"),
        (to, lambda group: _reached(group, several=to.endswith("target")), "cost", "brief"),
        ("sent down", lambda group: format_bytes(group.bytes_down and group.bytes_down.mean), "cost"),
        ("sent up", lambda group: format_bytes(group.bytes_up and group.bytes_up.mean), "cost"),
        ("sent", lambda group: format_bytes(_both(group)), "brief"),
        ("time", lambda group: format_seconds(group.seconds and group.seconds.mean), "cost", "brief"),
        ("privacy spent", _privacy, "cost", "brief"),
        ("failed clients", lambda group: f"{group.failed} of {group.asked}" if group.failed else NOTHING, "cost"),
    ]


def _accuracy(group: GroupStatistics) -> str:
    if not group.num_diverged:
        return _spread(group.accuracy, 100)
    if group.result is None:
        return "diverged"
    return f"{_spread(group.accuracy, 100)} ({group.num_diverged} of {len(group.runs)} diverged)"


def _window_std(group: GroupStatistics) -> str:
    if group.window_std is None:
        return NOTHING
    return f"{100 * group.window_std.mean:.2f}" if group.metric == "accuracy" else f"{group.window_std.mean:.3f}"


def _window(group: GroupStatistics) -> str:
    return " to ".join(map(str, dict.fromkeys((group.windows[0], group.windows[-1]))))


def _p_value(group: GroupStatistics) -> str:
    if group.difference is None or group.difference.p is None:
        return NOTHING
    return format_p_value(group.difference.p)


def _privacy(group: GroupStatistics) -> str:
    """Format epsilon and delta; "none" if updates are clipped without any guarantee."""
    if group.delta is None:  # a private run is a bracket if it spends nothing
        return "without privacy" if any(run.config.get("clip_update") for run in group.runs) else NOTHING
    return f"ε {group.epsilon.mean:.2f}, δ {group.delta.mean:.2g}" if group.epsilon else "none"


def _both(group: GroupStatistics) -> float | None:
    """Return the sum of bytes down and up."""
    return group.bytes_down.mean + group.bytes_up.mean if group.bytes_down and group.bytes_up else None


def _spread(spread: SeedStatistics | None, scale: float, digits: int = 2) -> str:
    return spread.show(scale, digits) if spread else NOTHING


def _gap(gap: PairedDifference | None, metric: str, with_interval: bool = True) -> str:
    if gap is None:
        return NOTHING
    scale, digits = (100.0, 2) if metric == "accuracy" else (1.0, 3)
    mean = format_signed(scale * gap.mean, digits)
    if gap.low is None or gap.high is None or not with_interval:
        return mean
    return f"{mean} [{format_signed(scale * gap.low, digits)}, {format_signed(scale * gap.high, digits)}]"


def _reached(group: GroupStatistics, several: bool) -> str:
    if group.target is None or group.accuracy is None:
        return NOTHING
    rounds = "not reached" if group.rounds_to_target is None else f"{group.rounds_to_target:g}"
    goal = f" to {100 * group.target:g} %" if several else ""
    some = f" ({group.reached} of {len(group.runs)} seeds)" if group.reached < len(group.runs) else ""
    return rounds + goal + (some if group.reached else "")
