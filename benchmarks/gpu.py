"""Whole rounds of the CUDA engine against a plain sequential PyTorch loop on the same GPU, in one process, in turn.

    python benchmarks/gpu.py [--models lenet cnn] [--data cifar10] [--precision tf32] [--out results/gpu.json]

100 clients by class-wise Dirichlet 0.1, 10 a round, 5 epochs, batch 50, SGD with momentum 0.5. The loop has the samples
on the GPU in float, one module, `load_state_dict` for each client, `torch.optim.SGD` and a weighted sum: what
simulators do, without their data loaders. Evaluation is left out. Medians of rounds with the same clients for both.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from fedloom.config import Config
from fedloom.data import PooledFederation, Samples, load
from fedloom.data.partition import partition
from fedloom.engines import CudaEngine
from fedloom.errors import InputError
from fedloom.experiment import Own, build
from fedloom.models import build as build_model
from fedloom.streams import Streams

CLIENTS, PER_ROUND, EPOCHS, BATCH, LR, MOMENTUM = 100, 10, 5, 50, 0.01, 0.5


def federation(name: str) -> PooledFederation:
    """100 clients; where the data set is not at hand, random images of the same shape take the same time."""
    try:
        data = load(name, download=False)
        pool, prepare = data.train, data.prepare
    except InputError:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (50_000, 32, 32, 3), dtype=torch.uint8, generator=generator)
        pool, prepare, name = Samples(x, torch.randint(0, 10, (50_000,), generator=generator)), None, "made up"
    parts = partition("dirichlet:0.1", pool.y.numpy(), CLIENTS, Streams(0).numpy("partition"))
    return PooledFederation(pool, parts, classes=10, prepare=prepare, name=name)


class Loop:
    """One client after the other."""

    def __init__(self, model: str, data: PooledFederation, device: str, autocast: bool) -> None:
        torch.manual_seed(0)
        self.module = build_model(model, data.shape, 10).to(device)
        self.x, self.y = data.prepare(data.pool.x.to(device)), data.pool.y.to(device)
        self.parts = [torch.from_numpy(part).to(device) for part in data.parts]
        self.model = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        self.autocast = autocast

    def round(self, clients: list[int]) -> None:
        total = sum(len(self.parts[client]) for client in clients)
        mean = {name: torch.zeros_like(tensor) for name, tensor in self.model.items()}
        for client in clients:
            part = self.parts[client]
            self.module.load_state_dict(self.model)
            optimizer = torch.optim.SGD(self.module.parameters(), LR, momentum=MOMENTUM)
            for _ in range(EPOCHS):
                order = part[torch.randperm(len(part), device=part.device)]
                for low in range(0, len(order), BATCH):
                    at = order[low : low + BATCH]
                    with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
                        loss = F.cross_entropy(self.module(self.x[at]), self.y[at])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            for name, tensor in self.module.state_dict().items():
                mean[name] += tensor * (len(part) / total)
        torch.cuda.synchronize()
        self.model = mean


def profile(work: Callable[[], object]) -> None:
    """How busy the GPU is in one round, and with what."""
    from torch.profiler import ProfilerActivity

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    spans = sorted((e.time_range.start, e.time_range.end) for e in found.events() if e.device_type.name == "CUDA")
    busy, end = 0.0, 0.0
    for low, high in spans:
        busy, end = busy + max(0.0, high - max(low, end)), max(end, high)
    total = sum(high - low for low, high in spans)
    print(f"wall {wall:.4f} s, busy {busy / 1e6:.4f} s, kernels {len(spans)}, together {total / 1e6:.4f} s")
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=70))


def compare(model: str, options: argparse.Namespace) -> dict[str, object]:
    data = federation(options.data)
    config = Config(
        data=data.name, partition="own", clients=CLIENTS, per_round=PER_ROUND, rounds=1000, eval_every=1000,
        model=model, epochs=EPOCHS, batch_size=BATCH, lr=LR, momentum=MOMENTUM, engine="cuda", device="cuda",
        precision=options.precision, fast=options.fast, channels_last=options.channels_last,
    )  # fmt: skip
    seconds: dict[str, list[float]] = {"loop": [], "fedloom": []}
    with build(config, Own(data=data)).engine_closed() as experiment:
        loop = Loop(model, data, "cuda", options.precision == "bf16")
        warm = options.warm
        for number in range(warm + options.rounds):
            clients = experiment.rounds.parts.server.select(number)
            if number >= warm - 1:
                start = time.perf_counter()
                loop.round(clients)
                seconds["loop"].append(time.perf_counter() - start)
            start = time.perf_counter()
            experiment.rounds.play(number)
            torch.cuda.synchronize()
            seconds["fedloom"].append(time.perf_counter() - start)
        if options.profile:
            profile(lambda: experiment.rounds.play(warm + options.rounds))
        engine = experiment.engine
        assert isinstance(engine, CudaEngine)
        tapes = [slot.tape for slot in engine.slots]
        counts = {name: sum(getattr(t, name) for t in tapes) for name in ("recorded", "replayed", "done")}
    result = {name: round(statistics.median(values[-options.rounds :]), 4) for name, values in seconds.items()}
    first = round(sum(seconds["fedloom"][:warm]), 2)
    memory = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return {**result, "times": round(result["loop"] / result["fedloom"], 2), f"first {warm} rounds": first,
            "GiB": memory, **counts}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole rounds of the CUDA engine against a sequential loop.")
    parser.add_argument("--models", nargs="+", default=["lenet", "cnn"])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--precision", default="tf32", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--channels-last", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=30, help="rounds before, in which steps are recorded")
    parser.add_argument("--profile", action="store_true", help="print what the GPU does in one round")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, object] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__},
        "data": federation(options.data).name,
    }
    seconds: dict[str, object] = {}
    for model in options.models:
        seconds[model] = compare(model, options)
        print(model, seconds[model], flush=True)
    result["seconds a round"] = seconds
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
