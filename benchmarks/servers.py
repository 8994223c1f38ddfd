"""What servers that keep many models cost, beside training: FedCross's step, FedMR's recombination, FedCDA's search.

    python benchmarks/servers.py [--size 11173962] [--models 10] [--out results/servers.json]

FedCross and FedMR are held against one pass of memory traffic over the rows they must read and write: for FedMR a copy
of all K rows, for FedCross one and a half (its similarities read the rows once more). FedCDA is held against trying
the combinations on the models themselves (a few are timed, the rest is multiplication). One thread, medians. What
FedCDA's cache needs of memory: cache.py.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.config import TrainingConfig
from fedloom.core.bank import Bank
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.core.similarity import inner_products
from fedloom.methods import MethodContext
from fedloom.methods._support.model_selection import SelectedModelSums, enumerate_model_selections
from fedloom.methods.fedcross import FedCrossOptions, FedCrossServer
from fedloom.methods.fedmr import FedMROptions, FedMRServer


def network(size: int, layers: int = 20) -> nn.Module:
    """Dense layers with about `size` parameters in all, without using their memory."""
    width = int((size / layers) ** 0.5)
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def context(layout: Layout, clients: int, per_round: int, cache_dir: Path | None = None) -> MethodContext:
    return MethodContext(
        layout=layout, initial=layout.empty(), clients=clients, per_round=per_round, rounds=10, streams=RngStreams(0),
        training=TrainingConfig(), samples=lambda _: 1, criterion=nn.functional.cross_entropy, make_module=nn.Identity,
        classes=10, shape=(1,), cache_dir=cache_dir, keep_checkpoints=2, device=torch.device("cpu"),
        make_bank=lambda count, width: Bank.memory(count, width),
    )  # fmt: skip


def median(work: Callable[[int], object], repeats: int = 5) -> float:
    times = []
    for number in range(repeats + 1):
        start = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def many_models(layout: Layout, count: int) -> dict[str, object]:
    """FedCross and FedMR against a copy of the rows."""
    bank, target = Bank.memory(count, layout.size), Bank.memory(count, layout.size)
    v, w = bank.rows, target.rows
    here = context(layout, 100, count)
    cross = FedCrossServer(here, FedCrossOptions())
    recombine = FedMRServer(here, FedMROptions())
    v[:] = 0.05 * torch.randn(layout.size)
    for row in v:
        row.add_(torch.randn(layout.size), alpha=0.001)
    traffic = median(lambda _: w.copy_(v))
    step = median(lambda number: cross.combine(number, v, w))
    recombined = median(lambda number: recombine.combine(number, v, w))
    return {
        "one pass of traffic": traffic,
        "fedcross step": step,
        "fedcross step / its traffic": step / (1.5 * traffic),
        "fedcross similarity alone": median(lambda _: cross.extremes(v, -1)),
        "fedmr recombination": recombined,
        "fedmr recombination / its traffic": recombined / traffic,
        "fedmr naive (state dicts, deep copies)": median(lambda number: naive_recombination(layout, v, number), 2),
    }


def naive_recombination(layout: Layout, v: Tensor, number: int) -> list[dict[str, Tensor]]:
    models = [layout.state_dict(row) for row in v]
    draw, result = np.random.default_rng(number), [dict(model) for model in models]
    for name in models[0]:
        for i, j in enumerate(draw.permutation(len(models))):
            result[i][name] = models[j][name].clone()
    return result


def search(participants: int, cached: int, size: int) -> dict[str, float]:
    """FedCDA's choice against trying combinations on the models."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description="What servers that keep many models cost.")
    parser.add_argument("--size", type=int, default=11_173_962, help="parameters of a model (ResNet-18)")
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    layout = Layout.of(network(options.size))
    result: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "parameters": layout.size,
        "models": options.models,
    }
    result["seconds"] = many_models(layout, options.models)
    result["fedcda optimal, P=10, K=3"] = search(10, 3, options.size)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
