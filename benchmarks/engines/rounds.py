"""Measure rounds of the multiprocess engine against sequential PyTorch loops.

Setting: 100 clients, 10 in each round, one local epoch, batch size 50, SGD with momentum 0.5, IID Fashion-MNIST, no
evaluation. Without Fashion-MNIST in FEDLOOM_DATA the benchmark makes random images of the same shape, which take the
same time.

There are two loops. Both have one module, `load_state_dict` for each client, `torch.optim.SGD` and a running weighted
sum, and both may use all cores:

- `plain` is the loop of the tutorials: a `DataLoader` over each client's `Subset` of float tensors in memory, and the
  network with ReLU before the pooling layer. This network computes the same as fedloom's, bit for bit.
- `careful` gathers the samples of a client's epoch once, takes slices as batches, and has fedloom's network.

The loops and fedloom take turns in one process. The benchmark reports ratios of medians, because ratios within one
process vary less than times. `--repeats N` measures N times, each time with new worker processes, and reports the
median ratio and all ratios. `--busy N` starts N other processes that compute at the same time. They slow down threads,
which wait for each other, but not processes.

The benchmark also reports the overhead of the engine for one client: a round without a training step, with 1.7 million
parameters.
"""

import json
import multiprocessing
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from fedloom.config import Config
from fedloom.core.rng import RngStreams
from fedloom.data import InputTransform, PartitionedDataset, Samples, load_dataset
from fedloom.data.partitions import partition_indices
from fedloom.errors import InputError
from fedloom.models import build_model
from fedloom.models.layers.pooling import PooledConv2d
from fedloom.runs.build import build_run
from fedloom.runs.resolve import UserObjects, resolve_run

CLIENTS, PER_ROUND, BATCH, LR, MOMENTUM = 100, 10, 50, 0.01, 0.5


def make_data() -> tuple[PartitionedDataset, str]:
    """Return 100 clients with 600 images each, and the name of the data."""
    try:
        data = load_dataset("fashion-mnist", download=False)
        pool, transform, name = data.train, data.transform, "fashion-mnist"
    except InputError:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (60_000, 28, 28, 1), dtype=torch.uint8, generator=generator)
        pool = Samples(x, torch.randint(0, 10, (60_000,), generator=generator))
        transform, name = InputTransform((0.2860,), (0.3530,)), "random images, 28 x 28"
    parts = partition_indices("iid", pool.y.numpy(), CLIENTS, RngStreams(0).numpy("partition"))
    return PartitionedDataset(pool, parts, classes=10, transform=transform, name=name), name


def relu_before_pooling(module: nn.Module) -> nn.Module:
    """Return the network with ReLU before the pooling layer, as in the papers."""
    layers, pool = list[tuple[str, nn.Module]](), list[tuple[str, nn.Module]]()
    for name, layer in module.named_children():
        if isinstance(layer, PooledConv2d):
            conv = copy(layer)
            conv.__class__ = nn.Conv2d  # the same layer without pooling
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
    """A sequential PyTorch loop over the clients of a round."""

    def __init__(self, model: str, data: PartitionedDataset, careful: bool) -> None:
        torch.manual_seed(0)
        self.careful = careful
        self.module = build_model(model, (1, 28, 28), 10)
        if not careful:
            self.module = relu_before_pooling(self.module)
        self.x, self.y = data.transform(data.pool.x), data.pool.y
        self.parts = [torch.from_numpy(part) for part in data.client_indices]
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
    """Return the median seconds of a round of the loops and of fedloom, and fedloom's ratios to the loops."""
    data, _ = make_data()
    loops = {"plain": Loop(model, data, careful=False), "careful": Loop(model, data, careful=True)}
    threads = torch.get_num_threads()
    config = Config(
        data=data.name, partition="own", clients=CLIENTS, clients_per_round=PER_ROUND, rounds=1000, eval_every=1000,
        model=model, epochs=1, batch_size=BATCH, lr=LR, momentum=MOMENTUM, engine="multiprocess", workers=workers,
    )  # fmt: skip
    times: dict[str, list[float]] = {"plain": [], "careful": [], "fedloom": []}
    with build_run(resolve_run(config, UserObjects(data=data))).engine_closed() as experiment:
        for number in range(rounds + 1):
            clients = experiment.rounds.parts.server.sample_clients(number)
            torch.set_num_threads(threads)
            for name, loop in loops.items():
                start = time.perf_counter()
                loop.round(clients)
                times[name].append(time.perf_counter() - start)
            torch.set_num_threads(1)
            start = time.perf_counter()
            experiment.rounds.run_round(number)
            times["fedloom"].append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    seconds = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up
    ratios = {f"ratio to {name}": seconds["fedloom"] / seconds[name] for name in loops}
    return {name: round(value, 4) for name, value in {**seconds, **ratios}.items()}


def repeated(model: str, rounds: int, workers: int, repeats: int) -> dict[str, object]:
    """Repeat `compare`; return the result with the median ratio to the plain loop, and all of these ratios."""
    found = sorted((compare(model, rounds, workers) for _ in range(repeats)), key=lambda one: one["ratio to plain"])
    return {**found[repeats // 2], "all ratios to plain": [one["ratio to plain"] for one in found]}


def overhead(rounds: int, workers: int) -> float:
    """Return the milliseconds for one client of a round without a training step, with McMahan's CNN."""
    data, _ = make_data()
    config = Config(
        data=data.name, partition="own", clients=CLIENTS, clients_per_round=PER_ROUND, rounds=1000, eval_every=1000,
        model="cnn", epochs=0, engine="multiprocess", workers=workers,
    )  # fmt: skip
    with build_run(resolve_run(config, UserObjects(data=data))).engine_closed() as experiment:
        times = []
        for number in range(rounds + 2):
            start = time.perf_counter()
            experiment.rounds.run_round(number)
            times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) / PER_ROUND * 1000


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("rounds", __doc__)
    parser.add_argument("--models", nargs="+", default=["cnn", "lenet", "mlp"], help="networks to measure")
    parser.add_argument("--rounds", type=int, default=7, help="rounds to time")
    parser.add_argument("--repeats", type=int, default=1, help="number of measurements")
    parser.add_argument("--workers", type=int, default=0, help="worker processes; 0: one for each core")
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute at the same time")
    add_out(parser)
    options = parser.parse_args(arguments)
    others = [multiprocessing.get_context("fork").Process(target=_compute, daemon=True) for _ in range(options.busy)]
    for process in others:
        process.start()
    found: dict[str, Any] = {}
    if options.out and options.out.exists():  # keep the figures of other networks
        found = json.loads(options.out.read_text())
    found["machine"] = {**describe_machine(), "threads": torch.get_num_threads()}
    about = {"command": command_of("rounds", arguments), "data": make_data()[1], "rounds": options.rounds}
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
    write_result(found, options.out)


def _compute() -> None:
    while True:
        sum(range(100_000))
