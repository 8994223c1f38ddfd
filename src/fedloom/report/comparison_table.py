"""Comparison table and conclusions over groups of runs.

A group has runs over several seeds. Each task gets a headline and notes.

A headline claims no more than the seeds show.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedloom.errors import InputError
from fedloom.report.records import (
    TASK,
    RunRecord,
    final_record_value,
    find_record_differences,
    flatten_record_config,
    group_records,
    last_evaluated_round,
    select_record_per_seed,
)
from fedloom.report.statistics import (
    ENOUGH,
    LATE,
    REACH,
    GroupStatistics,
    PairedDifference,
    SeedStatistics,
    add_target_statistics,
    compute_group_statistics,
    compute_paired_difference,
)
from fedloom.utils.formatting import format_bytes, format_list, format_plural, format_seconds, format_signed

NO_CAUSE = frozenset({"method", "engine", "device", *TASK})
"""Settings that need no note if they differ: they are no other cause of a difference between methods."""

HOLD = "\N{NO-BREAK SPACE}"


def _conclusions(groups: Sequence[GroupStatistics]) -> list[str]:
    """Return one or two sentences for each task."""
    tasks = dict.fromkeys(group.task for group in groups)
    said = {task: _outcome([group for group in groups if group.task == task]) for task in tasks}
    return [f"On {task}: {text}" if len(said) > 1 else text for task, text in said.items()]


def _outcome(groups: Sequence[GroupStatistics]) -> str:
    """Return the conclusion of one task: the group with the best result, and which differences the seeds confirm."""
    metric = groups[0].metric
    means = {group.label: group.result.mean for group in groups if group.result and group.metric == metric}
    if not means:
        return "No round has been evaluated yet."
    higher, lower = ("higher", "lower") if metric == "accuracy" else ("lower", "higher")
    sign = 1 if metric == "accuracy" else -1
    judged = [group for group in groups if group.label in means]
    best, *rest = sorted(judged, key=lambda group: -sign * means[group.label])
    finished = all(group.finished for group in judged)
    lead = f"{best.short} ended" if finished else f"So far, {best.short} is"
    lead += (
        f" {'highest' if sign > 0 else 'lowest'}, at {_format_result(best)}" if rest else f" at {_format_result(best)}"
    )
    seeds = len(best.result.values) if best.result else 0
    lead += f" over {seeds} seeds" if seeds > 1 else ""
    if not rest:
        return f"{lead} after {format_plural(last_evaluated_round(best.runs[0]), 'round')}."
    gaps = {
        group.label: gap for group in rest if (gap := compute_paired_difference(best, group)) and gap.seeds >= ENOUGH
    }
    if not gaps:
        return f"{lead}. There are too few common seeds to tell a difference between methods from noise."
    apart = [group for group in rest if group.label in gaps and gaps[group.label].clear]
    level = [group for group in rest if group.label in gaps and group not in apart]
    unsure = [group for group in rest if group.label not in gaps]
    if level:
        said = f"{lead}, but {_named(level)} {_is(level)} within noise of it"
        said += f"; {_named(apart)} {_is(apart)} clearly {lower}." if apart else "."
    else:
        nearest = " from the nearest" if len(apart) > 1 else ""
        names = format_list([group.short for group in apart])
        said = f"{lead}, clearly {higher} than {names}: {_format_difference(gaps[apart[0].label], metric)}{nearest}."
    if unsure:
        said += f" {_named(unsure)} cannot be judged: too few common seeds."
    # If the best group varies a lot over seeds, others may still be clearly ahead of the reference.
    first = groups[0]
    ahead = [
        group
        for group in rest
        if (gap := compute_paired_difference(group, first)) and gap.clear and sign * gap.mean > 0
    ]
    if first in level and ahead:
        names = format_list([group.short for group in ahead])
        said += f" But {names} {_is(ahead)} clearly {higher} than {first.short}."
    return said


def _named(groups: Sequence[GroupStatistics]) -> str:
    return format_list([f"{group.short} ({_format_result(group, with_unit=False)})" for group in groups])


def _is(groups: Sequence[GroupStatistics]) -> str:
    return "is" if len(groups) == 1 else "are"


def _format_result(group: GroupStatistics, with_unit: bool = True) -> str:
    """Format the result of a group for a sentence."""
    if group.result is None:
        return "no result"
    if group.metric == "accuracy":
        return f"{group.result.show(100, 1)} %".replace(" ", HOLD) + (" test accuracy" if with_unit else "")
    return ("test loss " if with_unit else "") + group.result.show(1, 3).replace(" ", HOLD)


def _format_difference(difference: PairedDifference, metric: str) -> str:
    """Format a difference and its interval, in percentage points for accuracy."""
    scale, digits, unit = (100.0, 1, " points") if metric == "accuracy" else (1.0, 3, "")
    text = f"{format_signed(scale * difference.mean, digits)}{unit}"
    if difference.low is None or difference.high is None:
        return text
    return (
        f"{text} (95 % interval {format_signed(scale * difference.low, digits)} "
        f"to {format_signed(scale * difference.high, digits)})"
    )


def _comparison_notes(groups: Sequence[GroupStatistics]) -> list[str]:
    """Return the notes without which the table would mislead."""
    said = [note for group in groups for note in _about(group)]
    said += _server_data([group.runs[0] for group in groups])
    causes: dict[str, None] = {}
    for name in dict.fromkeys(group.task for group in groups):
        tables = [flatten_record_config(group.runs[0].config) for group in groups if group.task == name]
        methods = {part for group in groups for part in group.runs[0].method.split("+")}
        keys = (key for key in find_record_differences(tables) if key not in NO_CAUSE)
        causes |= dict.fromkeys(key for key in keys if key.partition(".")[0] not in methods)
    several = len({group.runs[0].method for group in groups}) > 1
    if causes and several:
        said.append(f"The runs also differ in {format_list(list(causes))}, which may cause differences too.")
    return said


def _about(group: GroupStatistics) -> list[str]:
    """Return notes on runs of one group that are missing, repeated or without a result."""
    said, unique = [], select_record_per_seed(group.members)
    left = [run for run in unique if run not in group.runs]
    if left:
        said.append(f"{group.label}: unfinished runs are left out: {format_list([_where(run) for run in left])}.")
    elif not group.finished:
        open_runs = [run for run in group.runs if not run.finished]
        said.append(f"{group.label} has not finished: {format_list([_where(run) for run in open_runs])}.")
    if len(unique) < len(group.members):
        said.append(f"{group.label}: a seed occurs more than once and is counted once.")
    void = [run.seed for run in group.runs if final_record_value(run, group.metric) is None]
    if void and group.result:
        said.append(f"{group.label}: no final {group.metric} with seed {format_list(void)}; the mean leaves it out.")
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

    def footnote(self) -> str:
        """Return how to read the table."""
        several = any(len(group.runs) > 1 for group in self.groups)
        said = ["On test data, after the last round" + ("; mean ± standard deviation over seeds." if several else ".")]
        if any(group.difference and group.difference.half is not None for group in self.groups):
            said.append("Differences are paired by seed. Brackets: 95 % t-intervals, not corrected for multiple tests.")
        if any(group.late_accuracy for group in self.groups):
            said.append(f"“Last {LATE}”: mean of the last {LATE} evaluations.")
        if any(group.worst_clients for group in self.groups):
            said.append("“Worst clients”: mean over the 10 % of clients with the lowest accuracy.")
        if any(group.personal for group in self.groups):
            said.append(
                "“Own models”: personalized models, each tested on its client's test samples, or on test data in its "
                "client's class proportions; mean over clients. “Worst own”: mean over the worst 10 %."
            )
        if any(group.delta for group in self.groups):
            said.append("“Privacy spent”: ε and δ for one client more or less, from the requested noise.")
        if any(group.best_accuracy for group in self.groups):
            said.append("“Best round” is chosen on the test data, so it is too optimistic; do not report it.")
        return " ".join(said)


def make_comparison_table(records: Sequence[RunRecord], target_accuracy: float | None = None) -> ComparisonTable:
    """Group `records` that differ only in their seed, and compare each group with the first of its task.

    `target_accuracy` is for the column "rounds to". By default it is 90 % of the best final accuracy of the task,
    rounded down to a whole percent.
    """
    if not records:
        raise InputError("there are no runs to compare.")
    if target_accuracy is not None and not 0 < target_accuracy <= 1:
        raise InputError(f"the target accuracy must lie between 0 and 1, not {target_accuracy!r}.")
    groups = [compute_group_statistics(name) for name in group_records(records)]
    first: dict[str, GroupStatistics] = {}
    best: dict[str, float] = {}
    for group in groups:
        first.setdefault(group.task, group)
        if group.accuracy:
            best[group.task] = max(best.get(group.task, 0.0), group.accuracy.mean)
    for at, group in enumerate(groups):
        goal = target_accuracy or float(np.floor(100 * REACH * best.get(group.task, 0.0))) / 100
        gap = compute_paired_difference(group, first[group.task]) if group is not first[group.task] else None
        groups[at] = replace(add_target_statistics(group, goal) if goal else group, difference=gap)
    return ComparisonTable(tuple(groups), tuple(_conclusions(groups)), tuple(_comparison_notes(groups)))


def _columns(groups: Sequence[GroupStatistics]) -> list[tuple[str, Callable[[GroupStatistics], str], *tuple[str, ...]]]:
    """Return title, cell function and table parts of each column. Accuracies are in percent."""
    references = {group.difference.reference for group in groups if group.difference}
    targets = {group.target for group in groups if group.target}
    against = f"against {references.pop()}" if len(references) == 1 else "against first of task"
    to = f"rounds to {100 * targets.pop():g} %" if len(targets) == 1 else "rounds to target"
    only = "brief" if all(group.accuracy is None for group in groups) else ""
    return [
        ("method", lambda group: group.label, "name"),
        ("seeds", lambda group: str(len(group.runs)), "result", "brief"),
        ("accuracy %", lambda group: _spread(group.accuracy, 100), "result", "brief"),
        (against, lambda group: _gap(group.difference, group.metric), "result", "brief"),
        (f"last {LATE} %", lambda group: _spread(group.late_accuracy, 100), "result"),
        ("worst clients %", lambda group: _spread(group.worst_clients, 100), "result"),
        ("own models %", lambda group: _spread(group.personal, 100), "result", "brief"),
        ("worst own %", lambda group: _spread(group.personal_worst, 100), "result"),
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


def _privacy(group: GroupStatistics) -> str:
    """Format epsilon and delta; "none" if updates are clipped without any guarantee."""
    if group.delta is None:
        return NOTHING
    return f"ε {group.epsilon.mean:.2f}, δ {group.delta.mean:.2g}" if group.epsilon else "none"


def _both(group: GroupStatistics) -> float | None:
    """Return the sum of bytes down and up."""
    return group.bytes_down.mean + group.bytes_up.mean if group.bytes_down and group.bytes_up else None


def _spread(spread: SeedStatistics | None, scale: float, digits: int = 2) -> str:
    return spread.show(scale, digits) if spread else NOTHING


def _gap(gap: PairedDifference | None, metric: str) -> str:
    if gap is None:
        return NOTHING
    scale, digits = (100.0, 2) if metric == "accuracy" else (1.0, 3)
    mean = format_signed(scale * gap.mean, digits)
    if gap.low is None or gap.high is None:
        return mean
    return f"{mean} [{format_signed(scale * gap.low, digits)}, {format_signed(scale * gap.high, digits)}]"


def _reached(group: GroupStatistics, several: bool) -> str:
    if group.target is None or group.accuracy is None:
        return NOTHING
    rounds = "not reached" if group.rounds_to_target is None else f"{group.rounds_to_target:g}"
    goal = f" to {100 * group.target:g} %" if several else ""
    some = f" ({group.reached} of {len(group.runs)} seeds)" if group.reached < len(group.runs) else ""
    return rounds + goal + (some if group.reached else "")
