"""Measure what the CUDA engine costs besides training, and compare its accuracy with a CPU."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import fedloom
from benchmarks.cuda.setting import BATCH, EPOCHS, LR, MOMENTUM, PER_ROUND, make_data
from benchmarks.cuda.table import ResultTable, TimeLimit


def cost(options: argparse.Namespace, table: ResultTable, limit: TimeLimit) -> None:
    """Measure the share of each part of a round in whole runs."""
    data = make_data(options)
    for model, method in limit.until_over([(model, method) for model in options.models for method in options.methods]):
        rounds = 4 if options.tiny else 60
        with tempfile.TemporaryDirectory() as folder:
            run = fedloom.run(
                method, data, model, rounds=rounds, eval_every=1 if options.tiny else 10, clients_per_round=PER_ROUND,
                epochs=1 if options.tiny else EPOCHS, batch_size=BATCH, lr=LR, momentum=MOMENTUM,
                device=options.device, checkpoint_seconds=5, out=Path(folder) / "run", report=False,
            )  # fmt: skip
            late = [record["seconds"] for record in run.history[1 + rounds // 2 :]]
        # A run waits for its last checkpoint; it writes the others during the next rounds.
        late[-1]["total"] -= late[-1].pop("checkpoint")
        total = sum(record["total"] for record in late)
        names = sorted({name for record in late for name in record} - {"total"})
        shares = {name: round(sum(record.get(name, 0.0) for record in late) / total, 4) for name in names}
        found = {"ms a round": round(1000 * total / len(late), 1), "shares": shares}
        table.put("cost", f"{model}, {method}", found | {"besides training": round(1 - shares["train"], 4)})


SEEDS = """
import json, sys, fedloom
data, device, rounds, folder = sys.argv[1:]
found = fedloom.compare(["fedavg"], seeds=5, data=data, model="cnn" if data == "digits" else "lenet",
                        partition="dirichlet:0.5", rounds=int(rounds), epochs=1, lr=0.05, eval_every=10,
                        device=device, out=folder, report=False, concurrent_runs=5 if device == "cuda" else 1)
print(json.dumps([[run.last_accuracy, run.history[-1]["loss"]] for run in found.runs]))
"""


def seeds(options: argparse.Namespace, table: ResultTable, limit: TimeLimit) -> None:
    """Compare the accuracy of the same runs after the last round on the GPU and on the CPU."""
    data = make_data(options).name
    data = "digits" if data == "random images" else data  # scikit-learn ships the digits
    for device in limit.until_over(["cpu", "cuda"] if options.device == "cuda" else ["cpu"]):
        with tempfile.TemporaryDirectory() as folder:
            given = [data, device, "2" if options.tiny else "100", str(Path(folder) / "runs")]
            done = subprocess.run([sys.executable, "-c", SEEDS, *given], capture_output=True, text=True, check=True)
        accuracies, losses = zip(*json.loads(done.stdout.strip().splitlines()[-1]), strict=True)
        mean, deviation = statistics.mean(accuracies), statistics.stdev(accuracies)
        found = {"data": data, "accuracy": accuracies, "mean": round(mean, 4), "deviation": round(deviation, 4)}
        table.put("seeds", device, found | {"loss": losses})  # unequal losses show two computations
