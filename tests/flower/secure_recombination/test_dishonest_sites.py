"""Tests of the secure exchange with a dishonest site and an honest relay."""

from collections.abc import Sequence
from typing import Any

import pytest

from fedloom.flower.secure_recombination.crypto import KEY
from fedloom.flower.secure_recombination.participant import ExchangeParticipant, Sealed, _deed
from fedloom.flower.secure_recombination.relay import RelayMessage
from fedloom.methods._support.layer_exchange import LayerExchangeMessage
from tests.support.relay_fixtures import World, assert_all_or_nothing


class Rogue(ExchangeParticipant):
    """Adds messages to a stage, or leaves its own out."""

    stage = ""
    added: Sequence[LayerExchangeMessage] = ()
    silent = False

    def _sealed(self, now: Any, stage: str, messages: Sequence[LayerExchangeMessage]) -> Sealed:
        if stage == self.stage:
            messages = list(self.added) if self.silent else [*messages, *self.added]
        return super()._sealed(now, stage, messages)


def with_rogue(stage: str, *added: LayerExchangeMessage, chance: float, silent: bool = False) -> World:
    world = World(3, (32, 64), chance=chance)
    site = world.sites[1]
    site.__class__ = Rogue
    assert isinstance(site, Rogue)
    site.stage, site.added, site.silent = stage, added, silent
    return world


def deed(origin: int, layer: int = 0, back: bool = False) -> LayerExchangeMessage:
    """A deed for site 0, with a key that opens nothing."""
    return LayerExchangeMessage(1, 0, layer, _deed(origin, bytes(KEY)), back)


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (with_rogue("answer", deed(1, back=True), chance=0.0), "site-1#1 returns layer 0, which was not sent to it"),
        (with_rogue("offer", deed(2), chance=0.0), "site-1#1 offers a layer that is not its own"),
        (with_rogue("offer", deed(9), chance=0.0), "passes on a layer of a model that does not take part"),
        (with_rogue("offer", deed(1), chance=0.0), "the key that was passed on does not open layer 0 of site-1#1"),
        (with_rogue("answer", chance=1.0, silent=True), "the layers do not add up: client"),
    ],
)
def test_a_site_that_cheats_is_named_and_no_model_is_wrong(world: World, words: str) -> None:
    outcome = world.run()
    assert any(words in reason for reason in world.said), world.said
    assert not outcome.models, "it does so in every attempt"
    assert_all_or_nothing(world, outcome)


@pytest.mark.parametrize("name", ["hello", "board", "model", "offer/0"])
def test_answers_that_are_not_what_they_must_be(name: str) -> None:
    """Cut short on their way: the site is left out or the attempt begun anew, and nothing is made of them."""
    world, done = World(3, (32, 64)), list[str]()

    def up(stage: str, slot: int, note: RelayMessage) -> RelayMessage:
        if slot == 1 and name in note.parts and not done:
            done.append(stage)
            parts = {key: part for key, part in note.parts.items() if key != name}
            return RelayMessage(note.header, {**parts, name: note.parts[name][:-1]} if "/" not in name else parts)
        return note

    world.up = up
    outcome = world.run()
    assert done
    assert outcome.failed[1].startswith("rejected: ")
    assert outcome.models.keys() == {0, 2}
    if name != "model":
        assert_all_or_nothing(world, outcome)
    reasons = {
        "hello": "a message is cut off",
        "board": "its board has",
        "model": "does not open with the key",
        "offer/0": "it did not write to everybody at offer",
    }
    assert reasons[name] in outcome.failed[1]


def test_a_model_that_is_locked_but_has_another_size() -> None:
    world = World(3, (32, 64))

    class Short(ExchangeParticipant):
        def _model(self, now: Any) -> list[bytes]:
            *layers, last = super()._model(now)
            return [*layers, last[:-1]]

    world.sites[1].__class__ = Short
    outcome = world.run()
    assert "the model of site-1#1 has" in outcome.failed[1]
    assert outcome.models.keys() == {0, 2}


def test_a_hello_for_another_slot_is_not_passed_on() -> None:
    world = World(3, (32, 64))
    world.sites[1].model_index = 2
    outcome = world.run()
    assert outcome.failed == {1: "rejected: its hello is for another exchange."}
    assert outcome.models.keys() == {0, 2}
    assert outcome.attempts == 1
