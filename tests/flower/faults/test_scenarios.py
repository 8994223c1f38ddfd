"""Tests that run every fault scenario with real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from benchmarks.flower.deployment import Deployment, open_deployment
from benchmarks.flower.scenarios import SCENARIOS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder: Path = tmp_path_factory.mktemp("deployment")
    with open_deployment(folder) as deployment:
        yield deployment


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_run_ends_well(name: str, deployment: Deployment) -> None:
    deployment.reset()
    found = SCENARIOS[name](deployment)
    assert found
    assert all(row.same_digest and row.said for row in found)
