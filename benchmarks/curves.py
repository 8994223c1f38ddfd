"""Accuracies of compared runs as one small JSON file, for `results/`.

    fedloom compare fedavg indep fedcross fedmr fedcda --seeds 3 --partition dirichlet:0.1 --rounds 200 \
        --set fedcda.warmup=50 -o runs/digits
    python benchmarks/curves.py runs/digits --out results/digits.json
"""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from statistics import stdev
from typing import Any

from fedloom.report import Record, read_run


def spread(values: list[float]) -> dict[str, Any]:
    deviation = stdev(values) if len(values) > 1 else 0.0
    return {"mean": round(statistics.mean(values), 4), "standard deviation": round(deviation, 4)}


def summary(records: list[Record]) -> dict[str, Any]:
    """Final accuracy over seeds, and the last ten evaluations: their level, and how much a run still moves."""
    runs = [[float(value) for value in record.series("accuracy")[1] if value is not None] for record in records]
    rounds = records[0].series("accuracy")[0]
    return {
        "final accuracy": {**spread([run[-1] for run in runs]), "seeds": [round(run[-1], 4) for run in runs]},
        "mean of the last ten evaluations": spread([statistics.mean(run[-10:]) for run in runs]),
        "standard deviation within the last ten": round(statistics.mean(stdev(run[-10:]) for run in runs), 4),
        "curve": [
            [int(rounds[i]), round(statistics.mean(run[i] for run in runs), 4)] for i in range(0, len(rounds), 10)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracies of compared runs as one small JSON file.")
    parser.add_argument("folder", type=Path, help="the folder of a comparison")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    groups: dict[str, list[Record]] = defaultdict(list)
    for config in sorted(options.folder.glob("*/config.toml")):
        record = read_run(config.parent)
        groups[record.method].append(record)
    commands = [records[0].config["command"] for records in groups.values()]
    result = {"commands": commands, "methods": {name: summary(records) for name, records in groups.items()}}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
