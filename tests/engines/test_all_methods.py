"""Tests of every method on every engine over whole rounds.

They include the work of servers, extras and refiners.
"""

import pytest
import torch
from torch import Tensor

from fedloom.core.layout import TensorKind
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.methods.registry import BUILT_IN
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import build_small_run
from tests.support.core_methods import CORE_METHODS
from tests.support.fake_graphs import FakeGraphTape
from tests.support.quick_options import QUICK

ROUNDS = 3


def made(name: str, engine: str = "sequential") -> BuiltRun:
    settings = {"engine": engine, "workers": 2, "rounds": ROUNDS, "clients_per_round": 6, "lr_decay": 0.9}
    return build_small_run(name, {name: QUICK[name]} if name in QUICK else {}, **settings)


def rounds_of(experiment: BuiltRun) -> list[Tensor]:
    """The deployed model after each round, and what clients with models of their own make of it."""
    rows = []
    for round in range(ROUNDS):
        record = experiment.rounds.run_round(round)
        assert not record["failed"], record["failed_clients"]
        rows.append(experiment.rounds.global_model().clone())
        if (personal := record.get("personal_accuracy_mean")) is not None:
            rows.append(torch.tensor(personal))
    return rows


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_worker_processes_do_what_the_plain_engine_does_to_the_bit(name: str) -> None:
    found = []
    for engine in ("sequential", "multiprocess"):
        with made(name, engine).engine_closed() as experiment:
            found.append(rounds_of(experiment))
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_recorded_steps_on_slots_do_what_the_plain_engine_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA engine's logic on the CPU, with recordings that keep addresses and numbers, as CUDA graphs do."""
    with made(name).engine_closed() as plain:
        expected = rounds_of(plain)
    monkeypatch.setattr("fedloom.engines.cuda.slot.make_graph_runner", lambda *_: FakeGraphTape())
    monkeypatch.setattr("fedloom.engines.cuda.slot.STEPS_PER_GRAPH", 3)
    with made(name).engine_closed() as experiment:
        engine = experiment.rounds.engine = CudaEngine(experiment.engine.context, "cpu", 2)
        found, layout = rounds_of(experiment), experiment.layout
    assert sum(slot.graph_runner.replayed for slot in engine.slots) > 0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, equal_nan=True)
        if ours.dim():
            pairs = (layout.views(row, TensorKind.INTEGER) for row in (ours, theirs))
            assert all(torch.equal(mine, other) for mine, other in zip(*pairs, strict=True))
