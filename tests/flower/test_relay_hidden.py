"""The sealed exchange with layers that only sites can open: the server gets their mean and no layer."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_world import Gone, World, assert_all_or_nothing, in_process, mean_of, opened, traces

from fedloom.flower.notes import Note, Silence
from fedloom.flower.relay import Outcome
from fedloom.flower.sealed import ModelsKey, Refusal
from fedloom.flower.stages import serve

STAGES = ("hello", "offer", "answer", "lock", "commit", "release", "mean")
SEEDS = st.integers(0, 2**32 - 1)


def means(world: World, slots: list[int]) -> list[bytes]:
    """What the mean over these sites must be, in the order in which their models hold the layers."""
    models = in_process(world, slots, world.relay.result.attempts - 1)
    return [mean_of([models[slot][number] for slot in sorted(models)]) for number in range(world.terms.layers)]


def in_the_clear(world: World, outcome: Outcome) -> Outcome:
    return replace(outcome, models=opened(world, outcome))


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 5), st.lists(st.integers(1, 24).map(lambda n: 4 * n), min_size=1, max_size=7), SEEDS)
def test_models_are_those_of_the_exchange_in_one_process_and_the_mean_is_theirs(
    count: int, sizes: list[int], seed: int
) -> None:
    world = World(count, tuple(sizes), seed, hidden=True)
    outcome = world.run()
    assert opened(world, outcome) == in_process(world, list(range(count)))
    assert outcome.mean == means(world, list(range(count)))
    # And by the arithmetic of anybody: layers change owners, their sum does not.
    for number, mean in enumerate(outcome.mean):
        trained = np.stack([np.frombuffer(layers[number], np.float32) for layers in world.layers.values()])
        np.testing.assert_allclose(np.frombuffer(mean, np.float32), trained.mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_mean_is_of_what_is_handed_over_after_the_last_of_several_exchanges(seed: int) -> None:
    """Half of all models of two layers are whole after one exchange, so these worlds exchange again."""
    world = World(4, (32, 64), seed, mixed=True, hidden=True)
    outcome = world.run()
    assert outcome.exchanges > 1
    assert not outcome.lost
    assert opened(world, outcome) == in_process(world, [0, 1, 2, 3])
    assert outcome.mean == means(world, [0, 1, 2, 3])


@pytest.mark.parametrize("mixed", [False, True])
def test_nothing_that_the_server_ever_has_is_a_layer(mixed: bool) -> None:
    world = World(4, (64, 32, 128, 64), mixed=mixed, hidden=True)
    outcome = world.run()
    assert len(outcome.models) == 4
    had = b"".join(part for _, _, _, note in world.seen for part in note.parts.values())
    had += b"".join(layer for layers in outcome.models.values() for layer in layers) + b"".join(outcome.mean)
    searched = [piece for layers in world.layers.values() for layer in layers for piece in traces(layer)]
    assert len(searched) > 1000
    assert not [piece for piece in searched if piece in had]
    # The search finds what is there: the same with a server that opens layers.
    openly = World(4, (64, 32, 128, 64), mixed=mixed).run()
    had = b"".join(layer for layers in openly.models.values() for layer in layers)
    assert sum(piece in had for piece in searched) >= len(searched) // 8


def test_the_work_is_shared_by_the_sites() -> None:
    world = World(3, (16,) * 7, hidden=True)
    world.run()
    asked = {
        slot: set(note.parts) - {"slots"} for way, stage, slot, note in world.seen if (way, stage) == ("down", "mean")
    }
    assert {slot: len(layers) for slot, layers in asked.items()} == {0: 3, 1: 2, 2: 2}, "a part for a layer of all"
    assert set.union(*asked.values()) == {f"layer/{number}" for number in range(7)}


@pytest.mark.parametrize(
    ("slots", "parts", "why"),
    [
        ("0 1 x", {}, "slots must be whole numbers, not b'0 1 x'"),
        ("0 1 2", {"layer/4": b""}, "models have 4 layers, and no layer 4"),
        ("0 1", {"layer/0": b"1234"}, "layer 0 of all models has 4 bytes, not"),
        ("0 0 1", {"layer/0": None}, "a mean of layer 0 would not be that of all models"),
        ("1 0 2", {"layer/0": None}, "layer 0 of slot 1 is not what site-1#1 handed over"),
        ("", {"layer/0": b""}, "a mean of layer 0 would not be that of all models"),
    ],
)
def test_a_question_for_means_that_makes_no_sense_is_refused(
    slots: str, parts: dict[str, bytes | None], why: str
) -> None:
    world = World(3, (16,) * 4, hidden=True)
    outcome = world.run()
    right = b"".join(outcome.models[slot][0] for slot in sorted(outcome.models))
    given = {name: right if part is None else part for name, part in parts.items()}
    asked = Note({}, {"slots": b"0 1 2", "layer/0": right})
    assert serve(world.sites[0], "mean", asked).by_slot("mean") == {0: outcome.mean[0]}
    with pytest.raises(Refusal, match=why):
        serve(world.sites[0], "mean", Note({}, {"slots": slots.encode(), **given}))


# Drop-outs


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("gone", [[0], [1, 2], [0, 1, 3]])
def test_what_a_site_does_not_compute_another_does(gone: list[int], heard: bool) -> None:
    world = World(4, (16,) * 6, hidden=True)
    Gone(world, dict.fromkeys(gone, ("mean", 0, heard)))
    outcome = world.run()
    assert not outcome.lost
    assert outcome.mean == means(world, [0, 1, 2, 3])


def test_without_a_mean_nothing_has_happened() -> None:
    world = World(3, hidden=True)
    Gone(world, dict.fromkeys(range(3), ("mean", 0, False)))
    outcome = world.run()
    assert not outcome.models
    assert not outcome.mean
    assert set(outcome.lost) == {0, 1, 2}
    assert outcome.lost[2] == "no site gave the mean of the models: slot 1 at mean: did not answer within 1 s"


LEAVING = st.tuples(st.sampled_from(STAGES), st.integers(0, 1), st.booleans())


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 5), SEEDS, st.booleans(), st.data())
def test_whoever_drops_out_no_layer_is_lost_or_doubled(count: int, seed: int, mixed: bool, data: st.DataObject) -> None:
    world = World(count, (32, 64), seed, mixed=mixed, hidden=True)
    Gone(world, data.draw(st.dictionaries(st.integers(0, count - 1), LEAVING, max_size=count)))
    outcome = world.run()
    assert_all_or_nothing(world, in_the_clear(world, outcome))
    assert bool(outcome.mean) == bool(outcome.models)
    if outcome.models:
        assert outcome.mean == means(world, sorted(outcome.models))


@pytest.mark.parametrize("short", [b"", b"\0" * 4])
def test_a_mean_of_another_size_is_not_taken(short: bytes) -> None:
    world = World(3, (16, 32, 64), hidden=True)

    def cut(stage: str, slot: int, note: Note) -> Note:
        if (stage, slot) != ("mean", 1):
            return note
        return Note(note.header, {name: part[: len(short)] for name, part in note.parts.items()})

    world.up = cut
    assert world.run().mean == means(world, [0, 1, 2])


def test_nor_a_mean_that_was_not_asked_for() -> None:
    world = World(3, (16, 16, 16), hidden=True)
    world.up = lambda stage, slot, note: (
        Note(note.header, {**note.parts, **{f"mean/{k}": bytes(16) for k in range(3) if k != slot}})
        if stage == "mean"
        else note
    )
    assert world.run().mean == means(world, [0, 1, 2])


# A server that asks for something else


def asking(ask: Callable[[dict[int, dict[int, bytes]]], dict[int, dict[int, bytes]]]) -> tuple[World, str]:
    """A world in which the relay has done its work; what a site says to layers that a server has put together."""
    world = World(4, (32, 32, 32), hidden=True)
    outcome = world.run()
    layers = {number: {slot: model[number] for slot, model in outcome.models.items()} for number in range(3)}
    with pytest.raises(Refusal) as refusal:
        world.sites[2].mean(0, 0, ask(layers))
    return world, str(refusal.value)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda all_: {0: dict.fromkeys(range(4), all_[0][3])}, "is not what site-0#0 handed over"),
        (lambda all_: {0: {3: all_[0][3]}}, "would not be that of all models"),
        (lambda all_: {0: {}}, "would not be that of all models"),
        (lambda all_: {0: {slot: all_[0][slot] for slot in (0, 1, 2)}}, "would not be that of all models"),
        (lambda all_: {0: {**all_[0], 4: all_[0][3]}}, "would not be that of all models"),
        (lambda all_: {1: all_[0]}, "is not what site-0#0 handed over"),
        (lambda all_: {7: all_[0]}, "would not be that of all models"),
        (lambda all_: {0: {**all_[0], 1: all_[0][0]}}, "layer 0 of slot 1 is not what site-1#1 handed over"),
        (lambda all_: {0: {**all_[0], 0: all_[0][1], 1: all_[0][0]}}, "is not what site-0#0 handed over"),
        (lambda all_: {0: all_[0], 1: {**all_[1], 3: bytes(80)}}, "layer 1 of slot 3 is not what site-3#3 handed over"),
    ],
)
def test_a_site_computes_that_one_mean_and_no_other(
    ask: Callable[[dict[int, dict[int, bytes]]], dict[int, dict[int, bytes]]], words: str
) -> None:
    _, said = asking(ask)
    assert words in said


def test_layers_that_the_server_made_itself_are_refused() -> None:
    """It knows the public key, and could seal what it likes; with all but one of its own it would have that one."""
    other = World(4, (32, 32, 32), hidden=True)
    made = other.run()
    _, said = asking(lambda all_: {0: {slot: all_[0][3] if slot == 3 else made.models[slot][0] for slot in range(4)}})
    assert "is not what site-0#0 handed over" in said


def test_it_is_computed_after_the_site_has_committed_itself_and_for_that_attempt() -> None:
    world = World(3, (32, 32), hidden=True)
    early: list[str] = []

    def first(stage: str, slot: int, note: Note) -> Note:
        if stage == "commit":
            with pytest.raises(Refusal) as refusal:
                world.sites[slot].mean(0, 0, {})
            early.append(str(refusal.value))
        return note

    world.down = first
    outcome = world.run()
    assert early == [f"site-{k}#{k} has not committed itself in attempt 0 of round 1." for k in range(3)]
    layers = {0: {slot: model[0] for slot, model in outcome.models.items()}}
    site = world.sites[1]
    said = site.mean(0, 0, layers)
    assert (said.means, said.sealed, said.inventory) == ({0: outcome.mean[0]}, {}, outcome.inventory)
    for attempt, exchange in ((1, 0), (0, 1)):
        with pytest.raises(Refusal, match="has not committed itself in attempt"):
            site.mean(attempt, exchange, layers)


def test_a_site_without_the_key_computes_none() -> None:
    world = World(3, (32, 32))
    outcome = world.run()
    with pytest.raises(Refusal, match="has no key to open layers with"):
        world.sites[0].mean(0, 0, {0: {slot: model[0] for slot, model in outcome.models.items()}})


def test_a_site_that_says_too_much_of_what_it_hands_over_is_left_out() -> None:
    world = World(3, (32, 32), hidden=True)
    site = world.sites[1]
    whole = site._whole
    site._whole = lambda now: whole(now) + bytes(32)  # type: ignore[method-assign]
    outcome = world.run()
    assert outcome.models.keys() == {0, 2}
    assert outcome.mean == means(world, [0, 2])
    assert "the lock of site-1#1 has 97 bytes, not 65" in " ".join(world.said)


def test_a_layer_that_was_changed_after_it_was_sealed_spoils_the_round_and_nothing_else() -> None:
    world = World(3, (32, 32), hidden=True)
    model = world.sites[1]._model

    def other(now: object) -> list[bytes]:
        layers = model(now)  # type: ignore[arg-type]
        return [layers[0], layers[1][:-1] + bytes([layers[1][-1] ^ 1])]

    world.sites[1]._model = other  # type: ignore[method-assign]
    outcome = world.run()
    assert not outcome.models
    assert "no site gave the mean of the models" in outcome.lost[0]
    assert "is not sealed for this key, this round and this place" in outcome.lost[0]


def test_a_layer_that_is_handed_over_twice_is_seen_by_its_seal() -> None:
    world = World(3, (32, 32), hidden=True)
    boards: dict[int, list[bytes]] = {}
    for slot in (0, 1):
        model = world.sites[slot]._model

        def same(now: object, slot: int = slot, model: Callable[..., list[bytes]] = model) -> list[bytes]:
            boards[slot] = model(now)
            return [boards[0][0], boards[slot][1]]

        world.sites[slot]._model = same  # type: ignore[method-assign]
    outcome = world.run()
    assert not outcome.models
    assert not outcome.mean
    assert outcome.lost[2] == "refused: slots 0 and 1 have handed over the same layer 0."
    assert not [stage for _, stage, _, _ in world.seen if stage == "mean"]


def test_the_key_of_another_federation_opens_nothing() -> None:
    world = World(3, hidden=True)
    outcome = world.run()
    assert outcome.session is not None
    with pytest.raises(Refusal, match="is not sealed for this key"):
        ModelsKey().open(outcome.models[0][0], outcome.session, 0)
    elsewhere = [replace(outcome.session, **change) for change in ({"round": 1}, {"attempt": 1}, {"run": "cd" * 16})]
    for session, number in (*((session, 0) for session in elsewhere), (outcome.session, 1)):
        with pytest.raises(Refusal, match="is not sealed for this key"):
            world.key.open(outcome.models[0][0], session, number)


def test_lengths_and_order_do_not_tell_what_was_exchanged() -> None:
    def lengths(world: World) -> list[object]:
        world.run()
        return [
            (way, stage, slot, {name: len(part) for name, part in note.parts.items() if not name.startswith("hello")})
            for way, stage, slot, note in world.seen
        ]

    first = lengths(World(4, (32, 64, 16), 1, hidden=True))
    assert first == lengths(World(4, (32, 64, 16), 2, hidden=True))
    assert first == lengths(World(4, (32, 64, 16), 3, chance=1.0, hidden=True))


def test_what_is_lost_once_at_mean_is_asked_of_another_and_counted() -> None:
    world, lost = World(3, (4000, 8000), hidden=True), list[int]()

    def once(stage: str, slot: int, note: Note) -> Note | Silence:
        if stage == "mean" and not lost:
            lost.append(slot)
            return Silence("did not answer")
        return note

    world.up = once
    outcome = world.run()
    assert lost == [0]
    assert outcome.bytes_up == sum(
        note.nbytes for way, stage, slot, note in world.seen if way == "up" and (stage, slot) != ("mean", 0)
    )
    assert outcome.bytes_down == sum(note.nbytes for way, _, _, note in world.seen if way == "down")
    model = 12_000
    assert 3 * 2 * model + model < outcome.bytes_up < (3 * 2 * model + model) * 1.2, "a mean more than without"
