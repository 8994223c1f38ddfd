"""Clients that train at once do not meet on the `Local`, whatever it keeps against its contract."""

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
    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        self.factor = 1.0 + bench.client
        yield LocalSteps(self.step)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(bench, batch, self.factor)


class InADict(Client[Options]):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kept = dict[str, float]()

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        self.kept["factor"] = 1.0 + bench.client
        yield LocalSteps(self.step)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(bench, batch, self.kept["factor"])


class Chosen(OnItself):
    """Holds a method of its own."""

    factor = 1.0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.chosen = self.step

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        for _ in super().train(bench):
            yield LocalSteps(self.chosen)


class Taught(Client[Options]):
    """Holds a network that is another one for each client."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.teacher = nn.Linear(64, 10)

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        with torch.no_grad():
            self.teacher.weight.fill_(0.01 * bench.client)
            self.teacher.bias.copy_(torch.arange(10) * bench.client)
        yield LocalSteps(self.step)

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch.x.flatten(1)).softmax(1)
        loss = F.cross_entropy(bench.module(batch.x), wanted)
        bench.backward(loss)
        bench.descend()
        return loss


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("local", [OnItself, InADict, Chosen, Taught])
def test_what_a_local_keeps_is_not_anothers(local: type[Client[Options]], slots: int) -> None:
    as_plain(local, slots=slots)


def test_what_all_parts_have_in_common_is_not_copied() -> None:
    with build_small_run("fedavg", {}, engine="plain").engine_closed() as plain:
        local = Taught(plain.rounds.context, Options())
        local.initial = plain.rounds.context.initial
        other: Any = _copy_client(local)
        assert (other.context, other.options) == (local.context, local.options)
        assert other.initial is local.initial
        assert other.teacher is not local.teacher


def test_a_local_with_something_unique_is_shared() -> None:
    with build_small_run("fedavg", {}, engine="plain").engine_closed() as plain:
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
    tape = as_plain(Client, model=InPlace, batch_size=0).slots[0].tape
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

    with build_small_run("fedavg", {}, engine="plain", model=Network).engine_closed() as plain:
        shop = plain.engine.shop.workshop
        ours, theirs = dict(shop.module.named_parameters()), dict(copy_slot_context(shop).module.named_parameters())
        for name, weight in ours.items():
            assert (theirs[name] is weight) is (shared and "frozen" in name)
