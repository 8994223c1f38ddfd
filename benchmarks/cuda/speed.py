"""Measure whole rounds of the CUDA engine against a plain loop.

It also measures them in the profiler.
"""

import argparse
import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.cuda.profile import (
    busy_share,
    measure_ceilings,
    profile,
    profiled,
    run_full_round,
    seconds,
    steps_of,
)
from benchmarks.cuda.setting import BATCH, LR, MOMENTUM, build_experiment, directory_name, engine_of, make_data
from benchmarks.cuda.table import ResultTable
from fedloom.data import PartitionedDataset
from fedloom.devices.cuda_runtime import use_exclusive_stream
from fedloom.devices.selection import select_device
from fedloom.models import build_model
from fedloom.runs.build import BuiltRun
from tests.support.cuda_agreement import with_torchs_layers


class Loop:
    """A plain PyTorch loop: one client after the other."""

    def __init__(self, model: str, data: PartitionedDataset, device: str, autocast: bool, epochs: int) -> None:
        torch.manual_seed(0)
        self.module = with_torchs_layers(build_model(model, data.shape, 10)).to(device)
        self.x, self.y = data.transform(data.pool.x.to(device)), data.pool.y.to(device)
        self.parts = [torch.from_numpy(part).to(device) for part in data.client_indices]
        self.model = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        self.autocast, self.device, self.epochs = autocast, device, epochs

    def round(self, clients: list[int]) -> None:
        total = sum(len(self.parts[client]) for client in clients)
        mean = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in self.model.items()}
        for client in clients:
            part = self.parts[client]
            self.module.load_state_dict(self.model)
            optimizer = torch.optim.SGD(self.module.parameters(), LR, momentum=MOMENTUM)
            for _ in range(self.epochs):
                order = part[torch.randperm(len(part), device=part.device)]
                for low in range(0, len(order), BATCH):
                    self.step(order[low : low + BATCH], optimizer)
            for name, tensor in self.module.state_dict().items():
                mean[name] += tensor * (len(part) / total)
        self.model = {name: tensor.to(self.model[name].dtype) for name, tensor in mean.items()}

    def warm_up(self, clients: Iterable[int]) -> None:
        """Take a step with each batch size of these clients, so that cuDNN has chosen its kernels."""
        optimizer = torch.optim.SGD(self.module.parameters(), LR, momentum=MOMENTUM)
        for size in sorted({BATCH} | {len(self.parts[client]) % BATCH for client in clients} - {0}):
            self.step(torch.arange(size, device=self.device), optimizer)

    def step(self, at: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        if len(at) == 1:  # batch norm needs two samples; the engine freezes it for such a batch
            return
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            loss = F.cross_entropy(self.module(self.x[at]), self.y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def whole_rounds(options: argparse.Namespace, table: ResultTable, model: str, precision: str) -> None:
    """Time rounds of one network and precision, profile one, or both, as `options.parts` says."""
    data = make_data(options)
    ceilings = measure_ceilings(options.device, 256 if options.tiny else 8192) if "profile" in options.parts else {}
    with build_experiment(model, precision, data, options).engine_closed() as experiment:
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # without the measurement of the peaks
        first = seconds(options.device, warm_up, experiment, options)
        if "speed" in options.parts:
            found = speed(experiment, data, options, autocast=options.loop_in_bf16 and precision == "bf16")
            found["seconds of the rounds before"] = round(first, 2)
            table.put("speed", directory_name(model, precision, options), found)
        if "profile" in options.parts:
            number = middle_round(experiment, data, options)
            seen = profile(experiment, data, (model, precision), number, ceilings)
            table.put("profile", directory_name(model, precision, options), {"ceilings": ceilings} | seen)


def speed(
    experiment: BuiltRun, data: PartitionedDataset, options: argparse.Namespace, *, autocast: bool
) -> dict[str, Any]:
    """Time whole rounds and the plain loop, and with `autocast` also the loop in bf16."""
    numbers, model = timed(options), experiment.config.model
    select, epochs = experiment.rounds.parts.server.sample_clients, experiment.config.epochs
    loops = {"loop": Loop(model, data, options.device, False, epochs)}
    if autocast:
        loops["loop in bf16"] = Loop(model, data, options.device, True, epochs)
    for loop in loops.values():
        loop.warm_up(client for number in numbers for client in select(number))
    took: dict[str, list[float]] = {name: [] for name in ("fedloom", *loops)}
    for number in numbers:
        took["fedloom"].append(seconds(options.device, run_full_round, experiment, number))
        for name, loop in loops.items():
            took[name].append(seconds(options.device, loop.round, select(number)))
    ms = {name: 1000 * statistics.median(values) for name, values in took.items()}
    runners = [slot.graph_runner for slot in engine_of(experiment).slots]
    return {
        "ms a round": {name: round(value, 1) for name, value in ms.items()},
        "spread": {name: spread(values) for name, values in took.items()},
        "times faster than the loop": round(ms["loop"] / ms["fedloom"], 2),
        "steps of all clients, in each round": [sum(steps_of(experiment, data, number)) for number in numbers],
        "data": data.name,
        "steps": {name: sum(getattr(runner, name) for runner in runners) for name in ("captured", "replayed", "done")},
        "GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if options.device == "cuda" else None,
    }


def timed(options: argparse.Namespace) -> range:
    """Return the rounds to time: the same rounds, and so the same clients, for all networks and precisions."""
    return range(1 if options.tiny else options.rounds)


def warm_up(experiment: BuiltRun, options: argparse.Namespace) -> None:
    """Run the rounds to time, so that the CUDA graphs of all their steps are captured."""
    for _ in range(options.warm):
        for number in timed(options):
            run_full_round(experiment, number)


def middle_round(experiment: BuiltRun, data: PartitionedDataset, options: argparse.Namespace) -> int:
    """Return the timed round with the median number of steps."""
    by_length = sorted((sum(steps_of(experiment, data, number)), number) for number in timed(options))
    return by_length[len(by_length) // 2][1]


def together(options: argparse.Namespace, table: ResultTable, model: str, precision: str) -> None:
    """Profile rounds of runs that share the GPU, as with `fedloom compare --concurrent-runs`."""
    data, count = make_data(options), 2 if options.tiny else options.concurrent_runs
    numbers, gate = timed(options), Barrier(count + 1)

    def one_run(seed: int) -> None:
        try:
            with (
                use_exclusive_stream(select_device(options.device)),
                build_experiment(model, precision, data, options, seed).engine_closed() as run,
            ):
                for times in (options.warm, 1, 1):  # captured, timed, profiled
                    gate.wait()
                    for number in [*numbers] * times:
                        run_full_round(run, number)
                    gate.wait()
        except BaseException:
            gate.abort()  # no other run waits for a failed run
            raise

    def stage() -> None:
        gate.wait()
        gate.wait()

    wall, spans = 0.0, list[tuple[int, int, str]]()
    with ThreadPoolExecutor(count) as pool:
        runs = [pool.submit(one_run, seed) for seed in range(count)]
        with suppress(BrokenBarrierError):  # the failed run raises its error below
            stage()
            wall = seconds(options.device, stage) / len(numbers)
            spans = profiled(options.device, stage)
    for run in runs:
        run.result()
    took = {"rounds of each": len(numbers), "ms for a round of one run": round(1000 * wall / count, 1)}
    found = busy_share(spans, wall) if spans else {}  # on a CPU the profiler sees this thread only
    if spans:
        found["ms in the profile"] = round(found["ms in the profile"] / len(numbers), 1)  # of one round
    table.put("profile", f"{model}, {precision}, {count} runs at once", took | found)


def spread(values: list[float]) -> list[float]:
    return [round(1000 * min(values), 1), round(1000 * max(values), 1)]
