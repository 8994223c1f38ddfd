"""What differential privacy of the clients costs in accuracy: FedAvg with more and more noise.

    FEDLOOM_DATA=DIR python benchmarks/privacy.py WORK [--seeds 1] [--out results/privacy.json]

Fashion-MNIST over 1000 clients of 60 samples each (dirichlet-equal:0.3), of which 100 are asked in a round (with noise:
on average), 40 rounds, McMahan's 2NN. The clip is the same in all rows and was not tuned. Finished runs are kept in
WORK, so the command may be stopped and given again.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import fedloom

SETTINGS: dict[str, Any] = {
    "data": "fashion-mnist", "partition": "dirichlet-equal:0.3", "clients": 1000, "per_round": 100, "model": "mlp",
    "rounds": 40, "lr": 0.1, "eval_every": 10,
}  # fmt: skip
CLIP = 0.5
ROWS: dict[str, dict[str, Any]] = {
    "neither": {"options": {"fedavg": {"weighting": "uniform"}}},
    "clip": {"clip_update": CLIP},
    **{f"noise {noise:g}": {"clip_update": CLIP, "noise": noise} for noise in (0.5, 1.0, 2.0, 4.0)},
}


def learn(folder: Path, **settings: Any) -> fedloom.RunResult:
    if (folder / "config.toml").exists():
        return fedloom.resume(folder, report=False)
    return fedloom.run("fedavg", **settings, out=folder, report=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/privacy.json"))
    arguments = parser.parse_args()
    rows = []
    for name, settings in ROWS.items():
        runs = [
            learn(arguments.work / f"{name.replace(' ', '-')}-seed{seed}", **SETTINGS, **settings, seed=seed)
            for seed in range(arguments.seeds)
        ]
        accuracies = [float(run.summary["accuracy"]) for run in runs]
        row = {
            "row": name,
            "accuracy": statistics.mean(accuracies),
            "accuracies": accuracies,
            "epsilon": runs[0].summary.get("epsilon"),
            "delta": runs[0].summary.get("delta"),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    settings = {**SETTINGS, "clip_update": CLIP}
    arguments.out.write_text(
        json.dumps({"settings": settings, "seeds": arguments.seeds, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
