"""What the CUDA engine costs besides training, and whether it learns the same: for benchmarks/gpu.py."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_profile import BATCH, LR, MOMENTUM
from gpu_setting import EPOCHS, PER_ROUND, federation
from gpu_sheet import Clock, Sheet

import fedloom


def cost(options: argparse.Namespace, sheet: Sheet, clock: Clock) -> None:
    data = federation(options)
    for model, method in clock.while_left([(model, method) for model in options.models for method in options.methods]):
        rounds = 4 if options.tiny else 60
        with tempfile.TemporaryDirectory() as folder:
            run = fedloom.run(
                method, data, model, rounds=rounds, eval_every=1 if options.tiny else 10, per_round=PER_ROUND,
                epochs=1 if options.tiny else EPOCHS, batch_size=BATCH, lr=LR, momentum=MOMENTUM,
                device=options.device, checkpoint_seconds=5, out=Path(folder) / "run", report=False,
            )  # fmt: skip
            late = [record["seconds"] for record in run.history[1 + rounds // 2 :]]
        # The last checkpoint is waited for, once in a run; others are written beside the next rounds.
        late[-1]["total"] -= late[-1].pop("checkpoint")
        total = sum(record["total"] for record in late)
        names = sorted({name for record in late for name in record} - {"total"})
        shares = {name: round(sum(record.get(name, 0.0) for record in late) / total, 4) for name in names}
        found = {"ms a round": round(1000 * total / len(late), 1), "shares": shares}
        sheet.put("cost", f"{model}, {method}", found | {"besides training": round(1 - shares["train"], 4)})


SEEDS = """
import json, sys, fedloom
data, device, rounds, folder = sys.argv[1:]
found = fedloom.compare(["fedavg"], seeds=5, data=data, model="cnn" if data == "digits" else "lenet",
                        partition="dirichlet:0.5", rounds=int(rounds), epochs=1, lr=0.05, eval_every=10,
                        device=device, out=folder, report=False, at_once=5 if device == "cuda" else 1)
print(json.dumps([[run.summary["accuracy"], run.history[-1]["loss"]] for run in found.runs]))
"""


def seeds(options: argparse.Namespace, sheet: Sheet, clock: Clock) -> None:
    data = federation(options).name
    data = "digits" if data == "made up" else data  # these are always at hand
    for device in clock.while_left(["cpu", "cuda"] if options.device == "cuda" else ["cpu"]):
        with tempfile.TemporaryDirectory() as folder:
            given = [data, device, "2" if options.tiny else "100", str(Path(folder) / "runs")]
            done = subprocess.run([sys.executable, "-c", SEEDS, *given], capture_output=True, text=True, check=True)
        accuracies, losses = zip(*json.loads(done.stdout.strip().splitlines()[-1]), strict=True)
        mean, deviation = statistics.mean(accuracies), statistics.stdev(accuracies)
        found = {"data": data, "accuracy": accuracies, "mean": round(mean, 4), "deviation": round(deviation, 4)}
        sheet.put("seeds", device, found | {"loss": losses})  # losses tell that the two have computed by themselves
