"""Accuracies of runs as one small JSON file, for `results/`.

    fedloom compare fedavg indep fedcross fedmr fedcda --seeds 3 --partition dirichlet:0.1 --rounds 200 \
        --set fedcda.warmup=50 -o runs/digits
    python benchmarks/curves.py runs/digits --out results/digits.json

Every run folder inside is read; folders called NAME-seedN belong together. The commands written are those of the runs
themselves, each from its config.toml.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from statistics import stdev
from typing import Any

from fedloom.report import RunRecord, read_run_record


def spread(values: list[float]) -> dict[str, Any]:
    deviation = round(stdev(values), 4) if len(values) > 1 else None
    return {"mean": round(statistics.mean(values), 4), "standard deviation": deviation}


def diagnostics(record: RunRecord) -> dict[str, float]:
    """What the method says of itself, the mean of the last ten rounds that have it."""
    told: dict[str, list[float]] = defaultdict(list)
    for row in record.history:
        for name, value in (row.get("diagnostics") or {}).items():
            if isinstance(value, int | float):
                told[name].append(value)
    return {name: float(f"{statistics.mean(values[-10:]):.4g}") for name, values in told.items()}


def shares(records: list[RunRecord]) -> dict[str, float]:
    """What each part of a round takes of the time, over all rounds of all runs and the evaluation before the first."""
    spent: dict[str, float] = defaultdict(float)
    for record in records:
        for row in record.history:
            for name, seconds in (row.get("seconds") or {}).items():
                spent[name] += seconds
    total = spent.pop("total", 0.0)
    return {name: round(seconds / total, 4) for name, seconds in sorted(spent.items())} if total else {}


def summary(records: list[RunRecord]) -> dict[str, Any]:
    """Final accuracy over seeds, the last ten evaluations (their level, how much a run still moves), and the curves."""
    runs = [[float(value) for value in record.series("accuracy")[1] if value is not None] for record in records]
    length = min(len(run) for run in runs)  # of runs that are still under way, what all of them have
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
    told = [diagnostics(record) for record in records]
    names = sorted({name for each in told for name in each})
    if names:
        found["the method's own figures, mean of the last ten rounds that have them, each seed"] = {
            name: [each.get(name) for each in told] for name in names
        }
    found["mean of ten evaluations, by the round they end at"] = {
        rounds[i]: round(statistics.mean(statistics.mean(run[i - 9 : i + 1]) for run in runs), 4)
        for i in range(10, len(rounds), 10)
    }
    found["evaluated after the rounds"] = ", ".join(str(number) for number in rounds)
    found["accuracy of each seed"] = [", ".join(f"{value:.4f}" for value in run) for run in runs]
    return found


def collected(folder: Path, names: Collection[str] | None = None) -> dict[str, Any]:
    """All runs in a folder, or those of these names; nothing where there is none with a result."""
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
        "made with": groups[next(iter(groups))][0].config["made_with"],
        "commands": [record.config["command"] for records in groups.values() for record in records],
        "methods": {name: summary(records) for name, records in groups.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracies of compared runs as one small JSON file.")
    parser.add_argument("folder", type=Path, help="the folder of a comparison")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    result = collected(options.folder)
    if not result:
        parser.error(f"there is no run in {options.folder}")
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
