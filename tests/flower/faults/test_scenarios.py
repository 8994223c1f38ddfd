"""Every scenario of benchmarks/flower_scenarios.py, with real processes; each judges its run by itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flower_scenarios import SCENARIOS
from flower_world import World, a_world

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder: Path = tmp_path_factory.mktemp("world")
    with a_world(folder) as world:
        yield world


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_run_ends_well(name: str, world: World) -> None:
    world.ready()
    found = SCENARIOS[name](world)
    assert found
    assert all(row.same_digest and row.said for row in found)
