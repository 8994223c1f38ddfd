"""Tests of the state of a method's parts in checkpoints."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom import AveragingServer, Options
from fedloom.errors import InputError
from fedloom.methods import methods
from fedloom.methods.base import MethodContext
from fedloom.methods.registry import BUILT_IN
from fedloom.testing.fixtures import build_small_run
from fedloom.utils.storage import join_stored_tensors, split_stored_tensors

STATE: dict[str, dict[str, str]] = {
    "clusamp": {"server": "G bank distances"},
    "dynafed": {"refiner": "images logits losses rate seen trajectory"},
    "fedadagrad": {"server": "bank m v"},
    "fedadam": {"server": "bank m v"},
    "fedasam-swa": {"server": "averaged bank pending"},
    "fedavgm": {"server": "bank m"},
    "fedcda": {"server": "bank cache chosen store total"},
    "feddyn": {"server": "bank h"},
    "fedexp": {"server": "aggregations bank"},
    "fedfomo": {"server": "P bank sent"},
    "fedgen": {"extras": "mean row square steps"},
    "fedma-layers": {
        "server": "bank client_ids client_models counts done held own places popular weights whole",
    },
    "fedmix": {"extras": "owners x y"},
    "fedyogi": {"server": "bank m v"},
    "local": {"server": ""},
    "naivemix": {"extras": "owners x y"},
    "scaffold": {"extras": "c"},
}
"""Keys of a checkpoint by method and part. Another name would make old checkpoints unreadable."""


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_the_keys_of_a_checkpoint_stay(name: str) -> None:
    with build_small_run(name, {}).engine_closed() as built_run:
        found = {part: " ".join(sorted(each.state_dict())) for part, each in built_run.rounds.parts.items()}
    expected = dict.fromkeys(methods()[name].parts, "") | {"server": "bank", "client": ""} | STATE.get(name, {})
    assert found == expected


class EverythingServer(AveragingServer[Options]):
    """Keeps a value of every kind."""

    def start(self) -> None:
        self.vector, self.array = self.zeros(), np.zeros(3)
        self.number, self.word, self.nothing = 1, "a", None
        self.seen: dict[int, list[tuple[int, float]]] = {}
        self.history: list[Tensor] = []
        self.banks = [self.context.bank(1), self.context.bank(2)]
        self._cache = object()


@pytest.fixture
def context() -> MethodContext:
    with build_small_run("fedavg", {}).engine_closed() as built_run:
        return built_run.rounds.context


def test_everything_in_start_comes_back_without_being_listed(context: MethodContext) -> None:
    server = EverythingServer(context, Options())
    server.vector += 1
    server.array[1], server.number, server.word, server.nothing = 5, 2, "b", 0.5
    server.seen[3] = [(1, 2.0)]
    server.history = [torch.ones(2), torch.zeros(1)]
    server.banks[1].rows[1] = 7
    server.later = np.int64(4)
    stored = join_stored_tensors(*split_stored_tensors(server.state_dict()))
    other = EverythingServer(context, Options())
    vector, bank = other.vector, other.banks[1]
    other.load_state_dict(stored)
    assert other.vector is vector, "filled in place"
    assert other.banks[1] is bank
    assert other.seen == {3: [[1, 2.0]]}, "a tuple comes back as a list"
    assert (other.number, other.word, other.nothing, other.later) == (2, "b", 0.5, 4)
    assert torch.equal(vector, server.vector)
    assert np.array_equal(other.array, server.array)
    assert torch.equal(bank.rows, server.banks[1].rows)
    assert [row.tolist() for row in other.history] == [[1, 1], [0]]


@pytest.mark.parametrize(
    ("value", "kind"),
    [(lambda: nn.Linear(1, 1), "Linear"), (lambda: {1, 2}, "set"), (lambda: [torch.Generator()], "Generator")],
)
def test_what_cannot_be_saved_is_named(context: MethodContext, value: Callable[[], Any], kind: str) -> None:
    class BadServer(AveragingServer[Options]):
        def start(self) -> None:
            self.helper = value()

    with pytest.raises(InputError, match=rf"^BadServer\.helper holds a {kind}, which .* call it _helper if"):
        BadServer(context, Options())


def test_a_resume_does_not_write_into_the_initial_model(context: MethodContext) -> None:
    class LastServer(AveragingServer[Options]):
        def start(self) -> None:
            self.last = self.context.initial

    server, before = LastServer(context, Options()), context.initial.clone()
    server.last = before + 1
    other = LastServer(context, Options())
    other.load_state_dict(server.state_dict())
    assert torch.equal(other.last, before + 1)
    assert torch.equal(context.initial, before)
