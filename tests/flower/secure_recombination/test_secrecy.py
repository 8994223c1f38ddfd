"""Tests that the secure exchange sends no layer in the clear and no key early."""

import pytest

from fedloom.flower.secure_recombination.relay import MissingRelayMessage
from tests.support.relay_fixtures import World, traces


def exposed(world: World, content: bytes) -> int:
    return sum(piece in content for layers in world.layers.values() for layer in layers for piece in traces(layer))


@pytest.mark.parametrize("mixed", [False, True])
def test_no_piece_of_a_layer_passes_in_the_clear(mixed: bool) -> None:
    world = World(4, (64, 128, 256), mixed=mixed)
    world.up = lambda stage, slot, note: MissingRelayMessage("late") if (stage, slot) == ("lock", 3) else note
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
            if own != site.model_index:
                held = b"".join(site._model(now))
                assert not any(piece in held for layer in world.layers[own] for piece in traces(layer))
