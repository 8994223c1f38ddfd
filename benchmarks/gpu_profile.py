"""What a GPU does in one round, and what it could do: for benchmarks/gpu.py."""

import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from fedloom.data import PartitionedDataset
from fedloom.models import build_model
from fedloom.runs.build import BuiltRun

BATCH, LR, MOMENTUM = 50, 0.01, 0.5

WATCHED = 4.0
"""Seconds for which the driver's own count is asked for."""


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device: str, work: Callable[..., object], *given: Any) -> float:
    """How long `work` takes with what it is given."""
    wait(device)
    start = time.perf_counter()
    work(*given)
    wait(device)
    return time.perf_counter() - start


def play(experiment: BuiltRun, number: int) -> None:
    """Play a round in which everybody trains: one in which clients are lost takes less time than it should."""
    lost = experiment.rounds.play(number)["lost_clients"]
    if lost:
        raise RuntimeError(f"clients were lost: {lost}")


def profile(
    experiment: BuiltRun, data: PartitionedDataset, name: tuple[str, str], number: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    """What the GPU does in round `number`, which must be a steady one."""
    (model, precision), device = name, experiment.engine.device.type
    wall = seconds(device, play, experiment, number)
    steps = steps_of(experiment, data, number)
    seen = busy_by_driver(play, experiment, number) if device == "cuda" else None
    found = busy_share(profiled(device, play, experiment, number), wall)
    found["busy, as nvidia-smi sees it over some seconds"] = seen
    found["steps of all clients, and of the largest"] = [sum(steps), max(steps)]
    return found | floors(model, data, sum(steps), wall, ceilings, precision)


def steps_of(experiment: BuiltRun, data: PartitionedDataset, number: int) -> list[int]:
    """How many steps each client takes in round `number`."""
    clients = experiment.rounds.parts.server.select(number)
    return [experiment.config.epochs * -(-len(data.parts[c]) // BATCH) for c in clients]


def profiled(device: str, work: Callable[..., object], *given: Any) -> list[tuple[int, int, str]]:
    """When which kernel ran, in nanoseconds."""
    from torch.profiler import ProfilerActivity

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as found:
        work(*given)
        wait(device)
    kineto = found.profiler.kineto_results  # reading these is a hundred times faster than `found.events()`
    kind = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    chosen = (e for e in kineto.events() if e.device_type() == kind)
    return sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in chosen)


def busy_by_driver(work: Callable[..., object], *given: Any) -> float | None:
    """In which share of the time a kernel runs, of whatever process, while `work` is done again and again. The driver
    counts it, which slows down nothing, as the profiler does. None where nvidia-smi is not at hand."""
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"  # its own number 0 may be another
    command = ["nvidia-smi", gpu, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    shares = []
    with ThreadPoolExecutor(1) as pool:
        end = time.perf_counter() + WATCHED
        while time.perf_counter() < end:
            ahead = time.perf_counter() + 1.0  # the driver tells of the last second, or less
            while time.perf_counter() < ahead:
                work(*given)
            try:
                asked = pool.submit(subprocess.run, command, capture_output=True, text=True, check=True)
                while not asked.done():
                    work(*given)
                shares.append(int(asked.result().stdout) / 100)
            except (OSError, subprocess.CalledProcessError, ValueError):
                return None
    return round(statistics.mean(shares), 3)


def busy_share(spans: list[tuple[int, int, str]], wall: float) -> dict[str, Any]:
    """How much of the time at least one kernel runs, how many do at once, which take longest, and when none does."""
    begin, end, gaps = spans[0][0], spans[0][0], list[tuple[int, int]]()
    for low, high, _ in spans:
        if low > end:
            gaps.append((end, low))
        end = max(end, high)
    total, length, idle = sum(high - low for low, high, _ in spans), end - begin, sum(b - a for a, b in gaps)
    longest = Counter[str]()
    for low, high, name in spans:
        longest[name[:80]] += high - low
    return {
        "ms of the round": round(1000 * wall, 1),
        "ms in the profile": round(length / 1e6, 1),
        "busy": round(1 - idle / length, 4),
        "busy, by tenths of the round": [
            round(1 - _inside(gaps, begin + n * length / 10, begin + (n + 1) * length / 10) / (length / 10), 2)
            for n in range(10)
        ],
        "idle, by the length of the gap": {
            f"{low:g} to {high:g} us": round(sum(b - a for a, b in gaps if low <= (b - a) / 1000 < high) / length, 4)
            for low, high in pairwise((0, 2, 10, 100, 1e6))
        },
        "longest gaps: ms from the begin, microseconds": [
            [round((a - begin) / 1e6, 2), round((b - a) / 1000, 1)] for a, b in sorted(gaps, key=_length)[-8:]
        ],
        "ms that kernels take in all": round(total / 1e6, 1),
        "kernels": len(spans),
        "kernels at once, while there is one": round(total / (length - idle), 2),
        "microseconds of a kernel": round(total / len(spans) / 1000, 2),
        "longest": {name: round(ns / total, 3) for name, ns in longest.most_common(6)},
    }


def _length(gap: tuple[int, int]) -> int:
    return gap[1] - gap[0]


def _inside(gaps: list[tuple[int, int]], low: float, high: float) -> float:
    """How much of a stretch of time is in gaps."""
    return sum(max(0.0, min(b, high) - max(a, low)) for a, b in gaps)


def floors(
    model: str, data: PartitionedDataset, steps: int, wall: float, ceilings: dict[str, float], precision: str
) -> dict[str, Any]:
    """How long a round would take at the chip's best: by arithmetic, and by the bytes of torch's own kernels, which
    are more than those of kernels that do the work of several."""
    operations, moved = count_step(model, data)
    moved = moved / 2 if precision == "bf16" else moved
    arithmetic = steps * operations / (1e12 * ceilings[f"{precision} teraflops"])
    memory = steps * moved / (1e9 * ceilings["gigabytes a second"])
    return {
        "gigaflops of a step": round(operations / 1e9, 2),
        "megabytes that torch's kernels of a step read and write": round(moved / 1e6, 1),
        "ms at the chip's best, by arithmetic": round(1000 * arithmetic, 2),
        "ms at the chip's best, by bytes": round(1000 * memory, 2),
        "floor as a share of the round": round(max(arithmetic, memory) / wall, 4),
    }


def count_step(model: str, data: PartitionedDataset) -> tuple[float, float]:
    """Floating-point operations of a step with a batch of 50, and bytes of what its operations take and give."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import FlopCounterMode

    class Bytes(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not getattr(func, "is_view", False):
                tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
                Bytes.total += sum(t.nbytes for t in tensors)
            return result

    module = build_model(model, data.shape, 10)
    batch = data.prepare(data.pool.x[:BATCH])
    optimizer = torch.optim.SGD(module.parameters(), LR, momentum=MOMENTUM)
    with FlopCounterMode(display=False) as flops, Bytes():
        F.cross_entropy(module(batch), data.pool.y[:BATCH]).backward()
        optimizer.step()
    return float(flops.get_total_flops()), float(Bytes.total)


def measure_ceilings(device: str, size: int) -> dict[str, float]:
    """What this device multiplies and copies at best, on random numbers."""
    found = {}
    for name, dtype in (("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)):
        torch.set_float32_matmul_precision("highest" if name == "fp32" else "high")
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        times = [seconds(device, torch.matmul, a, b) for _ in range(12)]
        found[f"{name} teraflops"] = float(f"{2 * size**3 / statistics.median(times[2:]) / 1e12:.4g}")
    a = torch.randn(size * size * 4, device=device)
    b = torch.empty_like(a)
    times = [seconds(device, b.copy_, a) for _ in range(12)]
    return found | {"gigabytes a second": float(f"{2 * a.nbytes / statistics.median(times[2:]) / 1e9:.4g}")}
