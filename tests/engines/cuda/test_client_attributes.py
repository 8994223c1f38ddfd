"""Tests that concurrent clients do not share attributes of the `Client`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.engines.cuda.slot import copy_slot_context
from fedloom.methods import Client, Options
from fedloom.runs.build import _copy_client
from fedloom.testing.fixtures import build_small_run
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.captured_steps import as_plain, scaled

pytestmark = pytest.mark.usefixtures("fake_graphs")


class OnItself(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        self.factor = 1.0 + trainer.client_id
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(trainer, batch, self.factor)


class InADict(Client[Options]):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.factors = dict[str, float]()

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        self.factors["factor"] = 1.0 + trainer.client_id
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(trainer, batch, self.factors["factor"])


class Chosen(OnItself):
    """Holds a method of its own."""

    factor = 1.0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.chosen = self.training_step

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        for _ in super().train(trainer):
            yield LocalSteps(self.chosen)


class Taught(Client[Options]):
    """Holds a network that is another one for each client."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.teacher = nn.Linear(64, 10)

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        with torch.no_grad():
            self.teacher.weight.fill_(0.01 * trainer.client_id)
            self.teacher.bias.copy_(torch.arange(10) * trainer.client_id)
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch.x.flatten(1)).softmax(1)
        loss = F.cross_entropy(trainer.module(batch.x), wanted)
        trainer.backward(loss)
        trainer.optimizer_step()
        return loss


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("local", [OnItself, InADict, Chosen, Taught])
def test_what_a_local_keeps_is_not_anothers(local: type[Client[Options]], slots: int) -> None:
    as_plain(local, slots=slots)


def test_what_all_parts_have_in_common_is_not_copied() -> None:
    with build_small_run("fedavg", {}, engine="sequential").engine_closed() as plain:
        local = Taught(plain.rounds.context, Options())
        local.initial = plain.rounds.context.initial
        other: Any = _copy_client(local)
        assert (other.context, other.options) == (local.context, local.options)
        assert other.initial is local.initial
        assert other.teacher is not local.teacher


def test_a_local_with_something_unique_is_shared() -> None:
    with build_small_run("fedavg", {}, engine="sequential").engine_closed() as plain:
        local = Client(plain.rounds.context, Options())
        local.running = (number for number in range(3))
        assert _copy_client(local) is local


class InPlace(nn.Module):
    """Changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.ones(64)), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        x *= self.scale
        y: Tensor = self.out(x)
        return y


def test_a_network_may_change_its_batch() -> None:
    tape = as_plain(Client, model=InPlace, batch_size=0).slots[0].graph_runner
    assert tape.replayed > 0


@pytest.mark.parametrize(
    ("make", "shared"), [(lambda: nn.Linear(8, 8), True), (lambda: nn.LSTM(8, 4), False), (lambda: nn.GRU(8, 4), False)]
)
def test_frozen_weights_are_shared_where_they_stay(make: Callable[[], nn.Module], shared: bool) -> None:
    """Recurrent layers move theirs on a GPU, away from under the recordings of others."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.out = make().requires_grad_(False), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.out(x.flatten(1))
            return y

    with build_small_run("fedavg", {}, engine="sequential", model=Network).engine_closed() as plain:
        shop = plain.engine.context
        ours, theirs = dict(shop.model.named_parameters()), dict(copy_slot_context(shop).model.named_parameters())
        for name, weight in ours.items():
            assert (theirs[name] is weight) is (shared and "frozen" in name)
