"""Data behind the plots of a report.

`report.js` draws them in the colors of the reader's theme.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from fedloom.report.effects import EffectCell, GridEffects
from fedloom.report.file_names import hide_folders
from fedloom.report.markup import group_dash
from fedloom.report.records import Counts, RunRecord
from fedloom.report.statistics import GroupStatistics

METRICS = {
    "accuracy": "accuracy",
    "client_accuracy_worst10": "worst 10 % of clients",
    "personal_accuracy_mean": "clients' own models",
    "personal_accuracy_worst10": "worst 10 % of own models",
    "held_out_accuracy_mean": "held-out clients",
    "held_out_accuracy_worst10": "worst 10 % of held-out clients",
    "loss": "loss",
    "train_loss": "training loss",
    "epsilon": "privacy spent, epsilon",
}
MOST_CLIENTS = 200
MOST_PARTITIONS = 12
MOST_DIAGNOSTICS = 24

Data = dict[str, Any]


def collect_figure_data(groups: Sequence[GroupStatistics]) -> Data:
    """Collect the data of all plots of a page. A line refers to its group and its axis by index."""
    figure_data: Data = {
        "groups": [
            {"label": group.short, "task": group.task, "kind": group.kind, "dash": group_dash(group)}
            for group in groups
        ],
        "tasks": list(dict.fromkeys(group.task for group in groups)),
        "curves": [
            {"key": key, "title": title, "lines": lines}
            for key, title in METRICS.items()
            if (lines := _lines(groups, key))
        ],
        "partitions": _partition_figures(groups),
        "diagnostics": _diagnostic_figures(groups),
    }
    return figure_data | {"axes": _share_axes([*figure_data["curves"], *figure_data["diagnostics"]])}


AXIS = ("round", "bytes", "seconds", "seeds")
"""What most lines of a group have in common, and a page stores once."""


def _share_axes(drawn: Sequence[Data]) -> list[Data]:
    """Move the axes of all lines into one list, and leave their index as `axis`."""
    axes: list[Data] = []
    for line in (line for one in drawn for line in one["lines"]):
        axis = {name: line.pop(name) for name in AXIS}
        if axis not in axes:
            axes.append(axis)
        line["axis"] = axes.index(axis)
    return axes


def _lines(groups: Sequence[GroupStatistics], key: str) -> list[Data]:
    lines = [_metric_curve(group.runs, key) | {"group": at} for at, group in enumerate(groups)]
    return [one for one in lines if one["mean"]]


def _metric_curve(runs: Sequence[RunRecord], key: str) -> Data:
    """Return mean, lowest and highest `key` by round, over the seeds that measured it, and the cost so far."""
    values: dict[int, list[float]] = {}
    spent: dict[int, list[float]] = {}
    took: dict[int, list[float]] = {}
    evaluated = {int(at) for run in runs for at in run.series("accuracy")[0]}
    for run in runs:
        sent, seconds = run.running("bytes_down", "bytes_up"), run.running("seconds.total")
        before = seconds.get(0, 0.0)  # the evaluation of the initial model is no training
        for at, value in zip(*(one.tolist() for one in run.series(key)), strict=True):
            if key == "train_loss" and evaluated and at not in evaluated:
                continue  # as many points as the other curves
            values.setdefault(at, []).append(value)
            spent.setdefault(at, []).append(sent[at])
            took.setdefault(at, []).append(seconds[at] - before)
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
    """Round to six digits, which is more than a screen shows and halves the file."""
    return float(f"{value:.6g}")


def _diagnostic_figures(groups: Sequence[GroupStatistics]) -> list[Data]:
    """Return a small figure for each diagnostic of the methods."""
    told = [row.get("diagnostics") for group in groups for run in group.runs for row in run.history]
    names = dict.fromkeys(name for one in told if isinstance(one, dict) for name in one)
    drawn = ({"title": name, "lines": _lines(groups, f"diagnostics.{name}")} for name in names)
    return list(islice((one for one in drawn if one["lines"]), MOST_DIAGNOSTICS))


def _partition_figures(groups: Sequence[GroupStatistics]) -> list[Data]:
    """Return each distinct partition once. Methods share it; seeds may differ."""
    several = len({group.task for group in groups}) > 1
    found: dict[tuple[str, bytes], Data] = {}
    for group in groups:
        for run in group.runs:
            if run.counts is None or run.counts.size == 0:
                continue
            title = (f"{group.task}, " if several else "") + f"seed {run.seed}"
            found.setdefault((group.task, run.counts.tobytes()), partition_figures(title, run.counts, run.class_names))
    return list(found.values())[:MOST_PARTITIONS]


def partition_figures(title: str, counts: Counts, class_names: Sequence[str]) -> Data:
    """Return one circle for each class of each client. `counts` has one row for each client."""
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


def heat_map_figure_data(effects: GridEffects) -> Data:
    """Return a heat map of servers x clients for each refiner. A value is None if there is no result."""
    rows, columns, *more = effects.grid.factors
    sheets = more[0].levels if more else (None,)
    scale, digits = effects.scale

    def cell(*levels: str | None) -> Data:
        found = effects.grid.at([level for level in levels if level is not None])
        spread = effects.spread(found)
        return {
            "method": found.method,
            "value": None if spread is None else float(f"{scale * spread.mean:.6g}"),
            "text": "" if spread is None else spread.show(scale, min(digits, 2)),
            "hover": _hover(effects, found),
        }

    return {
        "rows": {"title": rows.name, "names": list(rows.levels)},
        "columns": {"title": columns.name, "names": list(columns.levels)},
        "better": "high" if effects.sign > 0 else "low",
        "maps": [
            {
                "title": f"{more[0].name}: {sheet}" if more else "",
                "cells": [[cell(row, column, sheet) for column in columns.levels] for row in rows.levels],
            }
            for sheet in sheets
        ],
    }


def _hover(effects: GridEffects, cell: EffectCell) -> str:
    """Return the tooltip of a cell."""
    spread, (scale, digits) = effects.spread(cell), effects.scale
    if spread is None:
        return hide_folders(cell.refusal or "has no result yet")
    unit = " %" if effects.metric == "accuracy" else ""
    each = ", ".join(f"{scale * value:.{digits}f}" for value in spread.values)
    return f"{spread.show(scale, digits)}{unit}" + (f", over seeds: {each}" if len(spread.values) > 1 else "")
