"""Measure the peak memory of FedCross on the multiprocess engine, in models.

Setting: K models of an MLP, K clients, all in each round, SGD with momentum 0.9, 40 random samples per client, 2 steps
a round. There are three rounds, each with an evaluation and a checkpoint. The run stops after the second round, and a
new process resumes it. The limit is 2 K + 2 workers + 6 models and 1 GiB.

Memory is the sum of the proportional set sizes (PSS) of the main process and its workers, from
`/proc/PID/smaps_rollup`. PSS counts a page that several processes use once in the sum. The resident set size would
count it once for each process. The memory of a control group would also count the files that checkpoints write, which
the kernel can drop at any time. The benchmark reads the PSS all the time, so it can miss a peak shorter than one
reading. `milliseconds between readings` says how long one took.

It needs Linux, about 30 models of free memory, and 20 models of free disk.
"""

import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import fedloom
from benchmarks._common import add_out, command_of, describe_machine, make_parser, write_result
from fedloom.errors import RunStopped
from fedloom.models.mlp import make_mlp_layers
from fedloom.runs.callback import Callback

INPUTS, CLASSES, HIDDEN_LAYERS, EXAMPLES, BATCH = 64, 10, 6, 40, 20
GIB = 1 << 30


@dataclass
class Peak:
    """The highest memory of a process and its children, in bytes."""

    total: int = 0
    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    """What each process had of it: anonymous memory, shared memory and files."""
    seconds_between: list[float] = field(default_factory=list)
    """The time from one reading to the next."""


def width_of(parameters: int) -> int:
    """Return the width of an MLP with about this many parameters."""
    outer, inner = INPUTS + CLASSES + HIDDEN_LAYERS, HIDDEN_LAYERS - 1
    return max(1, round(((outer**2 + 4 * inner * parameters) ** 0.5 - outer) / (2 * inner)))


def make_network(width: int) -> nn.Module:
    return nn.Sequential(make_mlp_layers([INPUTS, *[width] * HIDDEN_LAYERS], CLASSES))


def make_data(models: int) -> fedloom.FederatedDataset:
    """Return one client for each model, and a test set."""
    generator = torch.Generator().manual_seed(0)

    def samples() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(EXAMPLES, INPUTS, generator=generator), torch.arange(EXAMPLES) % CLASSES

    return fedloom.FederatedDataset.from_arrays([samples() for _ in range(models)], test=samples())


class _StopAfter(Callback):
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.now = 0

    def on_round_end(self, record: Any) -> None:
        self.now = record["round"]

    def should_stop(self) -> bool:
        return self.now >= self.rounds


def run_fedcross(folder: Path, width: int, models: int, workers: int, rounds: int) -> None:
    """Run all rounds but the last."""
    with suppress(RunStopped):
        fedloom.run(
            "fedcross", make_data(models), lambda: make_network(width), out=folder, rounds=rounds, clients=models,
            clients_per_round=models, epochs=1, batch_size=BATCH, lr=0.01, momentum=0.9, engine="multiprocess",
            workers=workers, eval_every=1, checkpoint_seconds=0, report=False, callbacks=[_StopAfter(rounds - 1)],
        )  # fmt: skip


def resume_fedcross(folder: Path, width: int, models: int) -> None:
    """Run the last round."""
    fedloom.resume(folder, data=make_data(models), model=lambda: make_network(width), report=False)


def measure_peak(work: Callable[..., None], *arguments: Any) -> Peak:
    """Call a function in a new process, and return the peak memory of this process and its children."""
    process = get_context("spawn").Process(target=work, args=arguments)
    process.start()
    assert process.pid is not None, "the process has started"
    peak, before = Peak(), time.monotonic()
    while process.is_alive():
        parts = {name: memory_of(pid) for name, pid in _family(process.pid).items()}
        now = time.monotonic()
        total = sum(sum(part.values()) for part in parts.values())
        peak.seconds_between.append(now - before)
        before = now
        if total > peak.total:
            peak.total, peak.parts = total, parts
        time.sleep(0.005)
    process.join()
    if process.exitcode:
        raise SystemExit(f"the measured process ended with exit code {process.exitcode}.")
    return peak


def memory_of(pid: int) -> dict[str, int]:
    """Return the proportional set size of a process in bytes, by kind of memory; empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return {}
    return {
        kind.lower(): 1024 * int(size) for kind, size in re.findall(r"^Pss_(Anon|Shmem|File): +(\d+) kB", text, re.M)
    }


def _family(pid: int) -> dict[str, int]:
    """Return a process and its children by name."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        children = []
    return {"main process": pid} | {f"child {number}": int(child) for number, child in enumerate(children, 1)}


def describe(peak: Peak, nbytes: int, limit: int) -> dict[str, Any]:
    """Return a peak in models of `nbytes`, and where it was."""
    return {
        "peak, GiB": round(peak.total / GIB, 2),
        "peak, models": round(peak.total / nbytes, 2),
        "peak without 1 GiB, models": round((peak.total - GIB) / nbytes, 2),
        "share of the limit": round(peak.total / limit, 3),
        "at the peak, models": {
            name: {kind: round(size / nbytes, 2) for kind, size in part.items()} for name, part in peak.parts.items()
        },
        "milliseconds between readings": round(1000 * median(peak.seconds_between), 1),
    }


def measure(parameters: int, models: int, workers: int, rounds: int) -> dict[str, Any]:
    """Return the peaks of a run and of its continuation in a new process."""
    width = width_of(parameters)
    nbytes = 4 * sum(parameter.numel() for parameter in make_network(width).parameters())
    most_models = 2 * models + 2 * workers + 6
    limit = most_models * nbytes + GIB
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        started = measure_peak(run_fedcross, folder, width, models, workers, rounds)
        resumed = measure_peak(resume_fedcross, folder, width, models)
    return {
        "parameters": nbytes // 4,
        "models": models,
        "workers": workers,
        "rounds": rounds,
        "limit, models and 1 GiB": most_models,
        "limit, GiB": round(limit / GIB, 2),
        "start": describe(started, nbytes, limit),
        "resume": describe(resumed, nbytes, limit),
    }


def main(arguments: Sequence[str]) -> None:
    parser = make_parser("memory", __doc__)
    parser.add_argument("--parameters", type=int, default=100_000_000, help="parameters of the network, about")
    parser.add_argument("--models", type=int, default=10, help="models of the server, K")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--rounds", type=int, default=3, help="rounds")
    add_out(parser)
    options = parser.parse_args(arguments)
    result = {
        "command": command_of("memory", arguments),
        "machine": describe_machine(),
        **measure(options.parameters, options.models, options.workers, options.rounds),
    }
    print(json.dumps(result, indent=1))
    write_result(result, options.out)
