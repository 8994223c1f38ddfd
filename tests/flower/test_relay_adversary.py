"""The sealed exchange over a relay that does not keep to its part: it ends as it must, or it is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_world import RUN, World, assert_all_or_nothing, changed, identity, in_process, owners, roster, traces

from fedloom.flower.identity import SiteKeys
from fedloom.flower.relay import Note, Outcome, Silence
from fedloom.flower.sealed import Hello, Refusal
from fedloom.flower.sealed_site import SealedSite

STAGES = ("offer", "answer", "lock", "commit", "release")
COUNT = 4


# All kinds of meddling with what the sites are told


def flip(note: Note, name: str, old: list[Note], bit: int) -> Note:
    part = bytearray(note.parts[name])
    part[bit % len(part)] ^= 1 << bit % 8
    return replace(note, parts={**note.parts, name: bytes(part)})


def drop(note: Note, name: str, old: list[Note], bit: int) -> Note:
    return replace(note, parts={key: part for key, part in note.parts.items() if key != name})


def swap(note: Note, name: str, old: list[Note], bit: int) -> Note:
    names = sorted(note.parts)
    other = names[bit % len(names)]
    return replace(note, parts={**note.parts, name: note.parts[other], other: note.parts[name]})


def replay(note: Note, name: str, old: list[Note], bit: int) -> Note:
    """A part of the same name from what passed earlier, to whomever, in this round or in the one before."""
    kept = [seen.parts[name] for seen in old if name in seen.parts]
    return replace(note, parts={**note.parts, name: kept[bit % len(kept)]}) if kept else note


def anything(note: Note, name: str, old: list[Note], bit: int) -> Note:
    """Any part that ever passed, whatever it was for: reflections, too."""
    kept = [part for seen in old for part in seen.parts.values()]
    return replace(note, parts={**note.parts, name: kept[bit % len(kept)]}) if kept else note


def cut(note: Note, name: str, old: list[Note], bit: int) -> Note:
    part = note.parts[name]
    return replace(note, parts={**note.parts, name: part[: bit % (len(part) + 1)]})


def grow(note: Note, name: str, old: list[Note], bit: int) -> Note:
    return replace(note, parts={**note.parts, name: note.parts[name] + bytes(1 + bit % 40)})


def rename(note: Note, name: str, old: list[Note], bit: int) -> Note:
    kind = name.partition("/")[0]
    parts = {key: part for key, part in note.parts.items() if key != name}
    return replace(note, parts={**parts, f"{kind}/{bit % 6}": note.parts[name]})


def renumber(note: Note, name: str, old: list[Note], bit: int) -> Note:
    key = ("attempt", "exchange")[bit % 2]
    return replace(note, header={**note.header, key: bit % 3})


def reorder(note: Note, name: str, old: list[Note], bit: int) -> Note:
    return replace(note, parts=dict(sorted(note.parts.items(), reverse=True)))


TRICKS = [flip, drop, swap, replay, anything, cut, grow, rename, renumber, reorder]
MEDDLING = st.tuples(
    st.sampled_from(TRICKS),
    st.sampled_from(STAGES),
    st.integers(0, COUNT - 1),
    st.integers(0, 5),
    st.integers(0, 2**20),
)


class Meddler:
    """Does each of its tricks once, and asks twice what it did not change."""

    def __init__(self, world: World, tricks: list[tuple[object, ...]], earlier: list[Note]) -> None:
        self.world, self.tricks, self.earlier = world, list(tricks), earlier

    def __call__(self, stage: str, slot: int, note: Note) -> Note | Silence:
        for trick in [trick for trick in self.tricks if trick[1:3] == (stage, slot) and note.parts]:
            self.tricks.remove(trick)
            change, _, _, which, bit = trick
            names = sorted(note.parts)
            old = self.earlier + [seen for _, _, _, seen in self.world.seen[:-1]]
            note = change(note, names[which % len(names)], old, bit)  # type: ignore[operator]
            self.world.served(stage, slot, note)  # duplicated on the way
        return note


@cache
def yesterday() -> list[Note]:
    """All that passed in an earlier round of the same sites."""
    world = World(COUNT, (32, 64), seed=5, round=0)
    assert len(world.run().models) == COUNT
    return [note for _, _, _, note in world.seen]


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**20), st.lists(MEDDLING, min_size=1, max_size=3), st.booleans())
def test_sites_are_not_deceived(seed: int, tricks: list[tuple[object, ...]], mixed: bool) -> None:
    world = World(COUNT, (32, 64), seed, round=1, mixed=mixed)
    world.down = Meddler(world, tricks, yesterday())
    outcome = world.run()
    assert_all_or_nothing(world, outcome)
    if outcome.attempts > 1:
        assert world.said or outcome.lost, "whoever did not go on has said why"
    if outcome.attempts == 1 and outcome.models:
        assert outcome.models == in_process(world, list(range(COUNT)))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**20), st.lists(MEDDLING, min_size=1, max_size=3))
def test_nor_is_the_server_where_the_way_to_it_is_bad(seed: int, tricks: list[tuple[object, ...]]) -> None:
    """A model that was changed on its way up is refused by itself; no other suffers, and none is there twice."""
    world = World(COUNT, (32, 64), seed)
    meddler = Meddler(world, tricks, [])
    world.up = meddler
    outcome = world.run()
    found = owners(world, outcome)
    for number in range(2):
        held = [whose[number] for whose in found.values()]
        assert len(set(held)) == len(held), "twice"
    assert outcome.models.keys() | outcome.lost.keys() == world.layers.keys()
    assert not outcome.models.keys() & outcome.lost.keys()
    assert all(outcome.lost.values())
    if not outcome.lost:
        assert_all_or_nothing(world, outcome)


# One by one, with the words for it

Trick = Callable[[World, Note], Note]


def told(stage: str, victim: int, trick: Trick) -> tuple[World, Outcome]:
    """The first question of a stage to one site is changed."""
    world, done = World(3, (32, 64), round=1), list[int]()

    def down(at: str, slot: int, note: Note) -> Note:
        if (at, slot) == (stage, victim) and not done:
            done.append(slot)
            return trick(world, note)
        return note

    world.down = down
    outcome = world.run()
    assert done
    assert_all_or_nothing(world, outcome)
    return world, outcome


def hello_of(note: Note, slot: int) -> Hello:
    return Hello.decode(note.parts[f"hello/{slot}"])


def in_the_middle(world: World, note: Note) -> Note:
    """The relay puts a key of its own in place of a site's."""
    fresh = X25519PrivateKey.generate().public_key().public_bytes_raw()
    return changed(note, hello__1=replace(hello_of(note, 1), fresh=fresh).encode())


def in_the_name_of_another(world: World, note: Note) -> Note:
    """It has a site's key, but not that of the site whose name it uses."""
    return changed(note, hello__1=replace(hello_of(note, 1)).signed(identity(2)).encode())


def of_a_stranger(world: World, note: Note) -> Note:
    return changed(note, hello__1=replace(hello_of(note, 1), name="site-9").signed(identity(9)).encode())


def of_another_round(world: World, note: Note) -> Note:
    hello = hello_of(note, 1)
    return changed(note, hello__1=replace(hello, session=replace(hello.session, round=0)).signed(identity(1)).encode())


def of_another_run(world: World, note: Note) -> Note:
    hello = hello_of(note, 1)
    session = replace(hello.session, run="cd" * 16)
    return changed(note, hello__1=replace(hello, session=session).signed(identity(1)).encode())


def on_other_terms(world: World, note: Note) -> Note:
    return changed(note, hello__1=replace(hello_of(note, 1), terms=bytes(32)).signed(identity(1)).encode())


def without_me(world: World, note: Note) -> Note:
    return changed(note, hello__0=None)


def with_an_older_me(world: World, note: Note) -> Note:
    mine = replace(hello_of(note, 0), fresh=bytes(31) + b"\7").signed(identity(0))
    return changed(note, hello__0=mine.encode())


def twice_the_same_slot(world: World, note: Note) -> Note:
    return changed(note, hello__2=note.parts["hello/1"])


def with_a_key_that_is_none(world: World, note: Note) -> Note:
    return changed(note, hello__1=replace(hello_of(note, 1), fresh=bytes(32)).signed(identity(1)).encode())


def reflected(world: World, note: Note) -> Note:
    """What the site itself wrote comes back to it."""
    mine = next(n for way, stage, slot, n in world.seen if (way, stage, slot) == ("up", "offer", 0))
    return changed(note, offer__1=mine.parts["offer/1"])


def meant_for_another(world: World, note: Note) -> Note:
    theirs = next(n for way, stage, slot, n in world.seen if (way, stage, slot) == ("up", "offer", 1))
    return changed(note, offer__1=theirs.parts["offer/2"])


def of_another_stage(world: World, note: Note) -> Note:
    theirs = next(n for way, stage, slot, n in world.seen if (way, stage, slot) == ("up", "offer", 1))
    return changed(note, answer__1=theirs.parts["offer/0"])


def another_board(world: World, note: Note) -> Note:
    return changed(note, board__1=note.parts["board/2"])


def no_board(world: World, note: Note) -> Note:
    return changed(note, board__1=None)


def nothing_of_one(world: World, note: Note) -> Note:
    return changed(note, lock__1=None)


def something_of_a_stranger(world: World, note: Note) -> Note:
    return changed(note, lock__7=note.parts["lock/1"])


@pytest.mark.parametrize(
    ("stage", "trick", "words"),
    [
        ("offer", in_the_middle, "the hello of site-1 is not signed by its key: somebody sits in the middle"),
        ("offer", in_the_name_of_another, "the hello of site-1 is not signed by its key"),
        ("offer", of_a_stranger, "'site-9' takes part, but this site's roster has no such site"),
        ("offer", of_another_round, "the hello of site-1 is from another exchange (attempt 0 of round 1 of run abab"),
        ("offer", of_another_run, "the hello of site-1 is from another exchange (attempt 0 of round 2 of run cdcd"),
        ("offer", on_other_terms, "site-1 exchanges on other terms"),
        ("offer", without_me, "the hello of site-0#0 itself is missing"),
        ("offer", with_an_older_me, "the hello of site-0#0 itself is missing or another one"),
        ("offer", twice_the_same_slot, "not in the order of their slots, each once"),
        ("offer", with_a_key_that_is_none, "the fresh key of site-1 is none"),
        ("answer", reflected, "the offer of site-1#1 is not what it sent to site-0#0"),
        ("answer", meant_for_another, "the offer of site-1#1 is not what it sent to site-0#0"),
        ("lock", of_another_stage, "the answer of site-1#1 is not what it sent to site-0#0"),
        ("lock", another_board, "the board of site-1#1 is not the one that its hello names"),
        ("lock", no_board, "there are 1 boards of other sites, not 2"),
        ("commit", nothing_of_one, "the lock of site-1#1 is missing"),
        ("commit", something_of_a_stranger, "there is a message at lock from slot 7, which does not take part"),
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
    with pytest.raises(Refusal, match="the offer of site-1#1 is not what it sent to site-0#0"):
        sites[0].answer(0, 0, {slot: offers[slot].get(0, b"") for slot in (1, 2, 3)})
    with pytest.raises(Refusal, match="the offer of site-0#0 is not what it sent to site-1#1"):
        sites[1].answer(0, 0, {slot: offers[slot][1] for slot in (0, 2)})


def test_messages_of_an_earlier_attempt_are_refused_in_the_next() -> None:
    world = World(3)

    def down(stage: str, slot: int, note: Note) -> Note | Silence:
        attempt = note.header.get("attempt")
        if (stage, slot, attempt) == ("lock", 0, 0):
            return Silence("late")
        if (stage, slot, attempt) == ("answer", 1, 1):
            first = next(n for _, s, at, n in world.seen if s == "answer" and at == 1)
            return replace(note, parts={name: first.parts[name] for name in note.parts})
        return note

    world.down = down
    outcome = world.run()
    assert any("is not what it sent to site-1#1 in attempt 1" in reason for reason in world.said)
    assert outcome.lost[0] == "late"
    assert sorted(outcome.models) == [1, 2], "in the third"
    assert_all_or_nothing(world, outcome)


# What the server cannot have, however it asks


def driven(world: World) -> tuple[dict[str, dict[int, Note]], Callable[[str, int, Note], Note]]:
    """Sites asked by hand, up to where all have committed, and what the questions were."""

    def ask(stage: str, slot: int, note: Note) -> Note:
        answer = world.served(stage, slot, note)
        assert isinstance(answer, Note), answer
        return answer

    world.run()
    asked: dict[str, dict[int, Note]] = {}
    for way, stage, slot, note in world.seen:
        if way == "down":
            asked.setdefault(stage, {}).setdefault(slot, note)
    return asked, ask


@pytest.mark.parametrize("missing", ["commit/1", "commit/2"])
def test_keys_are_not_released_before_everybody_has_committed(missing: str) -> None:
    world = World(3)
    world.down = lambda stage, slot, note: Silence("held back") if stage == "release" else note
    asked, ask = driven(world)
    whole = asked["release"][0]
    answer = world.served("release", 0, replace(whole, parts={n: p for n, p in whole.parts.items() if n != missing}))
    assert isinstance(answer, Silence)
    assert f"the commit of site-{missing[-1]}#{missing[-1]} is missing" in answer.reason
    answer = world.served("release", 0, whole)
    assert isinstance(answer, Silence), "a site that was asked in vain does not answer any more in this attempt"
    assert ask("release", 1, asked["release"][1]).by_slot("key").keys() == {0, 1, 2}, "but the others do"


def test_there_is_one_recombination_a_round() -> None:
    """After everybody has committed the server may say what it likes: nobody begins again."""
    world = World(3)
    assert len(world.run().models) == 3
    for slot in range(3):
        for attempt in (1, 2, 3):
            answer = world.served("hello", slot, Note({"attempt": attempt}))
            assert isinstance(answer, Silence)
            assert "has committed itself in round 1 and does not begin again" in answer.reason


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
        assert isinstance(answer, Silence)
        assert f"has done {stage} in attempt 0 of round 1 of run abababab, and then on something else" in answer.reason
    board = asked["lock"][0]
    answer = world.served("lock", 0, changed(board, board__1=bytes(10)))
    assert isinstance(answer, Silence)
    assert "has done lock" in answer.reason


def test_after_a_refusal_only_a_new_attempt_goes_on() -> None:
    sites = World(3).sites
    hellos = [site.hello(0)[0] for site in sites.values()]
    for site in sites.values():
        site.offer(0, hellos)
    with pytest.raises(Refusal, match="the offer of site-1#1 is missing"):
        sites[0].answer(0, 0, {})
    with pytest.raises(Refusal, match="is over for site-0#0: the offer of site-1#1 is missing"):
        sites[0].lock(0, 0, {}, {})
    with pytest.raises(Refusal, match="does not begin attempt 0 of round 1: 1 is next"):
        sites[0].hello(0)
    assert Hello.decode(sites[0].hello(1)[0]).session.attempt == 1


@pytest.mark.parametrize("stage", ["answer", "lock", "commit", "release"])
def test_stages_come_in_their_order(stage: str) -> None:
    world = World(2)
    world.served("hello", 0, Note({"attempt": 0}))
    answer = world.served(stage, 0, Note({"attempt": 0}))
    assert isinstance(answer, Silence)
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
    answer = World(2).served(stage, 0, Note(header))
    assert isinstance(answer, Silence)
    assert words in answer.reason


def test_a_site_that_hands_over_another_s_layer_twice_is_seen_by_the_server() -> None:
    """It cannot read the layer, so it cannot seal it anew either."""
    world = World(3, (32,), chance=1.0)
    take = SealedSite._model

    class Copier(SealedSite):
        def _model(self, now) -> bytes:  # type: ignore[no-untyped-def]
            now.deeds = [world.sites[0]._now.deeds[0]]  # type: ignore[union-attr]
            return take(self, now)

    world.sites[1].__class__ = Copier
    outcome = world.run()
    assert not outcome.models
    assert "slots 0 and 1 have handed over the same layer 0" in outcome.lost[2]


def test_a_site_must_be_in_its_own_roster() -> None:
    world = World(2)
    others = SiteKeys({name: key for name, key in roster(3).keys.items() if name != "site-0"})
    with pytest.raises(Exception, match="does not have this site's own public key"):
        SealedSite(identity(0), others, RUN, 0, 0, world.layers[0], world.terms)
    with pytest.raises(ValueError, match="sizes"):
        SealedSite(identity(0), roster(2), RUN, 0, 0, world.layers[0][:1], world.terms)


# Nothing is in the clear


def exposed(world: World, content: bytes) -> int:
    return sum(piece in content for layers in world.layers.values() for layer in layers for piece in traces(layer))


@pytest.mark.parametrize("mixed", [False, True])
def test_no_piece_of_a_layer_passes_in_the_clear(mixed: bool) -> None:
    world = World(4, (64, 128, 256), mixed=mixed)
    world.up = lambda stage, slot, note: Silence("late") if (stage, slot) == ("lock", 3) else note
    outcome = world.run()
    assert sorted(outcome.models) == [0, 1, 2]
    content = b"".join(part for _, _, _, note in world.seen for part in note.parts.values())
    assert exposed(world, content) == 0
    assert exposed(world, content + world.layers[1][2]) > 20, "the search finds what is there"
    assert exposed(world, b"".join(outcome.models[0])) > 20


def test_keys_pass_only_at_the_end() -> None:
    world = World(3)
    world.run()
    sites = [site._now for site in world.sites.values()]
    keys = [key for now in sites if now is not None for key in now.board.keys]
    locks = [now.key for now in sites if now is not None]
    content = b"".join(part for _, stage, _, note in world.seen for part in note.parts.values() if stage != "release")
    assert not any(key in content for key in keys + locks)
    last = b"".join(part for _, stage, _, note in world.seen for part in note.parts.values() if stage == "release")
    assert all(key in last for key in locks)
    assert not any(key in last for key in keys), "and those to single layers never"


def test_other_sites_cannot_read_a_layer_either() -> None:
    """What a site takes from a board is sealed for the server."""
    world = World(3, (64, 128), chance=1.0)
    world.run()
    for site in world.sites.values():
        now = site._now
        assert now is not None
        for own in range(3):
            if own != site.slot:
                held = b"".join(site._model(now))
                assert not any(piece in held for layer in world.layers[own] for piece in traces(layer))


def test_refusals_are_errors_a_person_can_read() -> None:
    with pytest.raises(Refusal, match=r"cut off\.$"):
        Hello.decode(b"\0\0\0\7abc")
