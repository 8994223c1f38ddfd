"""Tests of buffers that networks change: in the row, and separate per client."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedloom
from fedloom.errors import FedloomError
from fedloom.training.trainer import LocalSteps
from tests.support.trainers import Counting, begin, make_bench, numbered, sgd


def played(out: Path, model: Callable[[], nn.Module], engine: str) -> fedloom.RunResult:
    few = {"clients": 5, "clients_per_round": 4, "rounds": 3, "steps": 7, "engine": engine, "workers": 2}
    return fedloom.run(model=model, out=out, report=False, **few)


@pytest.mark.parametrize("persistent", [True, False])
def test_however_a_buffer_is_written_all_engines_do_the_same(tmp_path: Path, persistent: bool) -> None:
    runs = [
        played(tmp_path / write / engine, partial(Counting, write, persistent), engine)
        for write in ("in place", "anew")
        for engine in ("sequential", "multiprocess")
    ]
    assert len({run.digest for run in runs}) == 1
    assert len({run.accuracy for run in runs}) == 1
    # In each of three rounds a client takes seven steps; what is no part of the state begins with each of them anew.
    assert runs[0].model().get_buffer("seen").item() == (21 if persistent else 7)


@pytest.mark.parametrize("write", ["in place", "anew"])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_score_depends_on_the_row_alone_and_training_goes_on_as_before(write: str, persistent: bool) -> None:
    samples = numbered(12)

    def trained(scored: bool) -> tuple[Tensor, Tensor]:
        bench = begin(make_bench(Counting(write, persistent, 3, 2), batch_size=4), samples)
        bench.run_steps(LocalSteps(sgd, steps=3))
        if scored:
            other = bench.layout.empty()
            first, again = bench.evaluate(other, samples), bench.evaluate(other, samples)
            assert first.loss == again.loss
            assert not other.any()
        bench.run_steps(LocalSteps(sgd, steps=2))
        return bench.row.clone(), bench.module.get_buffer("count").clone()

    (row, count), (undisturbed, counted) = trained(scored=True), trained(scored=False)
    assert torch.equal(row, undisturbed)
    assert count.equal(counted)
    assert count.item() == (6 if persistent else 5)  # `begin` has buffers start at one


def test_a_client_that_starts_again_does_not_find_what_it_left_there() -> None:
    bench = begin(make_bench(Counting("anew", False, 3, 2), batch_size=4), numbered(12))
    bench.run_steps(LocalSteps(sgd, steps=3))
    first = bench.row.clone()
    bench.restart()
    bench.run_steps(LocalSteps(sgd, steps=3))
    assert torch.equal(bench.row, first)


class Longer(nn.Module):
    """Puts a buffer of another shape in the place of its own."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(3, 2)
        self.places: Tensor
        self.register_buffer("places", torch.zeros(1, 1), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.places) < len(x):
            self.places = torch.zeros(len(x), 1)
        y: Tensor = self.dense(x)
        return y + self.places[: len(x)]


def test_a_buffer_that_changes_its_shape_is_refused_where_it_is_part_of_the_model() -> None:
    bench = begin(make_bench(Longer(persistent=True), batch_size=4), numbered(12))
    with pytest.raises(FedloomError, match=r"a tensor of shape \(4, 1\) to its buffer places of shape \(1, 1\)"):
        bench.run_steps(LocalSteps(sgd, steps=1))
    bench = begin(make_bench(Longer(persistent=False), batch_size=4), numbered(12))
    bench.run_steps(LocalSteps(sgd, steps=3))
    assert bench.module.get_buffer("places").shape == (4, 1)
    bench.restart()
    assert bench.module.get_buffer("places").shape == (1, 1)
