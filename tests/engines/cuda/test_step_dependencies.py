"""Tests of steps with hidden state: replayed or not, they compute the same."""

import gc
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.engines.cuda.graph_key import build_graph_key
from fedloom.methods import Client, Options
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.captured_steps import as_plain, scaled
from tests.support.fake_graphs import FakeGraphTape
from tests.support.step_dependency_clients import (
    CallableObject,
    FromIterator,
    FromTorch,
    InScratch,
    InSet,
    Leaving,
    OwnAttribute,
    Renewing,
    Slowing,
    now_and_then,
)

pytestmark = pytest.mark.usefixtures("fake_graphs")


class InnerFunction(Client[Options]):
    """The number is two functions away."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        count = 0

        def factor() -> float:
            nonlocal count
            count += 1
            return now_and_then(count)

        def step(bench: LocalTrainer, batch: Batch) -> Tensor:
            return scaled(bench, batch, factor())

        yield LocalSteps(step)


class GivenArgument(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(partial(self.counting, counter={"count": 0}))

    def counting(self, bench: LocalTrainer, batch: Batch, counter: dict[str, int]) -> Tensor:
        counter["count"] += 1
        return scaled(bench, batch, now_and_then(counter["count"]))


class GivenNumber(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(partial(scaled, factor=0.1 * (1 + trainer.client_id)))


class Slotted:
    """An object without a dict."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> float:
        self.count += 1
        return now_and_then(self.count)


class FromSlots(InScratch):
    make = staticmethod(lambda client: Slotted())
    ask = staticmethod(lambda own: own.next())


class FromQueue(InScratch):
    make = staticmethod(lambda client: deque([1.0] * 8 + [-1.0]))

    @staticmethod
    def ask(own: deque[float]) -> float:
        own.rotate(-1)
        return own[-1]


HIDDEN = (
    OwnAttribute, InnerFunction, GivenArgument, GivenNumber, CallableObject, FromSlots, FromIterator, FromTorch,
    FromQueue, InSet,
)  # fmt: skip


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("local", HIDDEN)
def test_what_a_step_keeps_on_the_host_is_seen(local: type[Client[Options]], slots: int) -> None:
    """And is the client's own: others train meanwhile."""
    as_plain(local, slots=slots)


class Masked(nn.Module):
    """Has a tensor that is no buffer, numbers in a dict, and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10)
        self.mask: Any = torch.ones(10)
        self.numbers = {"factor": 1.0}
        self.draw: Any = None

    def forward(self, x: Tensor) -> Tensor:
        scale = -0.5 if self.draw is not None and self.draw.random() < 0.04 else 1.0
        y: Tensor = self.out(x.flatten(1)) * self.mask * self.numbers["factor"] * scale
        return y


class Masking(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        mask = torch.ones(10)
        mask[trainer.client_id] = 0.3
        trainer.module.mask = mask
        yield LocalSteps(self.training_step)


class Numbering(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.module.numbers["factor"] = 1 + 0.3 * trainer.client_id  # type: ignore[index, operator]
        yield LocalSteps(self.training_step)


class Lending(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.module.draw = random.Random(trainer.client_id)  # type: ignore[assignment]
        yield LocalSteps(self.training_step)


@pytest.mark.parametrize("local", [Masking, Numbering, Lending])
def test_what_a_network_has_beside_weights_and_buffers_is_seen(local: type[Client[Options]]) -> None:
    as_plain(local, model=Masked)


def test_a_step_that_is_made_for_each_client_is_not_kept() -> None:
    """It may hold another network, and there may be thousands of clients."""
    made = list[weakref.ref[Any]]()

    class Enclosing(Client[Options]):
        def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
            other = nn.Linear(2, 2)
            made.append(weakref.ref(other))

            def step(bench: LocalTrainer, batch: Batch) -> Tensor:
                return scaled(bench, batch, 1.0 if other.bias is not None else 0.5)

            yield LocalSteps(step)

    engine = as_plain(Enclosing)
    gc.collect()
    assert engine.slots
    assert sum(one() is not None for one in made) <= 2, "the last of each engine"


@pytest.mark.parametrize("local", [Slowing, Renewing, Leaving])
def test_a_step_that_changes_what_lies_on_the_bench_is_done_as_it_is_written(local: type[Client[Options]]) -> None:
    as_plain(local)


class Positions(nn.Module):
    """Makes a table when it is first trained, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.tables = nn.Linear(64, 10), dict[bool, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training not in self.tables:
            self.tables[self.training] = torch.arange(64).cos()
        y: Tensor = self.out(x.flatten(1) * self.tables[self.training])
        return y


def test_what_a_step_makes_the_first_time_it_has_from_then_on() -> None:
    tape = as_plain(Client, model=Positions).slots[0].graph_runner
    assert tape.replayed > tape.captured > 0


class Fading(Client[Options]):
    """A number for each client and round: there is no end to recordings."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.scratch["factor"] = 0.9 ** (10 * trainer.round + trainer.client_id)
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(trainer, batch, trainer.scratch["factor"])


def test_what_steps_depended_on_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.engines.cuda.slot.MAX_GRAPHS", 3)
    (slot,) = as_plain(Fading).slots
    assert len(slot._tokens) == 3
    assert slot.graph_runner.replayed > slot.graph_runner.captured > 3


class Odd(nn.Module):
    """A network with something that is hard to look at."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.out, self.odd = nn.Linear(64, 10), make()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x.flatten(1))
        return y


class Graph(Odd):
    """Takes its inputs through a sparse matrix."""

    def __init__(self) -> None:
        super().__init__(lambda: (2 * torch.eye(64)).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sparse.mm(self.odd, x.flatten(1).T).T)


class Answering:
    """Has a slot that is empty, and says so in its own way."""

    __slots__ = ("empty",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __deepcopy__(self, memo: Any) -> "Answering":
        return self


def in_circles() -> dict[str, Any]:
    held: dict[str, Any] = {"items": []}
    held["items"].append(held)
    return held


def without_gradients() -> Tensor:
    with torch.inference_mode():
        return torch.ones(10)


ODD: dict[str, Callable[[], Any]] = {
    "holds itself": in_circles, "empty": Answering, "spread": lambda: torch.ones(1).expand(10),
    "meta": lambda: torch.empty(3, device="meta"), "inference": without_gradients,
    "sparse": lambda: torch.eye(3).to_sparse(),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_whatever_a_network_or_a_local_holds_clients_train(odd: str) -> None:
    """They were lost for it, or no step was recorded."""

    class Holding(Client[Options]):
        def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
            vars(self).setdefault("odd", ODD[odd]())
            yield LocalSteps(self.training_step)

    for tape in (
        as_plain(Client, model=partial(Odd, ODD[odd])).slots[0].graph_runner,
        as_plain(Holding).slots[0].graph_runner,
    ):
        assert tape.replayed > tape.captured > 0


def test_a_network_with_a_sparse_matrix_is_recorded() -> None:
    tape = as_plain(Client, model=Graph).slots[0].graph_runner
    assert tape.replayed > tape.captured > 0


def test_steps_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie at the same few addresses, so each look for a step was slower by all that had ever been there."""
    monkeypatch.setattr("fedloom.devices.cuda_graphs.MAX_GRAPHS", 4)

    class Enclosing(Client[Options]):
        def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
            def step(bench: LocalTrainer, batch: Batch) -> Tensor:
                return scaled(bench, batch, 1.0)

            yield LocalSteps(step)

    (slot,) = as_plain(Enclosing).slots
    assert isinstance(slot.graph_runner, FakeGraphTape)
    assert slot.graph_runner.captured >= 18, "a recording for each client and round"
    assert all(len(kinds) <= 4 for kinds in (slot.graph_runner._warm, slot.graph_runner._checked, slot._kinds_begun))


def test_large_arrays_are_seen_but_not_kept() -> None:
    array = np.zeros(1_000_000)
    before = build_graph_key({"array": array})
    assert build_graph_key({"array": array}) == before
    assert len(repr(before)) < 1000
    array[-1] = 1
    assert build_graph_key({"array": array}) != before
