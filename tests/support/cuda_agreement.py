"""The CUDA engine against a plain sequential PyTorch loop.

Both have the same clients, batches and initial models.

Rounding grows in some networks. Where a ReLU or a maximum is undecided in the last bit, the gradient jumps, and norms
pass the jump on: ResNet-20 and ConvNet, moved in the last bits, are elsewhere after a few steps, the others are not
(`python -m benchmarks cuda agreement` says how far). That is the function and not its kernels: in float64 a start moved
by as much goes astray as far. So in float32 two trainings stay together only if every kernel gives the same bits, which
is asked for with deterministic kernels on one device; and in float64, where rounding is too small to tip anything, they
must agree whatever the kernels.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.config import make_config
from fedloom.core.rng import RngStreams
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.data import InputTransform, PartitionedDataset, Samples
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.models import build_model
from fedloom.models.layers.norms import BatchNorm2d
from fedloom.models.layers.pooling import AvgPool2x2, MaxPool2x2, PooledConv2d
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.resolve import UserObjects, resolve_run
from tests.support.task_rounds import in_round

SIZES = (95, 70, 46, 33)
BATCH, LR, MOMENTUM = 20, 0.01, 0.5
NETWORKS = ("lenet", "cnn", "convnet", "resnet20", "vgg16", "lstm-shakespeare")


def to_double(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


def in_double(module: nn.Module) -> nn.Module:
    """The module with numbers of 64 bits, whatever its inputs have."""
    module.double().register_forward_pre_hook(to_double)
    return module


def federation(model: str) -> PartitionedDataset:
    """Four clients of different sizes: noise around an image for each class, or rows of characters."""
    count, draw = sum(SIZES), torch.Generator().manual_seed(3)
    y = torch.arange(count) % 10
    if model.startswith("lstm"):
        x = torch.randint(0, 80, (count, 20), generator=draw)
        y = x[:, -1] % 10
        given: dict[str, Any] = {"transform": InputTransform.identity(), "vocabulary_size": 80}
    else:
        patterns = torch.randint(40, 216, (10, 8, 8, 3), generator=draw).repeat_interleave(4, 1).repeat_interleave(4, 2)
        x = (patterns[y] + torch.randint(-40, 40, (count, 32, 32, 3), generator=draw)).to(torch.uint8)
        given = {"transform": InputTransform((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))}
    ends = np.cumsum(SIZES)
    parts = [np.arange(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    return PartitionedDataset(Samples(x, y), parts, classes=10, test=Samples(x[:50], y[:50]), name="made up", **given)


def experiment_of(model: str, device: str, double: bool, **settings: Any) -> BuiltRun:
    """FedAvg with this network, at the sequential engine on this device."""
    data = federation(model)

    def make() -> nn.Module:
        module = build_model(model, data.shape, 10, 80 if model.startswith("lstm") else 0)
        return in_double(module) if double else module

    values = {
        "data": "made up", "partition": "own", "model": model, "clients": len(SIZES), "clients_per_round": len(SIZES),
        "epochs": 1, "batch_size": BATCH, "lr": LR, "momentum": MOMENTUM, "engine": "sequential", "device": device,
        "precision": "fp32", "channels_last": False,
    }  # fmt: skip
    return build_run(resolve_run(make_config(values | settings), UserObjects(data, make)))


def jobs_of(experiment: BuiltRun) -> list[ClientTask]:
    return list(experiment.rounds.parts.server.dispatch(0, list(range(len(SIZES)))))


def trained(engine: Any, jobs: list[ClientTask]) -> list[Tensor]:
    """The clients' models after one round."""
    rows = []
    for answer in engine.train(in_round(0, jobs)):
        assert isinstance(answer, ClientUpdate), answer
        rows.append(answer.row.clone())
    return rows


def trained_at_once(
    experiment: BuiltRun, jobs: list[ClientTask], device: str, slots: int = 0
) -> tuple[list[Tensor], int]:
    """The same by the CUDA engine, the second time that it trains these clients, and the steps that it replayed."""
    with CudaEngine(experiment.engine.context, device, slots) as engine:
        trained(engine, jobs)
        rows = trained(engine, jobs)
        return rows, sum(slot.graph_runner.replayed for slot in engine.slots)


class ConvThenPool(nn.Conv2d):
    """The two as torch has them."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(super().forward(x), 2)


TORCHS = {
    PooledConv2d: ConvThenPool, MaxPool2x2: nn.MaxPool2d, AvgPool2x2: nn.AvgPool2d, BatchNorm2d: nn.BatchNorm2d
}  # fmt: skip
"""Layers of ours, and what others would use in their places."""


def with_torchs_layers(module: nn.Module) -> nn.Module:
    """A network as anyone would write it, with the same names."""
    for layer in module.modules():
        layer.__class__ = TORCHS.get(type(layer), type(layer))
    return module


def trained_by_a_loop(experiment: BuiltRun, jobs: list[ClientTask], device: str) -> list[Tensor]:
    """The same as anyone would write it: a module, torch.optim, one client after the other."""
    shop, rows = experiment.engine.context, []
    module = with_torchs_layers(experiment.rounds.context.make_model().to(device))
    for job in jobs:
        samples = experiment.data.federated_data.client_samples(job.client_id)
        x, y = shop.data.transform(samples.x.to(device)), samples.y.to(device)
        module.load_state_dict(experiment.layout.state_dict(job.row))
        module.train()
        optimizer = torch.optim.SGD(module.parameters(), LR, momentum=MOMENTUM)
        order = torch.from_numpy(RngStreams(0).numpy("batches", 0, job.client_id).permutation(len(x))).to(device)
        with RngStreams(0).seed_global_rng("noise", 0, job.client_id, device):  # the seed of dropout
            for low in range(0, len(x), BATCH):
                at = order[low : low + BATCH]
                optimizer.zero_grad()
                F.cross_entropy(module(x[at]), y[at]).backward()
                optimizer.step()
        rows.append(experiment.layout.read(module, device))
    return rows


def apart(ours: list[Tensor], theirs: list[Tensor], floats: int) -> float:
    """How far models are from each other, as a share of their size: the largest over the clients."""
    pairs = [(a[:floats].double(), b[:floats].double()) for a, b in zip(ours, theirs, strict=True)]
    return max(float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b)) for a, b in pairs)
