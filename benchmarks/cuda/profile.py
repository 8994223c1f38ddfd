"""Measure what a GPU does in one round, and its peak performance."""

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

from benchmarks.cuda.setting import BATCH, LR, MOMENTUM
from fedloom.data import PartitionedDataset
from fedloom.models import build_model
from fedloom.runs.build import BuiltRun

WATCHED = 4.0
"""Seconds for which nvidia-smi is read."""


def wait(device: str) -> None:
    """Wait until the GPU has finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device: str, work: Callable[..., object], *given: Any) -> float:
    """Return the seconds that `work(*given)` takes."""
    wait(device)
    start = time.perf_counter()
    work(*given)
    wait(device)
    return time.perf_counter() - start


def run_full_round(experiment: BuiltRun, number: int) -> None:
    """Run a round in which no client fails; a round with failures is too short."""
    failed = experiment.rounds.run_round(number)["failed_clients"]
    if failed:
        raise RuntimeError(f"Clients failed in round {number}: {failed}")


def profile(
    experiment: BuiltRun, data: PartitionedDataset, name: tuple[str, str], number: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    """Return what the GPU does in round `number`, whose graphs must be captured already."""
    (model, precision), device = name, experiment.engine.device.type
    wall = seconds(device, run_full_round, experiment, number)
    steps = steps_of(experiment, data, number)
    seen = busy_by_driver(run_full_round, experiment, number) if device == "cuda" else None
    found = busy_share(profiled(device, run_full_round, experiment, number), wall)
    found["busy, as nvidia-smi sees it over some seconds"] = seen
    found["steps of all clients, and of the largest"] = [sum(steps), max(steps)]
    return found | floors(model, data, sum(steps), wall, ceilings, precision)


def steps_of(experiment: BuiltRun, data: PartitionedDataset, number: int) -> list[int]:
    """Return the number of steps of each client in round `number`."""
    clients = experiment.rounds.parts.server.sample_clients(number)
    return [experiment.config.epochs * -(-len(data.client_indices[c]) // BATCH) for c in clients]


def profiled(device: str, work: Callable[..., object], *given: Any) -> list[tuple[int, int, str]]:
    """Return start, end (in nanoseconds) and name of each kernel."""
    from torch.profiler import ProfilerActivity

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as found:
        work(*given)
        wait(device)
    kineto = found.profiler.kineto_results  # a hundred times faster than `found.events()`
    kind = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    chosen = (e for e in kineto.events() if e.device_type() == kind)
    return sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in chosen)


def busy_by_driver(work: Callable[..., object], *given: Any) -> float | None:
    """Return the share of time in which a kernel of any process runs while `work` repeats.

    The driver measures it, which slows down nothing, unlike the profiler. None without nvidia-smi.
    """
    gpu = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"  # nvidia-smi may number the GPUs differently
    command = ["nvidia-smi", gpu, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    shares = []
    with ThreadPoolExecutor(1) as pool:
        end = time.perf_counter() + WATCHED
        while time.perf_counter() < end:
            ahead = time.perf_counter() + 1.0  # the driver reports at most the last second
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
    """Return the share of time with a kernel, kernels at once, the longest kernels, and the gaps."""
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
    """Return the time from `low` to `high` that is in gaps."""
    return sum(max(0.0, min(b, high) - max(a, low)) for a, b in gaps)


def floors(
    model: str, data: PartitionedDataset, steps: int, wall: float, ceilings: dict[str, float], precision: str
) -> dict[str, Any]:
    """Return the shortest time of a round at the GPU's peak: by arithmetic, and by bytes.

    The bytes are those of torch's own kernels; fused kernels move fewer.
    """
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
    """Return the floating-point operations of a step, and the bytes of all inputs and outputs of its operations."""
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
    batch = data.transform(data.pool.x[:BATCH])
    optimizer = torch.optim.SGD(module.parameters(), LR, momentum=MOMENTUM)
    with FlopCounterMode(display=False) as flops, Bytes():
        F.cross_entropy(module(batch), data.pool.y[:BATCH]).backward()
        optimizer.step()
    return float(flops.get_total_flops()), float(Bytes.total)


def measure_ceilings(device: str, size: int) -> dict[str, float]:
    """Return the peak of this device in matrix products and copies, on random numbers."""
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
