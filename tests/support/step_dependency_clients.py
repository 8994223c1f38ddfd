"""Clients whose steps keep state in hidden places."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.methods import Client, Options
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.captured_steps import scaled


def now_and_then(count: int) -> float:
    """Every ninth step is another one, which a look at the first replay does not show."""
    return 1.0 if count % 9 else -1.0


class OwnAttribute(Client[Options]):
    """A function made in `train` that counts on the `Local`."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        self.count = 0

        def step(bench: LocalTrainer, batch: Batch) -> Tensor:
            self.count += 1
            return scaled(bench, batch, now_and_then(self.count))

        yield LocalSteps(step)


@dataclass
class Scaled:
    """An object that is a step, and has no hash."""

    factor: float

    def __call__(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(bench, batch, self.factor)


class CallableObject(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(Scaled(0.1 * (1 + trainer.client_id)))


class InScratch(Client[Options]):
    """What `make` makes is asked for a number at every step."""

    make: Callable[[int], Any]
    ask: Callable[[Any], float]

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.scratch["own"] = type(self).make(trainer.client_id)
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(trainer, batch, type(self).ask(trainer.scratch["own"]))


class FromIterator(InScratch):
    make = staticmethod(lambda client: iter([1 - 0.01 * number for number in range(100)]))
    ask = staticmethod(next)


class FromTorch(InScratch):
    make = staticmethod(lambda client: torch.Generator().manual_seed(client))
    ask = staticmethod(lambda own: -1.0 if float(torch.rand((), generator=own)) < 0.04 else 1.0)


class InSet(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        seen = trainer.scratch["seen"] = set[int]()
        yield LocalSteps(self.training_step, steps=9)
        seen.add(1)
        yield LocalSteps(self.training_step, steps=9)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(trainer, batch, -0.5 if 1 in trainer.scratch["seen"] else 1.0)


class Slowing(Client[Options]):
    """Goes on with a smaller learning rate from step to step, by too little for a look at one replay."""

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        trainer.lr *= 0.99
        return scaled(trainer, batch, 1.0)


class Renewing(Client[Options]):
    """Puts a new tensor where one lies."""

    def upload_shapes(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        return {"count": (1,)}

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        trainer.uploads["count"] = trainer.uploads["count"] + 1
        return scaled(trainer, batch, 1.0)


class Leaving(Client[Options]):
    """Leaves the network bound to another row, where the next step begins."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        other = trainer.scratch["other"] = trainer.buffer("other", trainer.layout.size)
        other.copy_(trainer.row).mul_(0.5)
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        loss = scaled(trainer, batch, 1.0)
        trainer.bind(trainer.scratch["other"])
        return loss
