"""Memory of one's own in steps: other networks, buffers, optimisers; replayed or not, they do what is written."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from test_recordings import as_plain, recordings, scaled  # noqa: F401 - one of them is a fixture
from torch import Tensor

from benches import Counting
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.engines.sequential import SequentialEngine
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


@pytest.mark.parametrize("local", [Teaching, OwnOptimizers, OneEnclosed])
def test_a_replay_that_is_looked_at_is_taken_back_wherever_it_has_written(local: type[Client[Options]]) -> None:
    """Or the step would have been done twice there."""
    (slot,) = as_plain(local).slots
    assert slot.tape.replayed > slot.tape.recorded > 0


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


@pytest.mark.parametrize("local", [Buffered, Reshaped])
def test_a_step_that_makes_buffers_is_done_as_it_is_written(local: type[Client[Options]]) -> None:
    as_plain(local)


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


def test_where_a_buffer_lies_is_part_of_what_is_recorded() -> None:
    (slot,) = as_plain(Moving).slots
    assert slot.tape.replayed > slot.tape.recorded > 0


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


@pytest.mark.parametrize("way", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.001}])
@pytest.mark.parametrize("local", [InTurn, Anew])
def test_a_new_optimiser_leaves_the_old_one_to_who_holds_it(local: type[Client[Options]], way: dict[str, Any]) -> None:
    (slot,) = as_plain(local, **way).slots
    assert slot.tape.replayed > slot.tape.recorded > 0
    if local is Anew:
        assert slot.tape.recorded <= 4, "it lies where the old one lay"


class Between(Client[Options]):
    """Asks for a loss between its passes and after them, in the mode of training."""

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        for _ in range(2):
            yield LocalSteps(self.step, steps=5)
            bench.loss(Batch(torch.ones(2, 64), torch.arange(2)))


@pytest.mark.parametrize("write", ["in place", "anew"])
@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_that_are_written_between_passes_are_the_clients_own(write: str, persistent: bool) -> None:
    """Every client counts its ten steps and the two losses, and no other's."""
    engine = as_plain(Between, model=partial(Counting, write, persistent))
    assert sum(slot.tape.replayed for slot in engine.slots) > 0
    for one in (CudaEngine(engine.shop, "cpu", 1), SequentialEngine(engine.shop)):
        layout = engine.shop.workshop.layout
        start = torch.zeros(layout.size)
        for update in one.train(0, [ClientTask(client, start) for client in (3, 4)]):
            assert isinstance(update, ClientUpdate)
            (seen,) = (entry for entry in layout.entries if "seen" in entry.names)
            assert seen.view(update.row).item() == 12.0
