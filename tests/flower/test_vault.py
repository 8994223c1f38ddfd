"""Models that the server keeps and cannot open."""

import json

import pytest
import torch

from fedloom.errors import FedloomError
from fedloom.flower.parcel import Block
from fedloom.flower.sealed import Session
from fedloom.flower.vault import Vault

SESSION = Session("ab" * 16, 2, 1)


def row(number: float) -> Block:
    return Block.raw(torch.full((3,), number).numpy().tobytes())


def test_what_a_round_brings_counts_when_it_is_accepted() -> None:
    vault = Vault()
    vault.begin("aa")
    vault.bring(0, b"first", SESSION, row(1))
    assert vault.find(0, row(0)) is None
    vault.accept(0)
    vault.accept(1)
    found = vault.find(0, row(1))
    assert found is not None
    assert (found.content, found.session) == (b"first", SESSION)
    assert vault.find(1, row(1)) == found, "a slot that has none goes on from another one's"
    vault.begin("aa")
    vault.bring(0, b"second", SESSION, row(2))
    vault.begin("aa")
    vault.accept(0)
    assert vault.find(0, row(1)) == found, "what was not accepted in its round never is"


def test_a_model_that_was_changed_while_nobody_could_open_it_is_an_error() -> None:
    vault = Vault()
    vault.begin("aa")
    vault.bring(3, b"first", SESSION, row(1))
    vault.accept(3)
    with pytest.raises(FedloomError, match="the model of slot 3 was changed, but it is sealed"):
        vault.find(3, row(1.5))


def test_a_vault_says_again_what_it_held() -> None:
    vault, other = Vault(), Vault()
    vault.begin("aa")
    for slot in (0, 11):
        vault.bring(slot, bytes([slot] * 5), SESSION, row(slot))
        vault.accept(slot)
    other.load(vault.state())
    for slot in (0, 11):
        assert other.find(slot, row(slot)) == vault.find(slot, row(slot)) is not None
    state = vault.state()
    tensors = [model.pop("content") for model in state["models"].values()]
    assert all(tensor.dtype is torch.uint8 for tensor in tensors)
    assert json.loads(json.dumps(state)) == state
    with pytest.raises(FedloomError, match="sealed for a key that its sites no longer have"):
        other.begin("")
