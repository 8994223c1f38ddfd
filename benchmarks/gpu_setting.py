"""The setting of benchmarks/gpu.py: 100 clients, and experiments with the CUDA engine, on a CPU to try it out."""

import argparse

import torch
from gpu_profile import BATCH, LR, MOMENTUM

from fedloom.config import make_config
from fedloom.core.rng import RngStreams
from fedloom.data import PartitionedDataset, Samples, load_dataset
from fedloom.data.partitions import partition_indices
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.errors import InputError
from fedloom.models.layers import fused_relu
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.resolve import UserObjects

CLIENTS, PER_ROUND, EPOCHS = 100, 10, 5


def federation(options: argparse.Namespace) -> PartitionedDataset:
    """100 clients; where the data set is not at hand, random images of the same shape take the same time."""
    name, count = options.data, 3000 if options.tiny else 50_000
    try:
        data = load_dataset(name, download=False)
        pool, prepare = data.train[:count], data.prepare
    except InputError:
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=draw)
        pool, prepare, name = Samples(x, torch.randint(0, 10, (count,), generator=draw)), None, "made up"
    parts = partition_indices(
        "iid" if options.tiny else "dirichlet:0.1", pool.y.numpy(), CLIENTS, RngStreams(0).numpy("partition")
    )
    return PartitionedDataset(pool, parts, classes=10, prepare=prepare, name=name, test=pool[:10_000])


def experiment_of(
    model: str, precision: str, data: PartitionedDataset, options: argparse.Namespace, seed: int = 0
) -> BuiltRun:
    given = {
        "seed": seed,
        "data": data.name, "partition": "own", "clients": CLIENTS, "per_round": PER_ROUND, "rounds": 10_000,
        "eval_every": 10_000, "model": model, "epochs": 1 if options.tiny else EPOCHS, "batch_size": BATCH, "lr": LR,
        "momentum": MOMENTUM, "engine": usable("cuda", options), "device": options.device, "fast": options.fast,
        "precision": precision if options.device == "cuda" else "fp32",
        "channels_last": options.channels_last,
    }  # fmt: skip
    return started(build_run(make_config(given), UserObjects(data=data)))


def name_of(model: str, precision: str, options: argparse.Namespace) -> str:
    """What a line of the sheet is called."""
    fused = options.device != "cuda" or (
        fused_relu.enabled and fused_relu.fused_kernels_available(torch.device("cuda:0"))
    )
    asked = {
        "fast": options.fast,
        "channels last": options.channels_last is True,
        "usual order": options.channels_last is False,
        "torch's own pools and norms": not fused,
    }
    return ", ".join([model, precision, *(word for word, wanted in asked.items() if wanted)])


def usable(engine: str, options: argparse.Namespace) -> str:
    """On the CPU the plain engine first takes the place of the other."""
    return engine if options.device == "cuda" else "plain"


def started(experiment: BuiltRun, engine: str = "cuda") -> BuiltRun:
    """The experiment with the CUDA engine also where that is only tried out, on the CPU."""
    if engine == "cuda" and not isinstance(experiment.engine, CudaEngine):
        experiment.engine.close()
        experiment.engine = experiment.rounds.engine = CudaEngine(experiment.engine.shop, "cpu")
    return experiment


def engine_of(experiment: BuiltRun) -> CudaEngine:
    assert isinstance(experiment.engine, CudaEngine)
    return experiment.engine
