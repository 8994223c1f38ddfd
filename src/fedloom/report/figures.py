"""The numbers behind the figures, as plain data; `report.js` draws them with the reader's colours."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from fedloom.report.measure import Group
from fedloom.report.records import Counts, Record

METRICS = {
    "accuracy": "accuracy",
    "client_accuracy_worst10": "worst 10 % of clients",
    "personal_accuracy_mean": "clients' own models",
    "personal_accuracy_worst10": "worst 10 % of own models",
    "loss": "loss",
    "train_loss": "training loss",
    "epsilon": "privacy spent, epsilon",
}
MOST_CLIENTS = 200
MOST_PARTITIONS = 12
MOST_DIAGNOSTICS = 24

Data = dict[str, Any]


def figures(groups: Sequence[Group]) -> Data:
    """All that the page draws. A line names its group by the group's place."""
    return {
        "groups": [{"label": group.short, "task": group.task, "kind": group.name.kind} for group in groups],
        "tasks": list(dict.fromkeys(group.task for group in groups)),
        "curves": [
            {"key": key, "title": title, "lines": lines}
            for key, title in METRICS.items()
            if (lines := _lines(groups, key))
        ],
        "partitions": partitions(groups),
        "diagnostics": diagnostics(groups),
    }


def _lines(groups: Sequence[Group], key: str) -> list[Data]:
    lines = [line(group.runs, key) | {"group": at} for at, group in enumerate(groups)]
    return [one for one in lines if one["mean"]]


def line(runs: Sequence[Record], key: str) -> Data:
    """`key` by round: mean, lowest and highest over the seeds that measured it, and what it had cost."""
    values: dict[int, list[float]] = {}
    spent: dict[int, list[float]] = {}
    took: dict[int, list[float]] = {}
    for run in runs:
        sent, seconds = run.running("bytes_down", "bytes_up"), run.running("seconds.total")
        for at, value in zip(*(one.tolist() for one in run.series(key)), strict=True):
            values.setdefault(at, []).append(value)
            spent.setdefault(at, []).append(sent[at])
            took.setdefault(at, []).append(seconds[at])
    rounds = sorted(values)
    return {
        "round": rounds,
        "bytes": [_short(np.mean(spent[at])) for at in rounds],
        "seconds": [_short(np.mean(took[at])) for at in rounds],
        "mean": [_short(np.mean(values[at])) for at in rounds],
        "low": [_short(min(values[at])) for at in rounds],
        "high": [_short(max(values[at])) for at in rounds],
        "seeds": [len(values[at]) for at in rounds],
    }


def _short(value: float | np.floating[Any]) -> float:
    """Six digits: more than a screen shows, and half the size of the file."""
    return float(f"{value:.6g}")


def diagnostics(groups: Sequence[Group]) -> list[Data]:
    """Everything that methods told about themselves, as small figures."""
    told = [row.get("diagnostics") for group in groups for run in group.runs for row in run.history]
    names = dict.fromkeys(name for one in told if isinstance(one, dict) for name in one)
    drawn = ({"title": name, "lines": _lines(groups, f"diagnostics.{name}")} for name in names)
    return list(islice((one for one in drawn if one["lines"]), MOST_DIAGNOSTICS))


def partitions(groups: Sequence[Group]) -> list[Data]:
    """Who holds which classes, once for every partition that differs: methods share it, seeds need not."""
    several = len({group.task for group in groups}) > 1
    found: dict[tuple[str, bytes], Data] = {}
    for group in groups:
        for run in group.runs:
            if run.counts is None or run.counts.size == 0:
                continue
            title = (f"{group.task}, " if several else "") + f"seed {run.seed}"
            found.setdefault((group.task, run.counts.tobytes()), bubbles(title, run.counts, run.class_names))
    return list(found.values())[:MOST_PARTITIONS]


def bubbles(title: str, counts: Counts, class_names: Sequence[str]) -> Data:
    """A circle for each class that a client holds; `counts` has a row for each client."""
    shown = counts[:MOST_CLIENTS]
    client, label = np.nonzero(shown)
    return {
        "title": title,
        "clients": len(shown),
        "of": len(counts),
        "classes": list(class_names),
        "client": client.tolist(),
        "label": label.tolist(),
        "count": shown[client, label].tolist(),
        "totals": shown.sum(axis=1).tolist(),
    }
