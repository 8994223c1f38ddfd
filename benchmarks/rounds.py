"""Whole rounds of the host engine against sequential PyTorch loops, in one process, in turn.

    python benchmarks/rounds.py [--models cnn lenet mlp] [--rounds 7] [--repeats 5] [--busy 1] [--out FILE]

100 clients, 10 a round, one local epoch, batch 50, SGD with momentum 0.5, IID Fashion-MNIST (its folder in
FEDLOOM_DATA; without it images of the same shape are made up, which takes the same time). Two loops, both of which may
use all cores: `plain` is the one of the tutorials, with a `DataLoader` over each client's `Subset` of float tensors in
memory, and the network as everybody writes it, ReLU before the pool (it computes the same as ours, to the last bit);
`careful` gathers a client's epoch once and slices batches off it, and has our network. Both have one module,
`load_state_dict` for each client, `torch.optim.SGD`, and a running weighted sum. Evaluation is left out everywhere. All
take turns, and ratios of the medians are reported, because machines are noisy and ratios in one run are less so; with
`--repeats N` everything is done N times, each with new processes, and the middle ratio and all of them are given. With
`--busy N` as many other processes compute beside them: threads that wait for each other suffer from that, processes do
not.

It also reports the engine's own cost for each client and round: rounds in which clients take no step at all, with 1.7
million parameters.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from fedloom.config import Config
from fedloom.core.rng import RngStreams
from fedloom.data import InputTransform, PartitionedDataset, Samples, load_dataset
from fedloom.data.partitions import partition_indices
from fedloom.errors import InputError
from fedloom.models import build_model
from fedloom.models.layers.pooling import PooledConv2d
from fedloom.runs.build import build_run
from fedloom.runs.resolve import UserObjects

CLIENTS, PER_ROUND, BATCH, LR, MOMENTUM = 100, 10, 50, 0.01, 0.5


def federation() -> tuple[PartitionedDataset, str]:
    """100 clients with 600 images each."""
    try:
        data = load_dataset("fashion-mnist", download=False)
        pool, prepare, name = data.train, data.prepare, "fashion-mnist"
    except InputError:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (60_000, 28, 28, 1), dtype=torch.uint8, generator=generator)
        pool = Samples(x, torch.randint(0, 10, (60_000,), generator=generator))
        prepare, name = InputTransform((0.2860,), (0.3530,)), "made up, 28 x 28"
    parts = partition_indices("iid", pool.y.numpy(), CLIENTS, RngStreams(0).numpy("partition"))
    return PartitionedDataset(pool, parts, classes=10, prepare=prepare, name=name), name


def as_usual(module: nn.Module) -> nn.Module:
    """Our network with ReLU before the pool, as in the papers."""
    layers, pool = list[tuple[str, nn.Module]](), list[tuple[str, nn.Module]]()
    for name, layer in module.named_children():
        if isinstance(layer, PooledConv2d):
            conv = copy(layer)
            conv.__class__ = nn.Conv2d  # the same without the pool
            layers.append((name, conv))
            pool = [(f"{name}_pool", nn.MaxPool2d(2))]
        else:
            layers += [(name, layer), *pool]
            pool = []
    usual = nn.Sequential(OrderedDict(layers))
    x = torch.randn(5, 1, 28, 28)
    assert torch.equal(usual(x), module(x))
    return usual


class Loop:
    """A sequential loop."""

    def __init__(self, model: str, data: PartitionedDataset, careful: bool) -> None:
        torch.manual_seed(0)
        self.careful = careful
        self.module = build_model(model, (1, 28, 28), 10)
        if not careful:
            self.module = as_usual(self.module)
        self.x, self.y = data.prepare(data.pool.x), data.pool.y
        self.parts = [torch.from_numpy(part) for part in data.parts]
        self.model = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def batches(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        part = self.parts[client]
        if not self.careful:
            samples = Subset(TensorDataset(self.x, self.y), part.tolist())
            yield from DataLoader(samples, batch_size=BATCH, shuffle=True)
            return
        order = part[torch.randperm(len(part))]
        x, y = self.x[order], self.y[order]
        for low in range(0, len(order), BATCH):
            yield x[low : low + BATCH], y[low : low + BATCH]

    def round(self, clients: list[int]) -> None:
        total = sum(len(self.parts[client]) for client in clients)
        mean = {name: torch.zeros_like(tensor) for name, tensor in self.model.items()}
        for client in clients:
            self.module.load_state_dict(self.model)
            optimizer = torch.optim.SGD(self.module.parameters(), LR, momentum=MOMENTUM)
            for x, y in self.batches(client):
                optimizer.zero_grad()
                F.cross_entropy(self.module(x), y).backward()
                optimizer.step()
            for name, tensor in self.module.state_dict().items():
                mean[name] += tensor * (len(self.parts[client]) / total)
        self.model = mean


def compare(model: str, rounds: int, workers: int) -> dict[str, float]:
    """Median seconds of a round of all three, and fedloom's ratios to the loops."""
    data, _ = federation()
    loops = {"plain": Loop(model, data, careful=False), "careful": Loop(model, data, careful=True)}
    threads = torch.get_num_threads()
    config = Config(
        data=data.name, partition="own", clients=CLIENTS, per_round=PER_ROUND, rounds=1000, eval_every=1000,
        model=model, epochs=1, batch_size=BATCH, lr=LR, momentum=MOMENTUM, engine="host", workers=workers,
    )  # fmt: skip
    times: dict[str, list[float]] = {"plain": [], "careful": [], "fedloom": []}
    with build_run(config, UserObjects(data=data)).engine_closed() as experiment:
        for number in range(rounds + 1):
            clients = experiment.rounds.parts.server.select(number)
            torch.set_num_threads(threads)
            for name, loop in loops.items():
                start = time.perf_counter()
                loop.round(clients)
                times[name].append(time.perf_counter() - start)
            torch.set_num_threads(1)
            start = time.perf_counter()
            experiment.rounds.play(number)
            times["fedloom"].append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    seconds = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first one warms up
    ratios = {f"ratio to {name}": seconds["fedloom"] / seconds[name] for name in loops}
    return {name: round(value, 4) for name, value in {**seconds, **ratios}.items()}


def repeated(model: str, rounds: int, workers: int, repeats: int) -> dict[str, object]:
    """`compare` several times: the one with the middle ratio to the plain loop, and that ratio of all."""
    found = sorted((compare(model, rounds, workers) for _ in range(repeats)), key=lambda one: one["ratio to plain"])
    return {**found[repeats // 2], "all ratios to plain": [one["ratio to plain"] for one in found]}


def overhead(rounds: int, workers: int) -> float:
    """Milliseconds for each client of a round in which nobody takes a step, with McMahan's CNN."""
    data, _ = federation()
    config = Config(
        data=data.name, partition="own", clients=CLIENTS, per_round=PER_ROUND, rounds=1000, eval_every=1000,
        model="cnn", epochs=0, engine="host", workers=workers,
    )  # fmt: skip
    with build_run(config, UserObjects(data=data)).engine_closed() as experiment:
        times = []
        for number in range(rounds + 2):
            start = time.perf_counter()
            experiment.rounds.play(number)
            times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) / PER_ROUND * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole rounds against sequential PyTorch loops.")
    parser.add_argument("--models", nargs="+", default=["cnn", "lenet", "mlp"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0, help="worker processes; 0: one for each core")
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute beside")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    beside = [multiprocessing.get_context("fork").Process(target=_compute, daemon=True) for _ in range(options.busy)]
    for process in beside:
        process.start()
    found: dict[str, Any] = {}
    if options.out and options.out.exists():  # figures of other networks stay
        found = json.loads(options.out.read_text())
    found["machine"] = {"cpu": _cpu(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    about = {"command": " ".join(["python", *sys.argv]), "data": federation()[1], "rounds": options.rounds}
    for model in options.models:
        ratios = repeated(model, options.rounds, options.workers, options.repeats)
        found.setdefault("seconds a round", {})[model] = {**ratios, **about}
        print(model, ratios, flush=True)
    costs = sorted(round(overhead(20, options.workers), 3) for _ in range(options.repeats))
    found["milliseconds a client without training, 1.7 M parameters"] = {
        "median": statistics.median(costs),
        "all": costs,
        "command": about["command"],
    }
    print("milliseconds a client without training:", costs)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def _compute() -> None:
    while True:
        sum(range(100_000))


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
