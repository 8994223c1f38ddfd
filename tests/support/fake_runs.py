"""Run directories that look real, made without training."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedloom.utils.run_files import FORMAT
from fedloom.utils.storage import add_json_checksum, read_json, write_json

PACE = {"fedavg": (0.86, 9.0), "fedcross": (0.925, 14.0), "fedmr": (0.92, 12.0), "fedcross+lss": (0.93, 5.0)}
"""Where a method's accuracy ends, and how many rounds it takes to get most of the way."""


def write_run(
    folder: Path,
    method: str = "fedavg",
    seed: int = 0,
    rounds: int = 40,
    clients: int = 20,
    finished: bool = True,
    upto: int | None = None,
    classes: int = 10,
    **more: Any,
) -> Path:
    """Write one run of `method`; `more` goes into its config, and `upto` stops it early."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng([seed, *method.encode()])
    top, pace = PACE.get(method, (0.9, 10.0))
    top, pace = top + draw.normal(0, 0.006), pace * draw.uniform(0.75, 1.25)
    config: dict[str, Any] = {
        "method": method,
        "data": "digits",
        "partition": "dirichlet:0.3",
        "clients": clients,
        "clients_per_round": 5,
        "model": "mlp",
        "rounds": rounds,
        "eval_every": 2,
        "seed": seed,
        "epochs": 5,
        "batch_size": 32,
        "lr": 0.05,
        "momentum": 0.9,
        "command": f"fedloom run {method} --clients {clients} --seed {seed}",
    } | more
    if "fedcross" in method:
        config.setdefault("options", {"fedcross": {"alpha": 0.99, "strategy": "lowest_similarity"}})
    config["versions"] = {
        "fedloom": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.9",
        "platform": "Linux x86_64",
    }
    config = {"format": FORMAT, **config}
    content = tomli_w.dumps(config).encode()
    (folder / "config.toml").write_bytes(content)
    inputs = {"config": config, "config_sha256": [hashlib.sha256(content).hexdigest()], "data": {}, "machines": [{}]}
    write_json(folder / "inputs.json", inputs)

    rows = []
    for this in range((rounds if upto is None else upto) + 1):
        accuracy = float(np.clip(top - (top - 0.1) * np.exp(-this / pace) + draw.normal(0, 0.008), 0, 1))
        row: dict[str, Any] = {"round": this}
        if this % 2 == 0 or this == rounds:
            row |= {
                "accuracy": accuracy,
                "loss": 2.3 * (1 - accuracy) + 0.05,
                "client_accuracy_mean": accuracy - 0.01,
                "client_accuracy_worst10": accuracy * 0.8,
            }
        if this:
            lost = {str(draw.integers(clients)): "no answer within 30 s"} if draw.random() < 0.1 else {}
            parts = {
                "sample_clients": 0.001,
                "dispatch": 0.01,
                "train": draw.uniform(0.8, 1.2),
                "aggregate": 0.05,
                "refine": 0.4 if "lss" in method else 0.0,
                "evaluate": 0.12,
                "checkpoint": 0.03,
            }
            row |= {
                "train_loss": 1.5 * float(np.exp(-this / pace)),
                "bytes_down": 5 * 203_560,
                "bytes_up": (5 - len(lost)) * 203_560,
                "models_down": 5,
                "models_up": 5 - len(lost),
                "clients": 5,
                "failed": len(lost),
                "failed_clients": lost,
                "seconds": parts | {"total": sum(parts.values())},
            }
            if "fedcross" in method:
                row["diagnostics"] = {"similarity": 1 - np.exp(-this / 20), "spread": 3 * np.exp(-this / 15)}
        rows.append(row)
    checksum = write_metrics(folder, rows)

    shares = np.random.default_rng(seed).dirichlet([0.3] * clients, classes)
    counts = np.rint(shares.T * 144).astype(int).tolist()
    names = [str(at) for at in range(classes)]
    partition = {"classes": classes, "class_names": names, "counts": counts}
    write_json(folder / "partition.json", partition)
    if finished:
        digest = f"sha256:{draw.bytes(32).hex()}"
        summary = {"method": method, "seed": seed, "rounds": rounds, "digest": digest, "metrics_sha256": checksum}
        summary["rounds_read"] = False
        write_json(folder / "summary.json", summary)
    return folder


def write_metrics(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Write the rows of metrics.jsonl, and return the checksum of the last one."""
    content, checksum = b"", ""
    for row in rows:
        line, checksum = add_json_checksum(row, checksum)
        content += line + b"\n"
    (folder / "metrics.jsonl").write_bytes(content)
    return checksum


def add_metrics(folder: Path, *rows: dict[str, Any]) -> None:
    """Add rows to the metrics of a run, and to the totals if it has finished."""
    before = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in before:
        del row["sha256"]
    checksum = write_metrics(folder, [*before, *rows])
    if (folder / "summary.json").exists():
        write_json(folder / "summary.json", {**read_json(folder / "summary.json"), "metrics_sha256": checksum})


def write_runs(root: Path, methods: tuple[str, ...] = ("fedavg", "fedcross", "fedmr")) -> list[Path]:
    """Every method with three seeds, one folder each."""
    return [write_run(root / f"{method}-{seed}", method=method, seed=seed) for method in methods for seed in range(3)]
