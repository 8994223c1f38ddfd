"""Clients whose steps have memory: other networks, buffers, optimizers."""

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

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.scratch["teacher"] = copy.deepcopy(trainer.module).requires_grad_(False)
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        teacher = trainer.scratch["teacher"]
        with torch.no_grad():
            for slow, quick in zip(teacher.parameters(), trainer.module.parameters(), strict=True):
                slow.lerp_(quick, 0.3)
        loss = trainer.loss(batch) + (trainer.module(batch.x) - teacher(batch.x)).square().mean()
        trainer.backward(loss)
        trainer.optimizer_step()
        return loss


class OwnOptimizers(Client[Options]):
    """Two of them, one after the other in each step."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.scratch["optimizers"] = [SGD(0.9), SGD(0.5)]
        for optimizer in trainer.scratch["optimizers"]:
            optimizer.allocate_state(trainer.weights)
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        for optimizer in trainer.scratch["optimizers"]:
            loss = trainer.loss(batch)
            trainer.backward(loss)
            optimizer.step(trainer.weights, trainer.gradient, 0.03)
        return loss


class OneEnclosed(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        optimizer = SGD(0.9)
        optimizer.allocate_state(trainer.weights)

        def step(bench: LocalTrainer, batch: Batch) -> Tensor:
            loss = bench.loss(batch)
            bench.backward(loss)
            optimizer.step(bench.weights, bench.gradient, 0.03)
            return loss

        yield LocalSteps(step)


class Buffered(Client[Options]):
    """Asks for its velocity in each step, one for batches of each size: zeros at first, and then what it left there."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer._buffers.clear()  # what it holds at first is nobody's business, but this step's
        yield LocalSteps(self.training_step)

    def velocity(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        return bench.buffer(f"velocity {len(batch)}", bench.layout.trainable)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        loss = trainer.loss(batch)
        trainer.backward(loss)
        trainer.gradient.copy_(self.velocity(trainer, batch).mul_(0.9).add_(trainer.gradient))
        trainer.optimizer_step()
        return loss


class Reshaped(Buffered):
    """The same with one name: what was there makes way for another, and its memory for anything."""

    def velocity(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        return bench.buffer("velocity", len(batch), bench.layout.trainable)[0]


class Moving(Client[Options]):
    """Its step asks for a buffer, which lies elsewhere for some clients."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.buffer("weights", 3 + trainer.client_id % 2, trainer.layout.trainable).fill_(
            0.1 * (1 + trainer.client_id)
        )
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        loss = trainer.loss(batch)
        trainer.backward(loss)
        (name,) = trainer._buffers
        trainer.gradient.mul_(trainer.buffer(name, *trainer._buffers[name].shape)[0])
        trainer.optimizer_step()
        return loss


class InTurn(Client[Options]):
    """Two optimisers from the bench, which take turns and know nothing of each other."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        first = trainer.optimizer
        trainer.new_optimizer()
        second = trainer.optimizer
        for _ in range(3):
            for trainer.optimizer in (first, second):
                yield LocalSteps(self.training_step, steps=3)


class Anew(Client[Options]):
    """Begins anew, and needs the old one no longer."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        for _ in range(6):
            trainer.new_optimizer()
            yield LocalSteps(self.training_step, steps=3)
