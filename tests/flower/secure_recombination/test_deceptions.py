"""Tests that the secure exchange rejects each deception of a relay by name."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.flower.secure_recombination.crypto import CryptoHello, CryptoRejected
from fedloom.flower.secure_recombination.relay import MissingRelayMessage, RelayMessage, RelayOutcome
from tests.support.relay_fixtures import World, assert_all_or_nothing, changed, identity

Trick = Callable[[World, RelayMessage], RelayMessage]


def told(stage: str, victim: int, trick: Trick) -> tuple[World, RelayOutcome]:
    """The first question of a stage to one site is changed."""
    world, done = World(3, (32, 64), round=1), list[int]()

    def down(at: str, slot: int, note: RelayMessage) -> RelayMessage:
        if (at, slot) == (stage, victim) and not done:
            done.append(slot)
            return trick(world, note)
        return note

    world.down = down
    outcome = world.run()
    assert done
    assert_all_or_nothing(world, outcome)
    return world, outcome


def hello_of(note: RelayMessage, slot: int) -> CryptoHello:
    return CryptoHello.decode(note.parts[f"hello/{slot}"])


def in_the_middle(world: World, note: RelayMessage) -> RelayMessage:
    """The relay puts a key of its own in place of a site's."""
    fresh = X25519PrivateKey.generate().public_key().public_bytes_raw()
    return changed(note, hello__1=replace(hello_of(note, 1), fresh=fresh).encode())


def in_the_name_of_another(world: World, note: RelayMessage) -> RelayMessage:
    """It has a site's key, but not that of the site whose name it uses."""
    return changed(note, hello__1=replace(hello_of(note, 1)).signed(identity(2)).encode())


def of_a_stranger(world: World, note: RelayMessage) -> RelayMessage:
    return changed(note, hello__1=replace(hello_of(note, 1), name="site-9").signed(identity(9)).encode())


def of_another_round(world: World, note: RelayMessage) -> RelayMessage:
    hello = hello_of(note, 1)
    return changed(note, hello__1=replace(hello, session=replace(hello.session, round=0)).signed(identity(1)).encode())


def of_another_run(world: World, note: RelayMessage) -> RelayMessage:
    hello = hello_of(note, 1)
    session = replace(hello.session, run="cd" * 16)
    return changed(note, hello__1=replace(hello, session=session).signed(identity(1)).encode())


def on_other_terms(world: World, note: RelayMessage) -> RelayMessage:
    return changed(note, hello__1=replace(hello_of(note, 1), terms=bytes(32)).signed(identity(1)).encode())


def without_me(world: World, note: RelayMessage) -> RelayMessage:
    return changed(note, hello__0=None)


def with_an_older_me(world: World, note: RelayMessage) -> RelayMessage:
    mine = replace(hello_of(note, 0), fresh=bytes(31) + b"\7").signed(identity(0))
    return changed(note, hello__0=mine.encode())


def twice_the_same_slot(world: World, note: RelayMessage) -> RelayMessage:
    return changed(note, hello__2=note.parts["hello/1"])


def with_a_key_that_is_none(world: World, note: RelayMessage) -> RelayMessage:
    return changed(note, hello__1=replace(hello_of(note, 1), fresh=bytes(32)).signed(identity(1)).encode())


def reflected(world: World, note: RelayMessage) -> RelayMessage:
    """What the site itself wrote comes back to it."""
    mine = next(n for way, stage, slot, n in world.seen if (way, stage, slot) == ("up", "offer", 0))
    return changed(note, offer__1=mine.parts["offer/1"])


def meant_for_another(world: World, note: RelayMessage) -> RelayMessage:
    theirs = next(n for way, stage, slot, n in world.seen if (way, stage, slot) == ("up", "offer", 1))
    return changed(note, offer__1=theirs.parts["offer/2"])


def of_another_stage(world: World, note: RelayMessage) -> RelayMessage:
    theirs = next(n for way, stage, slot, n in world.seen if (way, stage, slot) == ("up", "offer", 1))
    return changed(note, answer__1=theirs.parts["offer/0"])


def another_board(world: World, note: RelayMessage) -> RelayMessage:
    return changed(note, board__1=note.parts["board/2"])


def no_board(world: World, note: RelayMessage) -> RelayMessage:
    return changed(note, board__1=None)


def nothing_of_one(world: World, note: RelayMessage) -> RelayMessage:
    return changed(note, lock__1=None)


def something_of_a_stranger(world: World, note: RelayMessage) -> RelayMessage:
    return changed(note, lock__7=note.parts["lock/1"])


@pytest.mark.parametrize(
    ("stage", "trick", "words"),
    [
        ("offer", in_the_middle, "the hello of site-1 is not signed by its key: somebody may have replaced it"),
        ("offer", in_the_name_of_another, "the hello of site-1 is not signed by its key"),
        ("offer", of_a_stranger, "'site-9' takes part, but this site's roster has no such site"),
        ("offer", of_another_round, "the hello of site-1 is for another exchange: attempt 0 of round 1 of run abab"),
        ("offer", of_another_run, "the hello of site-1 is for another exchange: attempt 0 of round 2 of run cdcd"),
        ("offer", on_other_terms, "site-1 exchanges on other terms"),
        ("offer", without_me, "the hello of site-0#0 itself is missing"),
        ("offer", with_an_older_me, "the hello of site-0#0 itself is missing or was replaced"),
        ("offer", twice_the_same_slot, "not in the order of their model indices, each once"),
        ("offer", with_a_key_that_is_none, "the fresh key of site-1 is invalid"),
        ("answer", reflected, "the offer of site-1#1 is not what it sent to site-0#0"),
        ("answer", meant_for_another, "the offer of site-1#1 is not what it sent to site-0#0"),
        ("lock", of_another_stage, "the answer of site-1#1 is not what it sent to site-0#0"),
        ("lock", another_board, "the board of site-1#1 is not the one that its hello names"),
        ("lock", no_board, "there are 1 boards of other sites, not 2"),
        ("commit", nothing_of_one, "the lock of site-1#1 is missing"),
        ("commit", something_of_a_stranger, "model 7 does not take part, but sent a message at lock"),
    ],
)
def test_what_happened_is_named(stage: str, trick: Trick, words: str) -> None:
    world, outcome = told(stage, 0, trick)
    assert any(words in reason for reason in world.said), world.said
    if stage == "commit":  # the others have committed themselves
        assert not outcome.models
    else:
        assert outcome.attempts == 2, "and the next attempt, left alone, is good"
        assert sorted(outcome.models) == [0, 1, 2]


def test_a_relay_that_shows_different_people_to_different_sites_is_found_out() -> None:
    """0 and 3 are told that 3 takes part, 1 and 2 that it does not: even 0 and 1 then have no key in common."""
    sites = World(4).sites
    hellos = [site.hello(0)[0] for site in sites.values()]
    offers = {slot: site.offer(0, hellos if slot in (0, 3) else hellos[:3]) for slot, site in sites.items()}
    with pytest.raises(CryptoRejected, match="the offer of site-1#1 is not what it sent to site-0#0"):
        sites[0].answer(0, 0, {slot: offers[slot].get(0, b"") for slot in (1, 2, 3)})
    with pytest.raises(CryptoRejected, match="the offer of site-0#0 is not what it sent to site-1#1"):
        sites[1].answer(0, 0, {slot: offers[slot][1] for slot in (0, 2)})


def test_messages_of_an_earlier_attempt_are_refused_in_the_next() -> None:
    world = World(3)

    def down(stage: str, slot: int, note: RelayMessage) -> RelayMessage | MissingRelayMessage:
        attempt = note.header.get("attempt")
        if (stage, slot, attempt) == ("lock", 0, 0):
            return MissingRelayMessage("late")
        if (stage, slot, attempt) == ("answer", 1, 1):
            first = next(n for _, s, at, n in world.seen if s == "answer" and at == 1)
            return replace(note, parts={name: first.parts[name] for name in note.parts})
        return note

    world.down = down
    outcome = world.run()
    assert any("is not what it sent to site-1#1 in attempt 1" in reason for reason in world.said)
    assert outcome.failed[0] == "late"
    assert sorted(outcome.models) == [1, 2], "in the third"
    assert_all_or_nothing(world, outcome)
