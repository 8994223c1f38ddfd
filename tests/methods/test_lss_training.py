"""Tests of LSS: training of the members, optimizer and statistics."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedloom.testing import check_method
from fedloom.testing.fixtures import simple_network, small_run
from tests.support.lss_trainers import AUTHORS, grow, network, seat, soup

pytestmark = pytest.mark.usefixtures("one_thread")


@given(st.integers(0, 7), st.integers(1, 6), st.integers(1, 45))
@settings(deadline=None, max_examples=25)
def test_shared_epochs_are_the_work_of_fedavg(epochs: int, models: int, count: int) -> None:
    bench = seat(count=count, epochs=epochs)
    grow(soup(models=models, share=True), bench)
    assert bench.steps == epochs * -(-count // 10)
    bench = seat(count=count, epochs=epochs)
    grow(soup(models=models), bench)
    assert bench.steps == models * epochs * -(-count // 10)


def test_members_may_have_epochs_or_steps_of_their_own() -> None:
    for options, steps in (({"epochs": 2}, 24), ({"steps": 5}, 15), ({"epochs": 1, "first_epochs": 3}, 20)):
        bench = seat(epochs=4)
        grow(soup(models=3, **options), bench)
        assert bench.steps == steps


@pytest.mark.parametrize(("new", "made"), [(True, 3), (False, 1)])
def test_each_member_has_its_own_optimiser_if_asked(new: bool, made: int) -> None:
    bench, seen = seat(momentum=0.9), []
    grow(soup(models=3, new_optimizer=new), bench, lambda i: seen.append(bench.optimizer))
    assert len({id(optimizer) for optimizer in seen}) == made


# batch norm


@pytest.mark.parametrize("options", [{}, {"include_init": False}])
def test_there_is_one_set_of_statistics_which_every_step_updates(options: dict[str, Any]) -> None:
    bench = seat(module=network(nn.BatchNorm1d(4)))
    grow(soup(models=3, **options), bench)
    named = bench.layout.state_dict(bench.row)
    assert int(named["2.num_batches_tracked"]) == bench.steps == 12
    assert not torch.equal(named["2.running_mean"], torch.zeros(4, dtype=torch.float64))


def test_its_own_estimate_is_that_of_the_run() -> None:
    rows = {}
    for name, options, run in (("own", {"estimate": True}, "running"), ("run", {}, "estimated"), ("no", {}, "running")):
        bench = seat(module=network(nn.BatchNorm1d(4)), statistics=run)
        grow(soup(models=2, **options), bench)
        bench.finish_task()
        rows[name] = bench.row.clone()
    assert torch.equal(rows["own"], rows["run"])
    assert not torch.equal(rows["own"], rows["no"])


# the contract


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [AUTHORS, {"share": True, "first_alone": True, "estimate": True, "distance": "l2"}])
def test_conformance_with_other_options(options: dict[str, Any]) -> None:
    check_method("lss", {"lss": options})


def test_it_composes_with_a_server_that_keeps_many_models() -> None:
    finished = small_run("fedcross+lss", {"lss": {"models": 2}}, rounds=8, model=simple_network, epochs=2)
    losses = [record["loss"] for record in finished.records]
    assert losses[-1] < 0.9 * losses[0]
