"""Measure what differential privacy of the clients costs in accuracy: FedAvg with increasing noise.

Fashion-MNIST over 1000 clients with 60 samples each (dirichlet-equal:0.3), 40 rounds, McMahan's 2NN. A round samples
100 clients; with noise 100 is the mean. The clip norm is the same in all rows and was not tuned. FEDLOOM_DATA must name
the folder of Fashion-MNIST. The folder WORK keeps finished runs, so the same command continues after a stop.
Accuracies are those after the last round.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fedloom
from benchmarks._common import command_of, describe_machine, make_parser, write_result

SETTINGS: dict[str, Any] = {
    "data": "fashion-mnist", "partition": "dirichlet-equal:0.3", "clients": 1000, "clients_per_round": 100,
    "model": "mlp",
    "rounds": 40, "lr": 0.1, "eval_every": 10,
}  # fmt: skip
CLIP = 0.5
ROWS: dict[str, dict[str, Any]] = {
    "neither": {"options": {"fedavg": {"weighting": "uniform"}}},
    "clip": {"clip_update": CLIP},
    **{f"noise {noise:g}": {"clip_update": CLIP, "noise": noise} for noise in (0.5, 1.0, 2.0, 4.0)},
}


def run_or_resume(folder: Path, **settings: Any) -> fedloom.RunResult:
    if (folder / "config.toml").exists():
        return fedloom.resume(folder, report=False)
    return fedloom.run("fedavg", **settings, out=folder, report=False)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("privacy", __doc__)
    parser.add_argument("work", type=Path, metavar="WORK", help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("results/privacy.json"),
        help="write the results to this JSON file",
    )
    options = parser.parse_args(arguments)
    rows = []
    for name, settings in ROWS.items():
        runs = [
            run_or_resume(options.work / f"{name.replace(' ', '-')}-seed{seed}", **SETTINGS, **settings, seed=seed)
            for seed in range(options.seeds)
        ]
        accuracies = [float(run.summary["last_accuracy"]) for run in runs]
        row = {
            "row": name,
            "accuracy": statistics.mean(accuracies),
            "accuracies": accuracies,
            "epsilon": runs[0].summary.get("epsilon"),
            "delta": runs[0].summary.get("delta"),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    about = {"command": command_of("privacy", arguments), "machine": describe_machine()}
    settings = {**SETTINGS, "clip_update": CLIP}
    write_result({**about, "settings": settings, "seeds": options.seeds, "rows": rows}, options.out)
