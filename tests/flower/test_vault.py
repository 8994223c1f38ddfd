"""Models that the server keeps and cannot open."""

import json
from collections.abc import Sequence
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import FedloomError
from fedloom.flower.parcel import Block
from fedloom.flower.vault import Vault


def row(number: float) -> Block:
    return Block.raw(torch.full((3,), number).numpy().tobytes())


def test_what_a_round_brings_counts_when_it_is_accepted_and_then_all_of_it() -> None:
    vault = Vault()
    vault.begin("aa")
    vault.bring({0: b"first", 1: b"other"}, b"these two", row(1))
    assert vault.find(0, row(0)) is None
    assert not vault.contents.inventory
    vault.accept()
    assert (vault.find(0, row(1)), vault.find(1, row(1))) == (b"first", b"other")
    assert vault.contents.inventory == b"these two"
    vault.begin("aa")
    vault.bring({0: b"second"}, b"another", row(2))
    vault.begin("aa")
    vault.accept()
    assert vault.find(0, row(1)) == b"first", "what was not accepted in its round never is"
    vault.bring({0: b"third"}, b"the last", row(3))
    vault.accept()
    assert (vault.find(0, row(3)), vault.find(1, row(3))) == (b"third", b"other"), "who was not there keeps its own"
    assert vault.contents.inventory == b"the last"


def test_a_model_that_was_changed_while_nobody_could_open_it_is_an_error() -> None:
    vault = Vault()
    vault.begin("aa")
    vault.bring({3: b"first"}, b"", row(1))
    vault.accept()
    with pytest.raises(FedloomError, match="the model of slot 3 was changed, but it is sealed"):
        vault.find(3, row(1.5))


def test_a_vault_says_again_what_it_held() -> None:
    vault, other = Vault(), Vault()
    other.load(vault.state())
    assert other.contents == vault.contents
    vault.begin("aa")
    vault.bring({slot: bytes([slot] * 5) for slot in (0, 11)}, b"a list", row(7))
    vault.accept()
    other.load(vault.state())
    assert other.contents == vault.contents
    assert other.find(11, row(7)) == bytes([11] * 5)
    state = vault.state()
    assert state["trained"] == {}
    tensors = [*state.pop("models").values(), state.pop("inventory")]
    assert all(tensor.dtype is torch.uint8 for tensor in tensors)
    assert json.loads(json.dumps(state)) == state
    with pytest.raises(FedloomError, match="sealed for a key that its sites no longer have"):
        other.begin("")


@settings(deadline=None)
@given(st.integers(1, 6), st.data())
def test_clients_are_seated_where_they_have_not_been_if_that_can_be(count: int, data: st.DataObject) -> None:
    vault, pairs = Vault(), st.tuples(st.integers(0, count - 1), st.integers(0, count - 1))
    vault.begin("aa")
    contents = [bytes([data.draw(st.integers(0, count))]) for _ in range(count)]  # some may be the same
    vault.bring(dict(enumerate(contents)), b"a list", row(1))
    vault.accept()
    had = data.draw(st.sets(pairs))
    for client, slot in had:
        vault.note(client, slot)
    again = Vault()
    again.load(vault.state())
    clients, slots = list(range(count)), list(range(count))
    seats = vault.seats(clients, slots)
    assert again.seats(clients, slots) == seats
    assert sorted(seats) == slots
    trained = {(client, contents[slot]) for client, slot in had}

    def repeats(order: Sequence[int]) -> int:
        return sum((client, contents[slot]) in trained for client, slot in enumerate(order))

    assert repeats(seats) == min(map(repeats, permutations(slots)))
    if not repeats(slots):
        assert seats == slots, "nobody moves without need"


def test_models_that_are_gone_are_forgotten() -> None:
    vault = Vault()
    vault.begin("aa")
    vault.bring({0: b"first", 1: b"other"}, b"", row(1))
    vault.accept()
    vault.note(5, 0)
    vault.note(5, 9)
    assert vault.seats([5, 6], [0, 1]) == [1, 0]
    vault.bring({0: b"second"}, b"", row(2))
    vault.accept()
    vault.begin("aa")
    assert vault.state()["trained"] == {"5": []}
    assert vault.seats([5, 6], [0, 1]) == [0, 1]
