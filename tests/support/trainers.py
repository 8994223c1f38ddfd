"""A small trainer with numbered samples, one initial model and plain steps."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.config import TrainingConfig
from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.core.tasks import ClientTask, TaskMemory
from fedloom.data import Augment, FederatedDataset, InputTransform, Samples
from fedloom.training.batches import Batch
from fedloom.training.context import ClientProgram, Numerics, TrainingContext
from fedloom.training.trainer import LocalSteps, LocalTrainer


class NoSamples(FederatedDataset):
    """What a trainer knows of the data, without any."""

    shape = (3,)

    def __init__(self, classes: int) -> None:
        self.classes, self.test, self.transform = classes, None, InputTransform.identity()

    def __len__(self) -> int:
        return 1

    def client_samples(self, client_id: int) -> Samples:
        raise AssertionError("the test gives the samples")


def plain_training(trainer: LocalTrainer) -> Iterator[LocalSteps]:
    yield LocalSteps(sgd)


def context_of(
    module: nn.Module, config: TrainingConfig, *, classes: int = 2, seed: int = 0, augment: Augment | None = None
) -> TrainingContext:
    return TrainingContext(
        model=module,
        layout=Layout.of(module),
        criterion=F.cross_entropy,
        config=config,
        rng_streams=RngStreams(seed),
        data=NoSamples(classes),
        client=ClientProgram(plain_training),
        numerics=Numerics(augment=augment),
    )


def numbered(count: int, features: int = 3) -> Samples:
    """Samples whose first feature is their number."""
    x = torch.arange(count, dtype=torch.float32).view(-1, 1).repeat(1, features)
    return Samples(x, torch.arange(count) % 2)


def make_bench(
    module: nn.Module | None = None, *, seed: int = 0, augment: Augment | None = None, **options: Any
) -> LocalTrainer:
    torch.manual_seed(0)
    module = module or nn.Linear(3, 2)
    return LocalTrainer(context_of(module, TrainingConfig(**options), seed=seed, augment=augment))


def begin(bench: LocalTrainer, samples: Samples, round: int = 0, client: int = 0) -> LocalTrainer:
    """Lay out a client's work, always from the same model."""
    start = bench.layout.empty()
    start[: bench.layout.trainable] = torch.linspace(-0.5, 0.5, bench.layout.trainable)
    start[bench.layout.trainable : bench.layout.floats] = 1.0
    bench.start_task(ClientTask(client, start, round=round), TaskMemory(bench.layout.empty()), samples)
    return bench


def sgd(bench: LocalTrainer, batch: Batch) -> Tensor:
    loss = bench.loss(batch)
    bench.backward(loss)
    bench.optimizer_step()
    return loss


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Counting(nn.Module):
    """Counts its steps in a buffer, which is in its output; `seen` is what it last counted, as part of its state."""

    def __init__(self, write: str, persistent: bool, features: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.dense = nn.Linear(features, classes)
        self.write = write
        self.count: Tensor
        self.seen: Tensor
        self.register_buffer("count", torch.zeros(1), persistent=persistent)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.write == "in place":
            self.count += 1
            self.seen.copy_(self.count)
        elif self.training:
            self.count = self.count + 1
            self.seen = self.count.clone()
        y: Tensor = self.dense(x.flatten(1))
        return y * (1 + 0.01 * self.count)
