"""Fixtures of the tests of the CUDA engine."""

import pytest

from tests.support.fake_graphs import fake_tape


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings that keep addresses and numbers, as CUDA graphs do."""
    monkeypatch.setattr("fedloom.engines.cuda.engine.LEAD", 0)
    monkeypatch.setattr("fedloom.engines.cuda.slot.make_graph_runner", fake_tape)
    monkeypatch.setattr("fedloom.engines.cuda.slot.STEPS_PER_GRAPH", 3)
