"""Tests of the secure exchange over a relay that alters messages at random."""

from dataclasses import replace
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.flower.secure_recombination.relay import MissingRelayMessage, RelayMessage
from tests.support.relay_fixtures import STAGES, World, assert_all_or_nothing, in_process, owners

COUNT = 4


def flip(note: RelayMessage, name: str, old: list[RelayMessage], bit: int) -> RelayMessage:
    part = bytearray(note.parts[name])
    part[bit % len(part)] ^= 1 << bit % 8
    return replace(note, parts={**note.parts, name: bytes(part)})


def drop(note: RelayMessage, name: str, old: list[RelayMessage], bit: int) -> RelayMessage:
    return replace(note, parts={key: part for key, part in note.parts.items() if key != name})


def swap(note: RelayMessage, name: str, old: list[RelayMessage], bit: int) -> RelayMessage:
    names = sorted(note.parts)
    other = names[bit % len(names)]
    return replace(note, parts={**note.parts, name: note.parts[other], other: note.parts[name]})


def replay(note: RelayMessage, name: str, old: list[RelayMessage], bit: int) -> RelayMessage:
    """A part of the same name from what passed earlier, to whomever, in this round or in the one before."""
    kept = [seen.parts[name] for seen in old if name in seen.parts]
    return replace(note, parts={**note.parts, name: kept[bit % len(kept)]}) if kept else note


def anything(note: RelayMessage, name: str, old: list[RelayMessage], bit: int) -> RelayMessage:
    """Any part that ever passed, whatever it was for: reflections, too."""
    kept = [part for seen in old for part in seen.parts.values()]
    return replace(note, parts={**note.parts, name: kept[bit % len(kept)]}) if kept else note


def cut(note: RelayMessage, name: str, old: list[RelayMessage], bit: int) -> RelayMessage:
    part = note.parts[name]
    return replace(note, parts={**note.parts, name: part[: bit % (len(part) + 1)]})


def grow(note: RelayMessage, name: str, old: list[RelayMessage], bit: int) -> RelayMessage:
    return replace(note, parts={**note.parts, name: note.parts[name] + bytes(1 + bit % 40)})


def rename(note: RelayMessage, name: str, old: list[RelayMessage], bit: int) -> RelayMessage:
    kind = name.partition("/")[0]
    parts = {key: part for key, part in note.parts.items() if key != name}
    return replace(note, parts={**parts, f"{kind}/{bit % 6}": note.parts[name]})


def renumber(note: RelayMessage, name: str, old: list[RelayMessage], bit: int) -> RelayMessage:
    key = ("attempt", "exchange")[bit % 2]
    return replace(note, header={**note.header, key: bit % 3})


def reorder(note: RelayMessage, name: str, old: list[RelayMessage], bit: int) -> RelayMessage:
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

    def __init__(self, world: World, tricks: list[tuple[object, ...]], earlier: list[RelayMessage]) -> None:
        self.world, self.tricks, self.earlier = world, list(tricks), earlier

    def __call__(self, stage: str, slot: int, note: RelayMessage) -> RelayMessage | MissingRelayMessage:
        for trick in [trick for trick in self.tricks if trick[1:3] == (stage, slot) and note.parts]:
            self.tricks.remove(trick)
            change, _, _, which, bit = trick
            names = sorted(note.parts)
            old = self.earlier + [seen for _, _, _, seen in self.world.seen[:-1]]
            note = change(note, names[which % len(names)], old, bit)  # type: ignore[operator]
            self.world.served(stage, slot, note)  # duplicated on the way
        return note


@cache
def yesterday() -> list[RelayMessage]:
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
        assert world.said or outcome.failed, "whoever did not go on has said why"
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
    assert outcome.models.keys() | outcome.failed.keys() == world.layers.keys()
    assert not outcome.models.keys() & outcome.failed.keys()
    assert all(outcome.failed.values())
    if not outcome.failed:
        assert_all_or_nothing(world, outcome)
