"""Tests of evaluation by captured graphs, on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fedloom.testing.fixtures import build_small_run
from tests.support.cuda_engine import cuda_of, jobs_for
from tests.support.fake_graphs import FakeGraphTape, fake_tape


def test_a_recording_has_no_hold_of_everyones_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails would leave it believing for ever that it is being recorded."""
    lent, inside = list[torch.Generator](), list[bool]()
    capture = FakeGraphTape.capture

    @contextmanager
    def lending(generator: torch.Generator, device: torch.device) -> Iterator[None]:
        lent.append(generator)
        yield
        lent.pop()

    def noted(self: FakeGraphTape, *given: object) -> object:
        inside.append(tuple(lent) == self._generators)
        return capture(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr("fedloom.engines.cuda.graph_evaluator.make_graph_runner", fake_tape)
    monkeypatch.setattr("fedloom.engines.cuda.graph_evaluator.use_generator", lending)
    monkeypatch.setattr(FakeGraphTape, "capture", noted)
    with build_small_run("fedavg", {}, engine="sequential").engine_closed() as plain:
        engine, (job,) = cuda_of(plain), jobs_for(plain, [0])
        scores = [engine.evaluate(job.row) for _ in range(4)]
        expected = plain.engine.evaluate(job.row)
    assert inside == [True]
    assert expected is not None
    for score in scores:
        assert score is not None
        assert score.loss == pytest.approx(expected.loss, rel=1e-6)
