"""Whole rounds of the CUDA engine, against a plain loop and as the profiler sees them: for benchmarks/gpu.py."""

import argparse
import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
import torch.nn.functional as F
from gpu_agreement import against_loop
from gpu_profile import BATCH, LR, MOMENTUM, busy_share, measure_ceilings, play, profile, profiled, seconds, steps_of
from gpu_setting import engine_of, experiment_of, federation, name_of
from gpu_sheet import Sheet

from fedloom.data import PartitionedDataset
from fedloom.devices.cuda_runtime import use_exclusive_stream
from fedloom.devices.selection import select_device
from fedloom.models import build_model
from fedloom.runs.build import BuiltRun


class Loop:
    """One client after the other."""

    def __init__(self, model: str, data: PartitionedDataset, device: str, autocast: bool, epochs: int) -> None:
        torch.manual_seed(0)
        self.module = against_loop.with_torchs_layers(build_model(model, data.shape, 10)).to(device)
        self.x, self.y = data.prepare(data.pool.x.to(device)), data.pool.y.to(device)
        self.parts = [torch.from_numpy(part).to(device) for part in data.parts]
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

    def meet(self, clients: Iterable[int]) -> None:
        """Take a step with each size of batch that these clients have, so that kernels are chosen for it."""
        optimizer = torch.optim.SGD(self.module.parameters(), LR, momentum=MOMENTUM)
        for size in sorted({BATCH} | {len(self.parts[client]) % BATCH for client in clients} - {0}):
            self.step(torch.arange(size, device=self.device), optimizer)

    def step(self, at: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        if len(at) == 1:  # batch norm cannot take it; the engine lets the norm rest
            return
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            loss = F.cross_entropy(self.module(self.x[at]), self.y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def whole_rounds(options: argparse.Namespace, sheet: Sheet, model: str, precision: str) -> None:
    """Rounds of one experiment, timed and then as the profiler sees them, or what is asked for of the two."""
    data = federation(options)
    ceilings = measure_ceilings(options.device, 256 if options.tiny else 8192) if "profile" in options.parts else {}
    with experiment_of(model, precision, data, options).engine_closed() as experiment:
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # which are those of the ceilings
        first = seconds(options.device, warm, experiment, options)
        if "speed" in options.parts:
            found = speed(experiment, data, options, autocast=options.loop_in_bf16 and precision == "bf16")
            found["seconds of the rounds before"] = round(first, 2)
            sheet.put("speed", name_of(model, precision, options), found)
        if "profile" in options.parts:
            number = middle_round(experiment, data, options)
            seen = profile(experiment, data, (model, precision), number, ceilings)
            sheet.put("profile", name_of(model, precision, options), {"ceilings": ceilings} | seen)


def speed(
    experiment: BuiltRun, data: PartitionedDataset, options: argparse.Namespace, *, autocast: bool
) -> dict[str, Any]:
    """Whole rounds against a plain loop, and with `autocast` against one in bf16 too."""
    numbers, model = timed(options), experiment.config.model
    select, epochs = experiment.rounds.parts.server.select, experiment.config.epochs
    loops = {"loop": Loop(model, data, options.device, False, epochs)}
    if autocast:
        loops["loop in bf16"] = Loop(model, data, options.device, True, epochs)
    for loop in loops.values():
        loop.meet(client for number in numbers for client in select(number))
    took: dict[str, list[float]] = {name: [] for name in ("fedloom", *loops)}
    for number in numbers:
        took["fedloom"].append(seconds(options.device, play, experiment, number))
        for name, loop in loops.items():
            took[name].append(seconds(options.device, loop.round, select(number)))
    ms = {name: 1000 * statistics.median(values) for name, values in took.items()}
    tapes = [slot.tape for slot in engine_of(experiment).slots]
    return {
        "ms a round": {name: round(value, 1) for name, value in ms.items()},
        "spread": {name: spread(values) for name, values in took.items()},
        "times faster than the loop": round(ms["loop"] / ms["fedloom"], 2),
        "steps of all clients, in each round": [sum(steps_of(experiment, data, number)) for number in numbers],
        "data": data.name,
        "steps": {name: sum(getattr(t, name) for t in tapes) for name in ("recorded", "replayed", "done")},
        "GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if options.device == "cuda" else None,
    }


def timed(options: argparse.Namespace) -> range:
    """The rounds that are timed: the same for each network and precision, so with the same clients."""
    return range(1 if options.tiny else options.rounds)


def warm(experiment: BuiltRun, options: argparse.Namespace) -> None:
    """Play the rounds that are to be timed, so that all their steps are recorded by then."""
    for _ in range(options.warm):
        for number in timed(options):
            play(experiment, number)


def middle_round(experiment: BuiltRun, data: PartitionedDataset, options: argparse.Namespace) -> int:
    """That of the timed rounds which is neither long nor short."""
    by_length = sorted((sum(steps_of(experiment, data, number)), number) for number in timed(options))
    return by_length[len(by_length) // 2][1]


def together(options: argparse.Namespace, sheet: Sheet, model: str, precision: str) -> None:
    """Steady rounds of several runs that share the GPU, as with `fedloom compare --at-once`: none waits for another."""
    data, count = federation(options), 2 if options.tiny else options.at_once
    numbers, gate = timed(options), Barrier(count + 1)

    def one_run(seed: int) -> None:
        try:
            with (
                use_exclusive_stream(select_device(options.device)),
                experiment_of(model, precision, data, options, seed).engine_closed() as run,
            ):
                for times in (options.warm, 1, 1):  # recorded, timed, and seen by the profiler
                    gate.wait()
                    for number in [*numbers] * times:
                        play(run, number)
                    gate.wait()
        except BaseException:
            gate.abort()  # nobody waits for a run that has failed
            raise

    def stage() -> None:
        gate.wait()
        gate.wait()

    wall, spans = 0.0, list[tuple[int, int, str]]()
    with ThreadPoolExecutor(count) as pool:
        runs = [pool.submit(one_run, seed) for seed in range(count)]
        with suppress(BrokenBarrierError):  # the run that has failed says why
            stage()
            wall = seconds(options.device, stage) / len(numbers)
            spans = profiled(options.device, stage)
    for run in runs:
        run.result()
    took = {"rounds of each": len(numbers), "ms for a round of one run": round(1000 * wall / count, 1)}
    found = busy_share(spans, wall) if spans else {}  # on a CPU the profiler does not see other threads
    if spans:
        found["ms in the profile"] = round(found["ms in the profile"] / len(numbers), 1)  # as without it: for one
    sheet.put("profile", f"{model}, {precision}, {count} runs at once", took | found)


def spread(values: list[float]) -> list[float]:
    return [round(1000 * min(values), 1), round(1000 * max(values), 1)]
