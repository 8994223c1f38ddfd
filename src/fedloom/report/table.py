"""Runs side by side: grouped by what they are, measured over seeds, and as a table of text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedloom.errors import InputError
from fedloom.report.groups import grouped
from fedloom.report.headline import headlines, notes
from fedloom.report.measure import LATE, REACH, Difference, Group, Spread, aim, measure, paired
from fedloom.report.records import Record
from fedloom.report.words import human_bytes, human_seconds, signed

NOTHING = "–"
Part = Literal["result", "cost", "brief"]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    groups: tuple[Group, ...]
    """Task by task, as they were given; the first one of a task is what the others are held against."""
    headlines: tuple[str, ...]
    """What came out, for each task."""
    notes: tuple[str, ...]
    """What would mislead if it were not said."""

    @property
    def headline(self) -> str:
        return " ".join(self.headlines)

    def table(self, *parts: Part) -> tuple[list[str], list[list[str]]]:
        """Column titles, and a row of text for each group; a column that says nothing is not there.

        `parts` are "result" and "cost", both if none is named, or "brief": what fits a terminal.
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
        """How to read the results."""
        several = any(len(group.runs) > 1 for group in self.groups)
        said = ["On test data, after the last round" + ("; mean ± standard deviation over seeds." if several else ".")]
        if any(group.difference and group.difference.half is not None for group in self.groups):
            said.append("Differences are paired by seed; in brackets 95 % t-intervals, each uncorrected.")
        if any(group.late_accuracy for group in self.groups):
            said.append(f"“Last {LATE}”: mean of the last {LATE} evaluations.")
        if any(group.worst_clients for group in self.groups):
            said.append("“Worst clients”: mean over the tenth of the clients it serves worst.")
        if any(group.personal for group in self.groups):
            said.append(
                "“Own models”: those that clients of a personalised method would use, each on its client's test "
                "samples or else its mixture of classes, mean over clients; “worst own”: over the worst tenth of them."
            )
        if any(group.delta for group in self.groups):
            said.append("“Privacy spent”: for one client more or less, by the noise that was asked for.")
        if any(group.best_accuracy for group in self.groups):
            said.append("“Best round” is chosen on the test data, so it flatters and is no result.")
        return " ".join(said)


def compare(records: Sequence[Record], target: float | None = None) -> Comparison:
    """Group `records` that differ only in their seed, and hold every group against the first of its task.

    `target` is the accuracy whose reaching is timed. By default it is 90 % of the best final accuracy of
    the task, rounded down to a whole percent.
    """
    if not records:
        raise InputError("there are no runs to compare.")
    if target is not None and not 0 < target <= 1:
        raise InputError(f"the target accuracy must lie between 0 and 1, not {target!r}.")
    groups = [measure(name) for name in grouped(records)]
    first: dict[str, Group] = {}
    best: dict[str, float] = {}
    for group in groups:
        first.setdefault(group.task, group)
        if group.accuracy:
            best[group.task] = max(best.get(group.task, 0.0), group.accuracy.mean)
    for at, group in enumerate(groups):
        goal = target or float(np.floor(100 * REACH * best.get(group.task, 0.0))) / 100
        gap = paired(group, first[group.task]) if group is not first[group.task] else None
        groups[at] = replace(aim(group, goal) if goal else group, difference=gap)
    return Comparison(tuple(groups), tuple(headlines(groups)), tuple(notes(groups)))


def _columns(groups: Sequence[Group]) -> list[tuple[str, Callable[[Group], str], *tuple[str, ...]]]:
    """Title, cell, and the parts of the table the column belongs to. Accuracies are in percent."""
    references = {group.difference.to for group in groups if group.difference}
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
        ("sent down", lambda group: human_bytes(group.bytes_down and group.bytes_down.mean), "cost"),
        ("sent up", lambda group: human_bytes(group.bytes_up and group.bytes_up.mean), "cost"),
        ("sent", lambda group: human_bytes(_both(group)), "brief"),
        ("time", lambda group: human_seconds(group.seconds and group.seconds.mean), "cost", "brief"),
        ("privacy spent", _privacy, "cost", "brief"),
        ("lost clients", lambda group: f"{group.lost} of {group.asked}" if group.lost else NOTHING, "cost"),
    ]


def _privacy(group: Group) -> str:
    """Epsilon at its delta; "none" where updates are clipped and nothing is guaranteed."""
    if group.delta is None:
        return NOTHING
    return f"ε {group.epsilon.mean:.2f}, δ {group.delta.mean:.2g}" if group.epsilon else "none"


def _both(group: Group) -> float | None:
    """Bytes down and up together."""
    return group.bytes_down.mean + group.bytes_up.mean if group.bytes_down and group.bytes_up else None


def _spread(spread: Spread | None, scale: float, digits: int = 2) -> str:
    return spread.show(scale, digits) if spread else NOTHING


def _gap(gap: Difference | None, metric: str) -> str:
    if gap is None:
        return NOTHING
    scale, digits = (100.0, 2) if metric == "accuracy" else (1.0, 3)
    mean = signed(scale * gap.mean, digits)
    if gap.low is None or gap.high is None:
        return mean
    return f"{mean} [{signed(scale * gap.low, digits)}, {signed(scale * gap.high, digits)}]"


def _reached(group: Group, several: bool) -> str:
    if group.target is None or group.accuracy is None:
        return NOTHING
    rounds = "not reached" if group.rounds_to_target is None else f"{group.rounds_to_target:g}"
    goal = f" to {100 * group.target:g} %" if several else ""
    some = f" ({group.reached} of {len(group.runs)} seeds)" if group.reached < len(group.runs) else ""
    return rounds + goal + (some if group.reached else "")
