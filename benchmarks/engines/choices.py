"""Measure alternatives behind design choices: means, optimizer steps, memory.

All figures are medians with one thread, for the choices that docs/design.md explains:

- adding a model of 1.7 million parameters to a running mean in float32, and to a sum in float64;
- a training step of a small and a large network with `torch.optim.SGD`, and with fedloom's SGD on a flat vector;
- a training step of McMahan's CNN if the allocator returns freed memory to the kernel, and if it keeps it. Each case
  has its own process, because the setting holds for a whole process;
- the speed of a large matrix product.
"""

import ctypes
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from fedloom.core.layout import Layout
from fedloom.models import build_model
from fedloom.training.optimizers import SGD


def milliseconds(work: Callable[[], object], calls: int, repeats: int = 9) -> float:
    for _ in range(calls):
        work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - start) / calls * 1000)
    return round(statistics.median(times), 4)


def means() -> dict[str, float]:
    rows = [torch.randn(1_663_370) for _ in range(30)]
    running, total = torch.zeros(1_663_370), torch.zeros(1_663_370, dtype=torch.float64)

    def each(take: Callable[[torch.Tensor], object]) -> float:
        return round(milliseconds(lambda: [take(row) for row in rows], 1) / len(rows), 4)

    return {
        "running mean, float32": each(lambda row: running.lerp_(row, 0.1)),
        "sum, float64": each(lambda row: total.add_(row, alpha=600.0)),
    }


def steps(model: str, calls: int) -> dict[str, float]:
    """Time a training step with torch's optimizer on tensors, and with fedloom's on the flat vector."""
    x, y = torch.randn(50, 1, 28, 28), torch.randint(0, 10, (50,))
    theirs, ours = build_model(model, (1, 28, 28), 10), build_model(model, (1, 28, 28), 10)
    layout = Layout.of(ours)
    row = layout.read(ours)
    layout.bind(ours, row)
    gradient = torch.zeros(layout.trainable)
    slices, parameters = layout.views(gradient), list(ours.parameters())
    torch_sgd, row_sgd = torch.optim.SGD(theirs.parameters(), 0.01, momentum=0.5), SGD(momentum=0.5)

    def with_torch() -> None:
        torch_sgd.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        torch_sgd.step()

    def with_rows() -> None:
        torch._foreach_copy_(slices, torch.autograd.grad(F.cross_entropy(ours(x), y), parameters))
        row_sgd.step(row[: layout.trainable], gradient, 0.01)

    return {"torch.optim": milliseconds(with_torch, calls), "row": milliseconds(with_rows, calls)}


def cnn_step(keep: bool) -> float:
    if keep:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)
        libc.mallopt(-1, 1 << 30)
    torch.set_num_threads(1)
    return steps("cnn", 5)["row"]


def product_speed() -> float:
    a = torch.randn(1024, 1024)
    return round(2 * 1024**3 / milliseconds(lambda: a @ a, 5) / 1e6, 1)


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("choices", __doc__)
    add_out(parser)
    options = parser.parse_args(arguments)
    fresh = multiprocessing.get_context("spawn")
    with fresh.Pool(1, maxtasksperchild=1) as pool:
        memory = {("kept" if keep else "given back"): pool.apply(cnn_step, (keep,)) for keep in (False, True)}
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "command": command_of("choices", arguments),
        "machine": describe_machine(),
        "ms for a row of a mean": means(),
        "ms for a step": {model: steps(model, calls) for model, calls in (("logreg", 200), ("mlp", 50))},
        "ms for a step of the CNN, freed memory": memory,
        "GFLOP/s of a matrix product": product_speed(),
    }
    print(json.dumps(result, indent=1))
    write_result(result, options.out)
