"""Tests of SWA: snapshots, their mean, equality with FedAvg."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core.layout import TensorKind
from fedloom.core.tasks import ClientUpdate
from fedloom.methods.swa import swa_snapshot_steps
from fedloom.runs.build import BuiltRun
from fedloom.testing import check_method
from fedloom.testing.fixtures import build_small_run, small_run
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalTrainer
from tests.support.task_rounds import in_round


def trace(experiment: BuiltRun, client: int = 1) -> tuple[ClientUpdate, list[Tensor], list[float]]:
    """A client's update, the model after each of its steps, and the learning rate of each."""
    local, rows, rates = experiment.rounds.parts.client, [], []
    plain = local.training_step

    def noted(bench: LocalTrainer, batch: Batch) -> Tensor:
        loss = plain(bench, batch)
        rows.append(bench.row.clone())
        rates.append(bench.lr)
        return loss

    local.training_step = noted
    (update,) = experiment.engine.train(in_round(0, list(experiment.rounds.parts.server.dispatch(0, [client]))))
    return update, rows, rates


@pytest.mark.parametrize(
    ("total", "start", "snapshots", "expected"),
    [
        (32, 0.0, 4, [8, 16, 24, 32]),
        (32, 0.75, 4, [26, 28, 30, 32]),
        (10, 0.5, 2, [8, 10]),
        (3, 0.0, 8, [1, 2, 3]),
        (5, 0.9, 4, [5]),
        (0, 0.75, 4, []),
    ],
)
def test_snapshots_lie_evenly_after_the_start(total: int, start: float, snapshots: int, expected: list[int]) -> None:
    assert swa_snapshot_steps(total, start, snapshots) == expected


@given(st.integers(1, 300), st.floats(0, 0.99), st.integers(1, 400))
def test_the_last_snapshot_is_the_last_step(total: int, start: float, snapshots: int) -> None:
    steps = swa_snapshot_steps(total, start, snapshots)
    assert steps[-1] == total
    assert steps == sorted(set(steps))
    assert len(steps) == min(snapshots, total - int(start * total))
    assert steps[0] > start * total - 1


@pytest.mark.parametrize("options", [{}, {"start": 0.0, "snapshots": 3}, {"start": 0.0, "snapshots": 1000}])
def test_the_result_is_the_arithmetic_mean_of_the_snapshots(options: dict[str, Any]) -> None:
    with build_small_run("fedavg", {}, epochs=4).engine_closed() as experiment:
        _, iterates, _ = trace(experiment)
    with build_small_run("swa", {"swa": {**options, "estimate": False}}, epochs=4).engine_closed() as experiment:
        update, rows, _ = trace(experiment)
        layout = experiment.layout
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(rows, iterates, strict=True)), "no feedback"
        values = {"start": 0.75, "snapshots": 4} | options
        at = swa_snapshot_steps(len(rows), values["start"], values["snapshots"])
        assert len(at) > 1
        mean = torch.stack([iterates[i - 1] for i in at])[:, : layout.floats].double().mean(0).float()
        torch.testing.assert_close(update.row[: layout.floats], mean, rtol=1e-5, atol=1e-6)
        assert not torch.equal(update.row[: layout.floats], iterates[-1][: layout.floats])
        pairs = (layout.views(row, TensorKind.INTEGER) for row in (update.row, iterates[-1]))
        assert all(torch.equal(mine, last) for mine, last in zip(*pairs, strict=True)), "counters are not averaged"


@pytest.mark.parametrize("start", [0.0, 0.3, 0.9])
def test_one_snapshot_is_fedavg_bit_for_bit(start: float) -> None:
    for settings_ in ({"epochs": 3}, {"steps": 4}, {"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}):
        options = {"swa": {"snapshots": 1, "start": start}}
        assert small_run("swa", options, **settings_).digest == small_run("fedavg", {}, **settings_).digest
    assert small_run("swa", {"swa": {"start": 0.0}}).digest != small_run("fedavg", {}).digest


def test_weights_that_stand_still_stay_exactly_as_they_are() -> None:
    with build_small_run("swa", {"swa": {"start": 0.0, "snapshots": 7}}, lr=0.0).engine_closed() as experiment:
        update, rows, _ = trace(experiment)
        assert len(rows) > 3
        trainable = experiment.layout.trainable
        assert torch.equal(update.row[:trainable], experiment.rounds.context.initial[:trainable])


def test_a_cyclic_rate_falls_within_each_cycle_and_momentum_goes_on() -> None:
    options = {"swa": {"start": 0.5, "snapshots": 2, "lr_end": 0.1}}
    with build_small_run("swa", options, steps=8, lr=0.2).engine_closed() as experiment:
        update, _, rates = trace(experiment)
    assert rates == pytest.approx([0.2] * 4 + [0.2 * 0.55, 0.2 * 0.1] * 2)
    assert update.steps == 8
    almost = {"swa": {"start": 0.5, "snapshots": 2, "lr_end": 1 - 1e-12}}
    constant = {"swa": {"start": 0.5, "snapshots": 2}}
    with build_small_run("swa", almost, steps=8, momentum=0.9).engine_closed() as experiment:
        mine, _, _ = trace(experiment)
        row = mine.row.clone()
    with build_small_run("swa", constant, steps=8, momentum=0.9).engine_closed() as experiment:
        theirs, _, _ = trace(experiment)
        torch.testing.assert_close(row, theirs.row, rtol=1e-5, atol=1e-7)


@settings(max_examples=5, deadline=None)
@given(st.integers(2, 9))
def test_the_budget_is_fedavgs(snapshots: int) -> None:
    with build_small_run("swa", {"swa": {"snapshots": snapshots}}, epochs=3).engine_closed() as experiment:
        update, rows, _ = trace(experiment)
        samples = experiment.data.federated_data.num_examples(1)
        assert update.steps == len(rows) == 3 * -(-samples // 8)


def test_it_composes_and_keeps_the_contract_with_a_cyclic_rate() -> None:
    check_method("fedcross+swa", {"swa": {"lr_end": 0.2, "start": 0.0, "snapshots": 2}})
