"""Tests that no request of the server gets layers or keys from a site."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from fedloom.flower.secure_recombination.crypto import CryptoHello, CryptoRejected
from fedloom.flower.secure_recombination.participant import ExchangeParticipant
from fedloom.flower.secure_recombination.relay import MissingRelayMessage, RelayMessage
from fedloom.flower.trust.identity import SiteKeys
from tests.support.relay_fixtures import RUN, STAGES, World, changed, identity, roster


def driven(world: World) -> tuple[dict[str, dict[int, RelayMessage]], Callable[[str, int, RelayMessage], RelayMessage]]:
    """Sites asked by hand, up to where all have committed, and what the questions were."""

    def ask(stage: str, slot: int, note: RelayMessage) -> RelayMessage:
        answer = world.served(stage, slot, note)
        assert isinstance(answer, RelayMessage), answer
        return answer

    world.run()
    asked: dict[str, dict[int, RelayMessage]] = {}
    for way, stage, slot, note in world.seen:
        if way == "down":
            asked.setdefault(stage, {}).setdefault(slot, note)
    return asked, ask


@pytest.mark.parametrize("missing", ["commit/1", "commit/2"])
def test_keys_are_not_released_before_everybody_has_committed(missing: str) -> None:
    world = World(3)
    world.down = lambda stage, slot, note: MissingRelayMessage("held back") if stage == "release" else note
    asked, ask = driven(world)
    whole = asked["release"][0]
    answer = world.served("release", 0, replace(whole, parts={n: p for n, p in whole.parts.items() if n != missing}))
    assert isinstance(answer, MissingRelayMessage)
    assert f"the commit of site-{missing[-1]}#{missing[-1]} is missing" in answer.reason
    answer = world.served("release", 0, whole)
    assert isinstance(answer, MissingRelayMessage), (
        "a site that was asked in vain does not answer any more in this attempt"
    )
    assert ask("release", 1, asked["release"][1]).by_model_index("key").keys() == {0, 1, 2}, "but the others do"


def test_there_is_one_recombination_a_round() -> None:
    """After everybody has committed the server may say what it likes: nobody begins again."""
    world = World(3)
    assert len(world.run().models) == 3
    for slot in range(3):
        for attempt in (1, 2, 3):
            answer = world.served("hello", slot, RelayMessage({"attempt": attempt}))
            assert isinstance(answer, MissingRelayMessage)
            assert "has committed in round 1, so it does not begin again" in answer.reason


def test_the_same_question_has_the_same_answer_and_another_has_none() -> None:
    world = World(3)
    asked, ask = driven(world)
    first = {
        (stage, slot): note for way, stage, slot, note in world.seen if way == "up" and stage in (*STAGES, "hello")
    }
    for (stage, slot), note in first.items():
        assert ask(stage, slot, asked[stage][slot]) == note, "word for word: no nonce is used for two texts"
    for stage, name in (("offer", "hello/1"), ("answer", "offer/1"), ("lock", "answer/1"), ("commit", "lock/1")):
        question = asked[stage][0]
        other = replace(question, parts={**question.parts, name: bytes(len(question.parts[name]))})
        answer = world.served(stage, 0, other)
        assert isinstance(answer, MissingRelayMessage)
        assert f"has done {stage} in attempt 0 of round 1 of run abababab for another request" in answer.reason
    board = asked["lock"][0]
    answer = world.served("lock", 0, changed(board, board__1=bytes(10)))
    assert isinstance(answer, MissingRelayMessage)
    assert "has done lock" in answer.reason


def test_after_a_refusal_only_a_new_attempt_goes_on() -> None:
    sites = World(3).sites
    hellos = [site.hello(0)[0] for site in sites.values()]
    for site in sites.values():
        site.offer(0, hellos)
    with pytest.raises(CryptoRejected, match="the offer of site-1#1 is missing"):
        sites[0].answer(0, 0, {})
    with pytest.raises(CryptoRejected, match="is over for site-0#0: the offer of site-1#1 is missing"):
        sites[0].lock(0, 0, {}, {})
    with pytest.raises(CryptoRejected, match="does not begin attempt 0 of round 1: 1 is next"):
        sites[0].hello(0)
    assert CryptoHello.decode(sites[0].hello(1)[0]).session.attempt == 1


@pytest.mark.parametrize("stage", ["answer", "lock", "commit", "release"])
def test_stages_come_in_their_order(stage: str) -> None:
    world = World(2)
    world.served("hello", 0, RelayMessage({"attempt": 0}))
    answer = world.served(stage, 0, RelayMessage({"attempt": 0}))
    assert isinstance(answer, MissingRelayMessage)
    assert f"site-0#0 waits for offer, not for {stage}" in answer.reason


@pytest.mark.parametrize(
    ("stage", "header", "words"),
    [
        ("offer", {"attempt": 0}, "site-0#0 is not in attempt 0"),
        ("hello", {"attempt": 9}, "does not begin attempt 9 of round 1: 0 is next"),
        ("hello", {"attempt": -1}, "does not begin attempt -1"),
        ("hello", {"attempt": "first"}, "attempt must be a whole number, not 'first'"),
        ("hello", {"attempt": True}, "attempt must be a whole number"),
        ("dance", {"attempt": 0}, "an exchange has no stage 'dance'"),
    ],
)
def test_nonsense_is_refused(stage: str, header: dict[str, int | str], words: str) -> None:
    answer = World(2).served(stage, 0, RelayMessage(header))
    assert isinstance(answer, MissingRelayMessage)
    assert words in answer.reason


def test_refusals_are_errors_a_person_can_read() -> None:
    with pytest.raises(CryptoRejected, match=r"cut off\.$"):
        CryptoHello.decode(b"\0\0\0\7abc")


def test_a_site_that_hands_over_another_s_layer_twice_is_seen_by_the_server() -> None:
    """It cannot read the layer, so it cannot seal it anew either."""
    world = World(3, (32,), chance=1.0)
    take = ExchangeParticipant._model

    class Copier(ExchangeParticipant):
        def _model(self, now) -> list[bytes]:  # type: ignore[no-untyped-def]
            now.deeds = [world.sites[0]._now.deeds[0]]  # type: ignore[union-attr]
            return take(self, now)

    world.sites[1].__class__ = Copier
    outcome = world.run()
    assert not outcome.models
    assert "models 0 and 1 have handed over the same layer 0" in outcome.failed[2]


def test_a_site_must_be_in_its_own_roster() -> None:
    world = World(2)
    others = SiteKeys({name: key for name, key in roster(3).keys.items() if name != "site-0"})
    with pytest.raises(Exception, match="does not have this site's own public key"):
        ExchangeParticipant(identity(0), others, RUN, 0, 0, world.layers[0], world.terms)
    with pytest.raises(ValueError, match="sizes"):
        ExchangeParticipant(identity(0), roster(2), RUN, 0, 0, world.layers[0][:1], world.terms)
