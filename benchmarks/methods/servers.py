"""Measure servers with many models: FedCross, FedMR, FedCDA.

The benchmark compares FedCross and FedMR with the time of the memory traffic that they need. FedMR must copy all K
models once. FedCross moves one and a half times as much, because its similarities read the models once more. It
compares FedCDA with a search that tries the combinations on the models themselves: it times a few combinations and
multiplies.

All figures are medians with one thread. `fedcda-disk-cache` measures the memory of FedCDA's cache.
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from fedloom.config import TrainingConfig
from fedloom.core.bank import Bank
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.core.similarity import inner_products
from fedloom.methods import MethodContext
from fedloom.methods._support.model_selection import SelectedModelSums, enumerate_model_selections
from fedloom.methods.base import ServerResources
from fedloom.methods.fedcross import FedCrossOptions, FedCrossServer
from fedloom.methods.fedmr import FedMROptions, FedMRServer


def make_network(size: int, layers: int = 20) -> nn.Module:
    """Return dense layers with about `size` parameters on the meta device, which uses no memory."""
    width = int((size / layers) ** 0.5)
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def make_context(layout: Layout, clients: int, clients_per_round: int, cache_dir: Path | None = None) -> MethodContext:
    return MethodContext(
        layout=layout, initial=layout.empty(), num_clients=clients, clients_per_round=clients_per_round,
        planned_rounds=10, rng_streams=RngStreams(0), config=TrainingConfig(), num_examples=lambda _: 1,
        criterion=nn.functional.cross_entropy, make_model=nn.Identity,
        classes=10, shape=(1,),
        server=ServerResources(torch.device("cpu"), lambda count, width: Bank.memory(count, width), cache_dir),
    )  # fmt: skip


def median_seconds(work: Callable[[int], object], repeats: int = 5) -> float:
    times = []
    for number in range(repeats + 1):
        start = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def many_models(layout: Layout, count: int) -> dict[str, object]:
    """Compare FedCross and FedMR with a copy of the models."""
    bank, target = Bank.memory(count, layout.size), Bank.memory(count, layout.size)
    v, w = bank.rows, target.rows
    context = make_context(layout, 100, count)
    cross = FedCrossServer(context, FedCrossOptions())
    recombine = FedMRServer(context, FedMROptions())
    v[:] = 0.05 * torch.randn(layout.size)
    for row in v:
        row.add_(torch.randn(layout.size), alpha=0.001)
    traffic = median_seconds(lambda _: w.copy_(v))
    step = median_seconds(lambda number: cross.combine(number, v, w))
    recombined = median_seconds(lambda number: recombine.combine(number, v, w))
    return {
        "one pass of traffic": traffic,
        "fedcross step": step,
        "fedcross step / its traffic": step / (1.5 * traffic),
        "fedcross similarity alone": median_seconds(lambda _: cross.extremes(v, -1)),
        "fedmr recombination": recombined,
        "fedmr recombination / its traffic": recombined / traffic,
        "fedmr naive (state dicts, deep copies)": median_seconds(
            lambda number: naive_recombination(layout, v, number), 2
        ),
    }


def naive_recombination(layout: Layout, v: Tensor, number: int) -> list[dict[str, Tensor]]:
    models = [layout.state_dict(row) for row in v]
    draw, result = np.random.default_rng(number), [dict(model) for model in models]
    for name in models[0]:
        for i, j in enumerate(draw.permutation(len(models))):
            result[i][name] = models[j][name].clone()
    return result


def search(participants: int, cached: int, size: int) -> dict[str, float]:
    """Compare FedCDA's selection with a search that tries combinations on the models."""
    rng = np.random.default_rng(0)
    common = torch.randn(size)
    rows = torch.stack([common + 0.1 * torch.randn(size) for _ in range(participants * cached)])
    losses = [rng.random(cached) for _ in range(participants)]
    start = time.perf_counter()
    gram = inner_products(rows, common, slice(0, size)).numpy()[:-1, :-1]
    products = time.perf_counter() - start
    start = time.perf_counter()
    enumerate_model_selections(losses, gram, np.zeros(len(gram)), SelectedModelSums(), 1.0)
    fast = time.perf_counter() - start
    tried = list(itertools.islice(itertools.product(range(cached), repeat=participants), 3))
    start = time.perf_counter()
    for picks in tried:
        chosen = rows[[n * cached + pick for n, pick in enumerate(picks)]]
        float((chosen - chosen.mean(0)).square().sum())
    naive = (time.perf_counter() - start) / len(tried) * cached**participants
    return {"inner products": products, "search": fast, "naive": naive, "ratio": (products + fast) / naive}


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("servers", __doc__)
    parser.add_argument("--size", type=int, default=11_173_962, help="parameters of a model; default: ResNet-18")
    parser.add_argument("--models", type=int, default=10, help="models of the server")
    add_out(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    layout = Layout.of(make_network(options.size))
    result: dict[str, object] = {
        "command": command_of("servers", arguments),
        "machine": describe_machine(),
        "parameters": layout.size,
        "models": options.models,
    }
    result["seconds"] = many_models(layout, options.models)
    result["fedcda optimal, P=10, K=3"] = search(10, 3, options.size)
    print(json.dumps(result, indent=1))
    write_result(result, options.out)
