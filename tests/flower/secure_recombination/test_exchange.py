"""Tests of the secure exchange over an honest relay, with dropped sites."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedloom.core.rng import RngStreams
from fedloom.flower.secure_recombination.participant import participant_random_source
from fedloom.flower.secure_recombination.relay import MissingRelayMessage, RelayMessage
from fedloom.methods._support.layer_exchange import MOST_ATTEMPTS, exchange_model_layers
from tests.support.relay_fixtures import Gone, World, assert_all_or_nothing, in_process, owners

COUNTS = st.integers(2, 5)
SIZES = st.lists(st.integers(8, 24).map(lambda n: 4 * n), min_size=1, max_size=4).map(tuple)
SEEDS = st.integers(0, 2**32 - 1)
CHANCES = st.sampled_from([0.0, 0.3, 0.5, 1.0])
quick = settings(deadline=None, max_examples=15)
STAGES = ("hello", "offer", "answer", "lock", "commit", "release")


@quick
@given(COUNTS, SIZES, SEEDS, CHANCES, st.integers(0, 3))
def test_it_comes_to_the_same_as_the_exchange_in_one_process(
    count: int, sizes: tuple[int, ...], seed: int, chance: float, round: int
) -> None:
    world = World(count, sizes, seed, chance, round=round)
    outcome = world.run()
    assert outcome.models == in_process(world, list(range(count)))
    assert not outcome.failed
    assert (outcome.attempts, outcome.exchanges) == (1, 1)
    assert_all_or_nothing(world, outcome)


def test_with_choices_that_nobody_knows() -> None:
    """As sites do it by themselves: every layer once, and another outcome each time."""
    outcomes = []
    for _ in range(6):
        world = World(4, (32,) * 6, draws=lambda slot: participant_random_source)
        outcome = world.run()
        assert_all_or_nothing(world, outcome)
        outcomes.append(str(owners(world, outcome)))
    assert len(set(outcomes)) > 1


@quick
@example(count=4, layers=2, seed=22)  # the first attempt fails
@given(st.integers(2, 4), st.integers(2, 5), SEEDS)
def test_mixed_goes_on_until_no_model_is_what_one_client_trained(count: int, layers: int, seed: int) -> None:
    world = World(count, (32,) * layers, seed, mixed=True)
    outcome = world.run()
    models = {slot: [torch.tensor([slot]) for _ in range(layers)] for slot in range(count)}
    found = exchange_model_layers(models, partial(RngStreams(seed).numpy, round=world.round), 0.5, until_mixed=True)
    if outcome.models:
        assert outcome.models == in_process(world, list(range(count)), outcome.attempts - 1)
        assert all(len(set(whose)) > 1 for whose in owners(world, outcome).values())
        assert found is not None, "in one process it comes to the same"
        assert owners(world, outcome) == {slot: [int(layer) for layer in model] for slot, model in found.items()}
    else:
        assert found is None
        assert any("still a model that one client trained" in reason for reason in world.said)
    assert_all_or_nothing(world, outcome)


def test_mixed_needs_more_exchanges_where_there_are_few_layers() -> None:
    outcomes = [World(5, (32,) * 3, seed, mixed=True).run() for seed in range(10)]
    assert all(len(outcome.models) == 5 for outcome in outcomes)
    assert max(outcome.exchanges for outcome in outcomes) > 1
    assert all(len(World(5, (32,) * 3, seed).run().models) == 5 for seed in range(3))


def test_where_nothing_is_ever_sent_models_that_must_be_mixed_are_not_handed_over() -> None:
    world = World(3, chance=0.0, mixed=True)
    outcome = world.run()
    assert not outcome.models
    assert "still a model that one client trained" in outcome.failed[0]


# Drop-outs


LEAVING = st.tuples(st.sampled_from(STAGES), st.integers(0, 1), st.booleans())


@settings(deadline=None, max_examples=60)
@given(COUNTS, SEEDS, st.booleans(), st.data())
def test_whoever_drops_out_no_layer_is_lost_or_doubled(count: int, seed: int, mixed: bool, data: st.DataObject) -> None:
    world = World(count, (32, 64), seed, mixed=mixed)
    when = data.draw(st.dictionaries(st.integers(0, count - 1), LEAVING, max_size=count))
    leaving = Gone(world, when)
    outcome = world.run()
    assert_all_or_nothing(world, outcome)
    assert len(outcome.models) != 1, "a model alone would be what one client trained"
    # Nobody who is there at the end goes empty-handed for somebody who left before anybody had committed.
    early = all(stage not in ("commit", "release") for stage, _, _ in when.values())
    left = world.layers.keys() - leaving.gone
    if early and len(left) >= 2 and not mixed and outcome.attempts < MOST_ATTEMPTS:
        assert outcome.models.keys() >= left


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("stage", STAGES[:4])
def test_who_drops_out_early_leaves_the_others_to_begin_anew(stage: str, heard: bool) -> None:
    world = World(4, (32,) * 5)
    Gone(world, {2: (stage, 0, heard)})
    outcome = world.run()
    assert sorted(outcome.models) == [0, 1, 3]
    assert outcome.failed == {2: "did not answer within 1 s"}
    assert outcome.attempts == (1 if stage == "hello" else 2)
    assert outcome.models == in_process(world, [0, 1, 3], attempt=outcome.attempts - 1)


def test_who_drops_out_at_release_has_its_model_handed_over_by_the_others() -> None:
    for heard in (False, True):
        world = World(4)
        Gone(world, dict.fromkeys((0, 1, 3), ("release", 0, heard)))
        outcome = world.run()
        assert outcome.models == in_process(world, [0, 1, 2, 3])
        assert not outcome.failed


def test_a_commit_that_is_lost_once_is_asked_for_again() -> None:
    for direction in ("down", "up"):
        world, lost = World(3), list[int]()

        def once(
            stage: str, slot: int, note: RelayMessage, lost: list[int] = lost
        ) -> RelayMessage | MissingRelayMessage:
            if stage == "commit" and slot == 1 and not lost:
                lost.append(slot)
                return MissingRelayMessage("did not answer")
            return note

        setattr(world, direction, once)
        outcome = world.run()
        assert lost == [1]
        assert outcome.models == in_process(world, [0, 1, 2])
        assert outcome.attempts == 1


@pytest.mark.parametrize("heard", [False, True])
def test_who_stays_away_at_commit_takes_the_round_with_it_and_no_model_is_shown(heard: bool) -> None:
    world = World(3)
    if heard:
        world.up = lambda stage, slot, note: MissingRelayMessage("gone") if (stage, slot) == ("commit", 1) else note
    else:
        world.down = lambda stage, slot, note: MissingRelayMessage("gone") if (stage, slot) == ("commit", 1) else note
    outcome = world.run()
    assert not outcome.models
    assert outcome.failed.keys() == {0, 1, 2}
    assert "has committed in round 1, so it does not begin again" in outcome.failed[0]
    assert not [stage for _, stage, _, _ in world.seen if stage == "release"]


def test_where_nobody_releases_nothing_is_known() -> None:
    world = World(3)
    world.down = lambda stage, slot, note: MissingRelayMessage("gone") if stage == "release" else note
    outcome = world.run()
    assert not outcome.models
    assert set(outcome.failed.values()) == {"rejected: no site released the key to its model."}


def test_releases_that_are_lost_are_asked_for_again() -> None:
    world, lost = World(3), list[int]()

    def first(stage: str, slot: int, note: RelayMessage) -> RelayMessage | MissingRelayMessage:
        if stage == "release" and slot not in lost:
            lost.append(slot)
            return MissingRelayMessage("did not answer")
        return note

    world.up = first
    assert world.run().models == in_process(world, [0, 1, 2])
    assert lost == [0, 1, 2]


def test_one_site_alone_keeps_its_model_to_itself() -> None:
    world = World(3)
    Gone(world, {1: ("offer", 0, False), 2: ("answer", 0, True)})
    outcome = world.run()
    assert not outcome.models
    assert outcome.failed[0].startswith("1 of at least 2 required sites were left for the exchange: model")
    assert outcome.attempts == 3


def test_a_site_may_want_more_company_than_the_server() -> None:
    world = World(3, fewest=3)
    Gone(world, {1: ("offer", 0, False)})
    outcome = world.run()
    assert not outcome.models
    assert "2 sites take part, but site-0 needs at least 3" in outcome.failed[0]
    assert outcome.attempts == MOST_ATTEMPTS


def test_many_attempts_end() -> None:
    world = World(5)
    world.up = lambda stage, slot, note: (
        MissingRelayMessage("no", refused=True) if (stage, slot) == ("offer", 0) else note
    )
    outcome = world.run()
    assert outcome.failed == dict.fromkeys(range(5), "the exchange was given up after 4 attempts: no")


# What it costs, and what lengths tell


def lengths(world: World) -> list[Any]:
    """Of all that passed, in its order. A signature is 102 to 104 bytes long, by random numbers of its own."""
    return [
        (way, stage, slot, {name: len(part) for name, part in note.parts.items() if not name.startswith("hello")})
        for way, stage, slot, note in world.seen
    ]


@quick
@given(SEEDS, SEEDS, CHANCES)
def test_lengths_and_order_do_not_tell_what_was_exchanged(seed: int, other: int, chance: float) -> None:
    worlds = [World(4, (32, 64, 16), seed), World(4, (32, 64, 16), other), World(4, (32, 64, 16), seed, chance)]
    for world in worlds:
        world.run()
    assert lengths(worlds[0]) == lengths(worlds[1]) == lengths(worlds[2])


def test_bytes_are_counted() -> None:
    world = World(4, (4000, 8000))
    outcome = world.run()
    assert outcome.bytes_up == sum(note.nbytes for way, _, _, note in world.seen if way == "up")
    assert outcome.bytes_down == sum(note.nbytes for way, stage, _, note in world.seen if way == "down")
    model = 12_000
    assert 4 * 2 * model < outcome.bytes_up < 4 * 2 * model * 1.2, "a board and a model from each"
    assert 4 * 3 * model < outcome.bytes_down < 4 * 3 * model * 1.2, "the others' boards to each"
