"""Clients whose steps keep something where it is not easily seen."""

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

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
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
    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(Scaled(0.1 * (1 + bench.client)))


class InScratch(Client[Options]):
    """What `make` makes is asked for a number at every step."""

    make: Callable[[int], Any]
    ask: Callable[[Any], float]

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        bench.scratch["own"] = type(self).make(bench.client)
        yield LocalSteps(self.step)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(bench, batch, type(self).ask(bench.scratch["own"]))


class FromIterator(InScratch):
    make = staticmethod(lambda client: iter([1 - 0.01 * number for number in range(100)]))
    ask = staticmethod(next)


class FromTorch(InScratch):
    make = staticmethod(lambda client: torch.Generator().manual_seed(client))
    ask = staticmethod(lambda own: -1.0 if float(torch.rand((), generator=own)) < 0.04 else 1.0)


class InSet(Client[Options]):
    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        seen = bench.scratch["seen"] = set[int]()
        yield LocalSteps(self.step, steps=9)
        seen.add(1)
        yield LocalSteps(self.step, steps=9)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(bench, batch, -0.5 if 1 in bench.scratch["seen"] else 1.0)


class Slowing(Client[Options]):
    """Goes on with a smaller learning rate from step to step, by too little for a look at one replay."""

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        bench.lr *= 0.99
        return scaled(bench, batch, 1.0)


class Renewing(Client[Options]):
    """Puts a new tensor where one lies."""

    def uploads(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        return {"count": (1,)}

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        bench.uploads["count"] = bench.uploads["count"] + 1
        return scaled(bench, batch, 1.0)


class Leaving(Client[Options]):
    """Leaves the network bound to another row, where the next step begins."""

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        other = bench.scratch["other"] = bench.buffer("other", bench.layout.size)
        other.copy_(bench.row).mul_(0.5)
        yield LocalSteps(self.step)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        loss = scaled(bench, batch, 1.0)
        bench.bind(bench.scratch["other"])
        return loss
