"""The setting of the CUDA benchmark: 100 clients, and runs with the engine.

It also runs on a CPU, to try it.
"""

import argparse

import torch

from fedloom.config import make_config
from fedloom.core.rng import RngStreams
from fedloom.data import PartitionedDataset, Samples, load_dataset
from fedloom.data.partitions import partition_indices
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.errors import InputError
from fedloom.models.layers import fused_relu
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.resolve import UserObjects, resolve_run

CLIENTS, PER_ROUND, EPOCHS = 100, 10, 5
BATCH, LR, MOMENTUM = 50, 0.01, 0.5


def make_data(options: argparse.Namespace) -> PartitionedDataset:
    """Return 100 clients with the data set, or with random images of the same shape, which take the same time."""
    name, count = options.data, 3000 if options.tiny else 50_000
    try:
        data = load_dataset(name, download=False)
        pool, transform = data.train[:count], data.transform
    except InputError:
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (count, 32, 32, 3), dtype=torch.uint8, generator=draw)
        pool, transform, name = Samples(x, torch.randint(0, 10, (count,), generator=draw)), None, "random images"
    parts = partition_indices(
        "iid" if options.tiny else "dirichlet:0.1", pool.y.numpy(), CLIENTS, RngStreams(0).numpy("partition")
    )
    return PartitionedDataset(pool, parts, classes=10, transform=transform, name=name, test=pool[:10_000])


def build_experiment(
    model: str, precision: str, data: PartitionedDataset, options: argparse.Namespace, seed: int = 0
) -> BuiltRun:
    given = {
        "seed": seed,
        "data": data.name, "partition": "own", "clients": CLIENTS, "clients_per_round": PER_ROUND, "rounds": 10_000,
        "eval_every": 10_000, "model": model, "epochs": 1 if options.tiny else EPOCHS, "batch_size": BATCH, "lr": LR,
        "momentum": MOMENTUM, "engine": usable_engine("cuda", options), "device": options.device, "fast": options.fast,
        "precision": precision if options.device == "cuda" else "fp32",
        "channels_last": options.channels_last,
    }  # fmt: skip
    return with_engine(build_run(resolve_run(make_config(given), UserObjects(data=data))))


def directory_name(model: str, precision: str, options: argparse.Namespace) -> str:
    """Return the name of a result."""
    fused = options.device != "cuda" or (fused_relu.enabled and fused_relu.fused_relu_available(torch.device("cuda:0")))
    asked = {
        "fast": options.fast,
        "channels last": options.channels_last is True,
        "usual order": options.channels_last is False,
        "torch's own pools and norms": not fused,
    }
    return ", ".join([model, precision, *(word for word, wanted in asked.items() if wanted)])


def usable_engine(engine: str, options: argparse.Namespace) -> str:
    """Return the engine to build a run with; on a CPU `with_engine` replaces it later."""
    return engine if options.device == "cuda" else "sequential"


def with_engine(experiment: BuiltRun, engine: str = "cuda") -> BuiltRun:
    """Return the run with the CUDA engine, also on a CPU, where it is only tried."""
    if engine == "cuda" and not isinstance(experiment.engine, CudaEngine):
        experiment.engine.close()
        experiment.engine = experiment.rounds.engine = CudaEngine(experiment.engine.context, "cpu")
    return experiment


def engine_of(experiment: BuiltRun) -> CudaEngine:
    """Return the CUDA engine of a run."""
    assert isinstance(experiment.engine, CudaEngine)
    return experiment.engine
