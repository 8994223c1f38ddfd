"""Clients whose steps have memory of their own: other networks, buffers, optimisers."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from fedloom.methods import Client, Options
from fedloom.training.batches import Batch
from fedloom.training.optimizers import SGD
from fedloom.training.trainer import LocalSteps, LocalTrainer


class Teaching(Client[Options]):
    """Learns from a network that follows its own."""

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        bench.scratch["teacher"] = copy.deepcopy(bench.module).requires_grad_(False)
        yield LocalSteps(self.step)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        teacher = bench.scratch["teacher"]
        with torch.no_grad():
            for slow, quick in zip(teacher.parameters(), bench.module.parameters(), strict=True):
                slow.lerp_(quick, 0.3)
        loss = bench.loss(batch) + (bench.module(batch.x) - teacher(batch.x)).square().mean()
        bench.backward(loss)
        bench.descend()
        return loss


class OwnOptimizers(Client[Options]):
    """Two of them, one after the other in each step."""

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        bench.scratch["optimizers"] = [SGD(0.9), SGD(0.5)]
        for optimizer in bench.scratch["optimizers"]:
            optimizer.settle(bench.weights)
        yield LocalSteps(self.step)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        for optimizer in bench.scratch["optimizers"]:
            loss = bench.loss(batch)
            bench.backward(loss)
            optimizer.step(bench.weights, bench.gradient, 0.03)
        return loss


class OneEnclosed(Client[Options]):
    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        optimizer = SGD(0.9)
        optimizer.settle(bench.weights)

        def step(bench: LocalTrainer, batch: Batch) -> Tensor:
            loss = bench.loss(batch)
            bench.backward(loss)
            optimizer.step(bench.weights, bench.gradient, 0.03)
            return loss

        yield LocalSteps(step)


class Buffered(Client[Options]):
    """Asks for its velocity in each step, one for batches of each size: zeros at first, and then what it left there."""

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        bench._buffers.clear()  # what it holds at first is nobody's business, but this step's
        yield LocalSteps(self.step)

    def velocity(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        return bench.buffer(f"velocity {len(batch)}", bench.layout.trainable)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        loss = bench.loss(batch)
        bench.backward(loss)
        bench.gradient.copy_(self.velocity(bench, batch).mul_(0.9).add_(bench.gradient))
        bench.descend()
        return loss


class Reshaped(Buffered):
    """The same with one name: what was there makes way for another, and its memory for anything."""

    def velocity(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        return bench.buffer("velocity", len(batch), bench.layout.trainable)[0]


class Moving(Client[Options]):
    """Its step asks for a buffer, which lies elsewhere for some clients."""

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        bench.buffer("weights", 3 + bench.client % 2, bench.layout.trainable).fill_(0.1 * (1 + bench.client))
        yield LocalSteps(self.step)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        loss = bench.loss(batch)
        bench.backward(loss)
        (name,) = bench._buffers
        bench.gradient.mul_(bench.buffer(name, *bench._buffers[name].shape)[0])
        bench.descend()
        return loss


class InTurn(Client[Options]):
    """Two optimisers from the bench, which take turns and know nothing of each other."""

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        first = bench.optimizer
        bench.new_optimizer()
        second = bench.optimizer
        for _ in range(3):
            for bench.optimizer in (first, second):
                yield LocalSteps(self.step, steps=3)


class Anew(Client[Options]):
    """Begins anew, and needs the old one no longer."""

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        for _ in range(6):
            bench.new_optimizer()
            yield LocalSteps(self.step, steps=3)
