"""What a step of Local Superior Soups costs: against a plain step, and the memory traffic of the interpolation.

    python benchmarks/locals.py [--models 4] [--steps 60] [--out results/locals.json]

The last member of a full pool is trained: interpolation reads all members and the received model and writes one row.
`traffic` is the time in which as many bytes are copied. The two kinds of step and the copy take turns, so that a busy
machine slows all of them; one thread, and of all turns the quickest counts, because what others do only adds to it.
The aim is (lss - traffic) / plain of at most 1.3.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from fedloom.config import TrainingConfig
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.data import InputTransform, Samples
from fedloom.methods.base import Client, MethodContext, Options
from fedloom.methods.lss import LSSClient, LSSOptions
from fedloom.models import build_model
from fedloom.training.batches import Batch
from fedloom.training.context import TrainingContext
from fedloom.training.trainer import LocalTrainer

CASES = [("mlp", (1, 28, 28), 64), ("lenet", (1, 28, 28), 64), ("cnn", (1, 28, 28), 20), ("cnn", (1, 28, 28), 64)]
NOTHING: MethodContext = None  # type: ignore[assignment]  # these parts ask the run for nothing


def seat(name: str, shape: tuple[int, ...], size: int) -> tuple[LocalTrainer, Batch]:
    """A client of one batch."""
    torch.manual_seed(0)
    module = build_model(name, shape, 10)
    layout = Layout.of(module, channels_last=True)
    training = TrainingConfig(batch_size=size, lr=0.01)
    shop = TrainingContext(
        module,
        layout,
        F.cross_entropy,
        InputTransform.identity(),
        training,
        RngStreams(0),
        classes=10,
        channels_last=True,
    )
    bench, samples = LocalTrainer(shop), Samples(torch.randn(size, *shape), torch.arange(size) % 10)
    bench.begin(0, 0, samples, layout.empty(), layout.read(module), {}, {}, {}, True)
    return bench, Batch(shop.prepare(samples.x, channels_last=True), samples.y)


def measure(name: str, shape: tuple[int, ...], size: int, models: int, steps: int) -> dict[str, float]:
    """The quickest of the two steps and of the traffic."""
    plain, batch = seat(name, shape, size)
    ours, _ = seat(name, shape, size)
    local, soup = Client(NOTHING, Options()), LSSClient(NOTHING, LSSOptions(models=models))
    members = soup.train(ours)
    for piece in itertools.islice(members, models - 1):
        ours.run(piece)
    last = next(members)
    moved = models + 2  # the pool, the received model, and the row that is written
    source = torch.zeros(moved * ours.layout.trainable // 2)
    target = torch.zeros_like(source)
    works: dict[str, Callable[[], object]] = {
        "plain": lambda: local.step(plain, batch),
        "lss": lambda: last.step(ours, batch),
        "traffic": lambda: target.copy_(source),
    }
    times: dict[str, list[float]] = {key: [] for key in works}
    for _ in range(steps + 3):
        for key, work in works.items():
            start = time.perf_counter()
            work()
            times[key].append(time.perf_counter() - start)
    result = {key: 1000 * min(values[3:]) for key, values in times.items()}
    return {
        "parameters": ours.layout.trainable,
        **{f"{key} ms": value for key, value in result.items()},
        "(lss - traffic) / plain": (result["lss"] - result["traffic"]) / result["plain"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step of Local Superior Soups costs.")
    parser.add_argument("--models", type=int, default=4, help="members that are trained")
    parser.add_argument("--steps", type=int, default=60, help="steps that are timed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, object] = {"command": " ".join(["python", *sys.argv]), "models": options.models}
    for name, shape, size in CASES:
        result[f"{name}, batch {size}"] = measure(name, shape, size, options.models, options.steps)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
