"""The CUDA engine on this GPU: agreement, speed, how busy the GPU is, what bounds the rest, and what the engine costs.

    python benchmarks/gpu.py [PARTS] [--models cnn resnet20] [--precisions tf32 bf16] [--minutes 5] \
        --out results/gpu.json

Parts, all by default, each of which may take `--minutes` and is written as soon as a piece of it is there:

  agreement  one round of each network against a plain PyTorch loop in float32 and float64, and how far a change of one
             part in ten million carries that loop itself
  methods    two rounds of every method against the plain engine, in float64
  speed      whole rounds against a plain sequential PyTorch loop in the same process, in turn: 100 clients by
             class-wise Dirichlet 0.1, 10 a round, 5 epochs, batch 50, SGD with momentum 0.5; medians, the same clients
             for both; and one more round as the profiler sees it, held against what the chip can do, measured here too
  together   steady rounds of `--at-once` runs that share the GPU in one process, as the profiler sees them
  cost       runs with evaluation every ten rounds and checkpoints: the share of time that is not training
  seeds      the accuracy of five runs here and of the same five on the CPU

The loop has the samples on the GPU in float, one module, `load_state_dict` for each client, `torch.optim.SGD` and a
weighted sum: what simulators do, without their data loaders. Where CIFAR-10 is not at hand, random images of the same
shape take the same time. `--device cpu --tiny` tries everything out without a GPU; its figures mean nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
import torch.nn.functional as F
from gpu_profile import BATCH, LR, MOMENTUM, busy_share, measure_ceilings, profile, profiled, seconds
from torch import nn

import fedloom
from fedloom.config import make_config
from fedloom.cuda_streams import own_stream
from fedloom.data import PooledFederation, Samples, load
from fedloom.data.partition import partition
from fedloom.devices import make_device
from fedloom.engines import CudaEngine
from fedloom.errors import InputError
from fedloom.experiment import Experiment, build
from fedloom.methods import methods
from fedloom.models import build as build_model
from fedloom.request import Own
from fedloom.small_runs import small_experiment
from fedloom.streams import Streams

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "engines"))
import agreement as against_loop  # what the tests hold against each other too

CLIENTS, PER_ROUND, EPOCHS = 100, 10, 5
WARM_SECONDS = 15.0
"""How long rounds are played, at most, before any is timed: clients differ in size, and each size is recorded once."""


class Sheet:
    """The results so far; written whenever something is added."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path: Path | None = options.out
        self._found: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            self._found = json.loads(self._path.read_text())
        name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU: these figures mean nothing"
        self._found["machine"] = {"device": name, "torch": torch.__version__}

    def put(self, part: str, name: str, value: Any) -> None:
        self._found.setdefault("commands", {})[f"{part}: {name}"] = " ".join(["python", *sys.argv])
        self._found.setdefault(part, {})[name] = value
        print(f"{part}: {name}: {json.dumps(value)}", flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self._found, indent=1) + "\n")


class Clock:
    """So many minutes for a part."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def while_left(self, things: list[Any]) -> Iterator[Any]:
        for thing in things:
            if time.monotonic() > self._end:
                print(f"no time left for {thing} and what comes after it", flush=True)
                return
            yield thing


# Agreement


def agreement(options: argparse.Namespace, sheet: Sheet, clock: Clock) -> None:
    device = options.device
    for model in clock.while_left(["lenet"] if options.tiny else list(against_loop.NETWORKS)):
        found: dict[str, Any] = {}
        for double in (False, True):
            name = "float64" if double else "float32"
            with against_loop.experiment_of(model, device, double).engine_closed() as experiment:
                jobs, floats = against_loop.jobs_of(experiment), experiment.layout.floats
                loop = against_loop.trained_by_a_loop(experiment, jobs, device)
                rows, replayed = against_loop.trained_at_once(experiment, jobs, device)
                found[f"{name}, to a plain loop"] = against_loop.apart(rows, loop, floats)
                plain = against_loop.trained(experiment.engine, jobs)
                found[f"{name}, to the plain engine"] = against_loop.apart(rows, plain, floats)
                draw = torch.Generator(device).manual_seed(0)
                moved = [replace(job, row=job.row.clone()) for job in jobs]
                for job in moved:
                    weights = job.row[: experiment.layout.trainable]
                    noise = torch.randn(weights.shape, generator=draw, device=device, dtype=weights.dtype)
                    weights.mul_(1 + 1e-7 * noise)
                astray = against_loop.trained_by_a_loop(experiment, moved, device)
                found[f"{name}, the loop from a start moved by 1e-7"] = against_loop.apart(astray, loop, floats)
                found[f"{name}, steps replayed"] = replayed
        sheet.put("agreement", model, found)


def every_method(options: argparse.Namespace, sheet: Sheet, clock: Clock) -> None:
    for method in clock.while_left(["fedavg", "scaffold"] if options.tiny else sorted(methods())):
        rows, replayed = [], 0
        for engine in ("plain", "cuda"):
            given = {"device": options.device, "precision": "fp32", "momentum": 0.5, "engine": usable(engine, options)}
            experiment = small_experiment(method, {}, **given, model=small_network)
            with started(experiment, engine).engine_closed():
                lost = [experiment.rounds.play(round)["lost"] for round in range(2)]
                rows.append(experiment.rounds.parts.server.deploy()[: experiment.layout.floats].clone())
                if isinstance(experiment.engine, CudaEngine):
                    replayed = sum(slot.tape.replayed for slot in experiment.engine.slots)
        away = float(torch.linalg.vector_norm(rows[0] - rows[1]) / torch.linalg.vector_norm(rows[0]))
        sheet.put("methods", method, {"away": away, "steps replayed": replayed, "clients lost": sum(lost)})


def small_network() -> nn.Module:
    return against_loop.in_double(nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10)))


def usable(engine: str, options: argparse.Namespace) -> str:
    """On the CPU the plain engine first takes the place of the other."""
    return engine if options.device == "cuda" else "plain"


def started(experiment: Experiment, engine: str = "cuda") -> Experiment:
    """The experiment with the CUDA engine also where that is only tried out, on the CPU."""
    if engine == "cuda" and not isinstance(experiment.engine, CudaEngine):
        experiment.engine.close()
        experiment.engine = experiment.rounds.engine = CudaEngine(experiment.engine.shop, "cpu")
    return experiment


# Speed


def federation(options: argparse.Namespace) -> PooledFederation:
    """100 clients; where the data set is not at hand, random images of the same shape take the same time."""
    name, count = options.data, 3000 if options.tiny else 50_000
    try:
        data = load(name, download=False)
        pool, prepare = data.train[:count], data.prepare
    except InputError:
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=draw)
        pool, prepare, name = Samples(x, torch.randint(0, 10, (count,), generator=draw)), None, "made up"
    parts = partition(
        "iid" if options.tiny else "dirichlet:0.1", pool.y.numpy(), CLIENTS, Streams(0).numpy("partition")
    )
    return PooledFederation(pool, parts, classes=10, prepare=prepare, name=name, test=pool[:10_000])


def experiment_of(
    model: str, precision: str, data: PooledFederation, options: argparse.Namespace, seed: int = 0
) -> Experiment:
    given = {
        "seed": seed,
        "data": data.name, "partition": "own", "clients": CLIENTS, "per_round": PER_ROUND, "rounds": 10_000,
        "eval_every": 10_000, "model": model, "epochs": 1 if options.tiny else EPOCHS, "batch_size": BATCH, "lr": LR,
        "momentum": MOMENTUM, "engine": usable("cuda", options), "device": options.device, "fast": options.fast,
        "precision": precision if options.device == "cuda" else "fp32",
    }  # fmt: skip
    return started(build(make_config(given), Own(data=data)))


class Loop:
    """One client after the other."""

    def __init__(self, model: str, data: PooledFederation, device: str, autocast: bool, epochs: int) -> None:
        torch.manual_seed(0)
        self.module = build_model(model, data.shape, 10).to(device)
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

    def step(self, at: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        if len(at) == 1:  # batch norm cannot take it; the engine lets the norm rest
            return
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            loss = F.cross_entropy(self.module(self.x[at]), self.y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def speed(options: argparse.Namespace, sheet: Sheet, clock: Clock) -> None:
    data, loops = federation(options), dict[str, list[float]]()
    rounds, most = (1, 1) if options.tiny else (options.rounds, options.warm)
    ceilings = measure_ceilings(options.device, 256 if options.tiny else 8192)
    sheet.put("profile", "ceilings", ceilings)
    for precision, model in clock.while_left([(p, m) for p in options.precisions for m in options.models]):
        with experiment_of(model, precision, data, options).engine_closed() as experiment:
            play, select = experiment.rounds.play, experiment.rounds.parts.server.select
            began = time.monotonic()
            warm = next((n for n in range(most) if play(n) and time.monotonic() - began > WARM_SECONDS), most - 1) + 1
            first = time.monotonic() - began
            ours, theirs, lower = [], [], []
            epochs = experiment.config.epochs
            full = Loop(model, data, options.device, False, epochs)
            half = Loop(model, data, options.device, True, epochs) if precision == "bf16" else None
            for loop in (full, half):
                if loop is not None:
                    loop.round(select(0)[:2])
            for number in range(warm, warm + rounds):
                clients = select(number)
                ours.append(seconds(options.device, play, number))
                if model not in loops or len(loops[model]) < rounds:  # the loop in tf32 is timed once
                    theirs.append(seconds(options.device, full.round, clients))
                if half is not None:
                    lower.append(seconds(options.device, half.round, clients))
            loops.setdefault(model, theirs)
            ms = {"fedloom": statistics.median(ours), "loop": statistics.median(loops[model])}
            if lower:
                ms["loop in bf16"] = statistics.median(lower)
            tapes = [slot.tape for slot in engine_of(experiment).slots]
            name = f"{model}, {precision}{', fast' if options.fast else ''}"
            sheet.put("speed", name, {
                "ms a round": {name: round(1000 * value, 1) for name, value in ms.items()},
                "spread": {"fedloom": spread(ours), "loop": spread(loops[model])},
                "times faster than the loop": round(ms["loop"] / ms["fedloom"], 2),
                "data": data.name,
                f"seconds of the first {warm} rounds": round(first, 2),
                "steps": {name: sum(getattr(t, name) for t in tapes) for name in ("recorded", "replayed", "done")},
                "GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if options.device == "cuda" else None,
            })  # fmt: skip
            sheet.put(
                "profile",
                name,
                profile(experiment, data, (model, precision), warm + rounds, ceilings),
            )
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def together(options: argparse.Namespace, sheet: Sheet, clock: Clock) -> None:
    """Steady rounds of several runs that share the GPU, as with `fedloom compare --at-once`: none waits for another."""
    data, count = federation(options), 2 if options.tiny else options.at_once
    rounds, warm = (1, 1) if options.tiny else (options.rounds, options.warm)
    stages = [range(warm + n * rounds, warm + (n + 1) * rounds) for n in (0, 1)]  # timed, and seen by the profiler
    stages.insert(0, range(warm))

    def one_run(model: str, precision: str, seed: int, gate: Barrier) -> None:
        try:
            with (
                own_stream(make_device(options.device)),
                experiment_of(model, precision, data, options, seed).engine_closed() as run,
            ):
                for numbers in stages:
                    gate.wait()
                    for number in numbers:
                        run.rounds.play(number)
                    gate.wait()
        except BaseException:
            gate.abort()  # nobody waits for a run that has failed
            raise

    for precision, model in clock.while_left([(p, m) for p in options.precisions for m in options.models]):
        gate = Barrier(count + 1)

        def stage(gate: Barrier = gate) -> None:
            gate.wait()
            gate.wait()

        with ThreadPoolExecutor(count) as pool:
            runs = [pool.submit(one_run, model, precision, seed, gate) for seed in range(count)]
            try:
                stage()
                wall = seconds(options.device, stage) / rounds
                spans = profiled(options.device, stage)
            except BrokenBarrierError:
                spans = []
        for run in runs:
            run.result()
        took = {"rounds of each": rounds, "ms for a round of one run": round(1000 * wall / count, 1)}
        found = busy_share(spans, wall) if spans else {}  # on a CPU the profiler does not see other threads
        sheet.put("profile", f"{model}, {precision}, {count} runs at once", took | found)


def spread(values: list[float]) -> list[float]:
    return [round(1000 * min(values), 1), round(1000 * max(values), 1)]


def engine_of(experiment: Experiment) -> CudaEngine:
    assert isinstance(experiment.engine, CudaEngine)
    return experiment.engine


# What the engine costs besides training, and whether it learns the same


def cost(options: argparse.Namespace, sheet: Sheet, clock: Clock) -> None:
    data = federation(options)
    for model in clock.while_left(options.models):
        rounds = 2 if options.tiny else 60
        with tempfile.TemporaryDirectory() as folder:
            run = fedloom.run(
                "fedavg", data, model, rounds=rounds, eval_every=1 if options.tiny else 10, per_round=PER_ROUND,
                epochs=1 if options.tiny else EPOCHS, batch_size=BATCH, lr=LR, momentum=MOMENTUM,
                device=options.device, checkpoint_seconds=5, out=Path(folder) / "run", report=False,
            )  # fmt: skip
            late = [record["seconds"] for record in run.history[1 + rounds // 2 :]]
        total = sum(record["total"] for record in late)
        names = sorted({name for record in late for name in record} - {"total"})
        shares = {name: round(sum(record.get(name, 0.0) for record in late) / total, 4) for name in names}
        sheet.put("cost", model, {"shares": shares, "besides training": round(1 - shares["train"], 4)})


SEEDS = """
import json, sys, fedloom
data, device, rounds, folder = sys.argv[1:]
found = fedloom.compare(["fedavg"], seeds=5, data=data, model="cnn" if data == "digits" else "lenet",
                        partition="dirichlet:0.5", rounds=int(rounds), epochs=1, lr=0.05, eval_every=10,
                        device=device, out=folder, report=False, at_once=5 if device == "cuda" else 1)
print(json.dumps([[run.summary["accuracy"], run.history[-1]["loss"]] for run in found.runs]))
"""


def seeds(options: argparse.Namespace, sheet: Sheet, clock: Clock) -> None:
    data = federation(options).name
    data = "digits" if data == "made up" else data  # these are always at hand
    for device in clock.while_left(["cpu", "cuda"] if options.device == "cuda" else ["cpu"]):
        with tempfile.TemporaryDirectory() as folder:
            given = [data, device, "2" if options.tiny else "100", str(Path(folder) / "runs")]
            done = subprocess.run([sys.executable, "-c", SEEDS, *given], capture_output=True, text=True, check=True)
        accuracies, losses = zip(*json.loads(done.stdout.strip().splitlines()[-1]), strict=True)
        mean, deviation = statistics.mean(accuracies), statistics.stdev(accuracies)
        found = {"data": data, "accuracy": accuracies, "mean": round(mean, 4), "deviation": round(deviation, 4)}
        sheet.put("seeds", device, found | {"loss": losses})  # losses tell that the two have computed by themselves


PARTS: dict[str, Callable[[argparse.Namespace, Sheet, Clock], None]] = {
    "agreement": agreement,
    "methods": every_method,
    "speed": speed,
    "together": together,
    "cost": cost,
    "seeds": seeds,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The CUDA engine on this GPU; see the top of this file.")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="by default all")
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet20", "vgg16", "resnet18"])
    parser.add_argument("--precisions", nargs="+", default=["tf32", "bf16"], choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--fast", action="store_true", help="let the engine use what is not the same every time")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are timed")
    parser.add_argument("--warm", type=int, default=60, help="rounds before, in which steps are recorded")
    parser.add_argument("--at-once", type=int, default=3, help="runs that share the GPU in `together`")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each part")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="to try the benchmark out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sheet = Sheet(options)
    for part in options.parts or PARTS:
        print(f"{part}, at most {options.minutes:g} minutes", flush=True)
        PARTS[part](options, sheet, Clock(options.minutes))


if __name__ == "__main__":
    main()
