"""Collect the accuracy curves of runs in one JSON file for `results/`.

    fedloom compare fedavg indep fedcross fedmr fedcda --seeds 3 --partition dirichlet:0.1 --rounds 200 \
        --set fedcda.warmup=50 -o runs/digits
    python -m benchmarks curves runs/digits --out results/digits.json

It reads every run directory in the folder. Runs called NAME-seedN form one group. The file also holds the commands of
the runs, from their config.toml.
"""

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from benchmarks._common import make_parser, write_result
from fedloom.report import RunRecord, read_run_record


def spread(values: list[float]) -> dict[str, Any]:
    """Return mean and standard deviation."""
    deviation = round(stdev(values), 4) if len(values) > 1 else None
    return {"mean": round(statistics.mean(values), 4), "standard deviation": deviation}


def diagnostics(record: RunRecord) -> dict[str, float]:
    """Return the method's own figures, each the mean of the last ten rounds that have it."""
    figures: dict[str, list[float]] = defaultdict(list)
    for row in record.history:
        for name, value in (row.get("diagnostics") or {}).items():
            if isinstance(value, int | float):
                figures[name].append(value)
    return {name: float(f"{statistics.mean(values[-10:]):.4g}") for name, values in figures.items()}


def shares(records: list[RunRecord]) -> dict[str, float]:
    """Return the share of time of each part of a round, over all runs and all rounds, with round 0."""
    spent: dict[str, float] = defaultdict(float)
    for record in records:
        for row in record.history:
            for name, seconds in (row.get("seconds") or {}).items():
                spent[name] += seconds
    total = spent.pop("total", 0.0)
    return {name: round(seconds / total, 4) for name, seconds in sorted(spent.items())} if total else {}


def summary(records: list[RunRecord]) -> dict[str, Any]:
    """Return the final accuracy over seeds, the mean and spread of the last ten evaluations, and the curves."""
    runs = [[float(value) for value in record.series("accuracy")[1] if value is not None] for record in records]
    length = min(len(run) for run in runs)  # runs may be unfinished: use the rounds that all have
    runs = [run[:length] for run in runs]
    rounds = [int(number) for number in records[0].series("accuracy")[0][:length]]
    found: dict[str, Any] = {
        "rounds": rounds[-1],
        "final accuracy": {**spread([run[-1] for run in runs]), "seeds": [round(run[-1], 4) for run in runs]},
        "mean of the last ten evaluations": spread([statistics.mean(run[-10:]) for run in runs]),
    }
    if length > 1:
        deviation = statistics.mean(stdev(run[-10:]) for run in runs)
        found["standard deviation within the last ten"] = round(deviation, 4)
    worst = [record.series("client_accuracy_worst10")[1][:length] for record in records]
    if all(len(values) and values[-1] is not None for values in worst):
        found["worst tenth of clients at the end"] = spread([float(values[-1]) for values in worst])
    if times := shares(records):
        found["shares of the time"] = times
    figures = [diagnostics(record) for record in records]
    names = sorted({name for each in figures for name in each})
    if names:
        found["the method's own figures, mean of the last ten rounds that have them, each seed"] = {
            name: [each.get(name) for each in figures] for name in names
        }
    found["mean of ten evaluations, by the round they end at"] = {
        rounds[i]: round(statistics.mean(statistics.mean(run[i - 9 : i + 1]) for run in runs), 4)
        for i in range(10, len(rounds), 10)
    }
    found["evaluated after the rounds"] = ", ".join(str(number) for number in rounds)
    found["accuracy of each seed"] = [", ".join(f"{value:.4f}" for value in run) for run in runs]
    return found


def collect_runs(folder: Path, names: Collection[str] | None = None) -> dict[str, Any]:
    """Collect all runs of a folder, or those in `names`. Empty if no run has a result."""
    groups: dict[str, list[RunRecord]] = defaultdict(list)
    for config in sorted(folder.glob("*/config.toml")):
        if names is not None and config.parent.name not in names:
            continue
        record = read_run_record(config.parent)
        if any(value is not None for value in record.series("accuracy")[1]):
            groups[config.parent.name.rpartition("-seed")[0]].append(record)
    if not groups:
        return {}
    return {
        "made with": groups[next(iter(groups))][0].config["versions"],
        "commands": [record.config["command"] for records in groups.values() for record in records],
        "methods": {name: summary(records) for name, records in groups.items()},
    }


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("curves", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of a comparison")
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="write the results to this JSON file")
    options = parser.parse_args(arguments)
    result = collect_runs(options.folder)
    if not result:
        parser.error(f"{options.folder} has no run with a result.")
    write_result(result, options.out)
