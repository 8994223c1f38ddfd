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
from pathlib import Path
from statistics import stdev
from typing import Any

from fedloom.report import Record, read_run


def spread(values: list[float]) -> dict[str, Any]:
    deviation = round(stdev(values), 4) if len(values) > 1 else None
    return {"mean": round(statistics.mean(values), 4), "standard deviation": deviation}


def summary(records: list[Record]) -> dict[str, Any]:
    """Final accuracy over seeds, and the last ten evaluations: their level, and how much a run still moves."""
    runs = [[float(value) for value in record.series("accuracy")[1] if value is not None] for record in records]
    rounds = records[0].series("accuracy")[0]
    return {
        "final accuracy": {**spread([run[-1] for run in runs]), "seeds": [round(run[-1], 4) for run in runs]},
        "mean of the last ten evaluations": spread([statistics.mean(run[-10:]) for run in runs]),
        "standard deviation within the last ten": round(statistics.mean(stdev(run[-10:]) for run in runs), 4),
        "worst tenth of clients at the end": spread(
            [record.series("client_accuracy_worst10")[1][-1] for record in records]
        ),
        "mean of ten evaluations, by the round they end at": {
            int(rounds[i]): round(statistics.mean(statistics.mean(run[i - 9 : i + 1]) for run in runs), 4)
            for i in range(10, len(rounds), 10)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracies of compared runs as one small JSON file.")
    parser.add_argument("folder", type=Path, help="the folder of a comparison")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    groups: dict[str, list[Record]] = defaultdict(list)
    for config in sorted(options.folder.glob("*/config.toml")):
        groups[config.parent.name.rpartition("-seed")[0]].append(read_run(config.parent))
    if not groups:
        parser.error(f"there is no run in {options.folder}")
    result = {
        "made with": groups[next(iter(groups))][0].config["made_with"],
        "commands": [record.config["command"] for records in groups.values() for record in records],
        "methods": {name: summary(records) for name, records in groups.items()},
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
