"""Tests of FedExP: the step, its limits, and the global model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.fedexp import fedexp_step_size
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import build_small_run, small_run


def collect(experiment: BuiltRun, changes: list[Tensor], samples: list[int] | None = None) -> float:
    """One round in which clients return the model with these changes of its first columns; eta_g."""
    server = experiment.rounds.parts.server
    row, updates = server.bank.rows[0].clone(), []
    for client, change in enumerate(changes):
        answer = row.clone()
        answer[: len(change)] += change
        count = samples[client] if samples else 5
        updates.append(ClientUpdate(ClientTask(client, row), answer, num_examples=count, loss=1.0, steps=1))
    server.aggregate(0, iter(updates))
    return server.diagnostics()["eta_g"]


def made(**options: object) -> BuiltRun:
    return build_small_run("fedexp", {"fedexp": options})


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_orthogonal_updates_of_one_length_give_half_their_number(count: int) -> None:
    with made(epsilon=0.0).engine_closed() as experiment:
        before = experiment.rounds.parts.server.bank.rows[0].clone()
        eta = collect(experiment, list(0.5 * torch.eye(count)))
        assert eta == pytest.approx(max(1.0, count / 2), rel=1e-5)
        moved = (experiment.rounds.parts.server.bank.rows[0] - before)[:count]
        torch.testing.assert_close(moved, torch.full((count,), 0.5 * eta / count), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [1, 4])
def test_identical_updates_or_a_single_one_give_the_mean(count: int) -> None:
    with made(epsilon=0.0).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        expected = server.bank.rows[0].clone()
        change = torch.randn(experiment.layout.trainable)
        expected[: len(change)] += change
        assert collect(experiment, [change] * count) == 1.0
        assert torch.equal(server.bank.rows[0], expected)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 10))
@settings(deadline=None)
def test_the_step_is_never_below_one_and_always_a_number(squares: float, square: float, epsilon: float) -> None:
    eta = fedexp_step_size(squares, square, epsilon)
    assert eta >= 1.0
    assert eta == eta


def test_updates_that_are_zero_or_cancel_leave_the_model_finite() -> None:
    for epsilon, changes in ((0.0, [torch.zeros(3)] * 3), (1e-3, [torch.ones(3), -torch.ones(3)])):
        with made(epsilon=epsilon).engine_closed() as experiment:
            before = experiment.rounds.parts.server.bank.rows[0].clone()
            collect(experiment, changes)
            now = experiment.rounds.parts.server.bank.rows[0]
            torch.testing.assert_close(now, before, rtol=0, atol=1e-3, equal_nan=True)
            assert experiment.layout.is_finite(now)


def test_epsilon_dampens() -> None:
    etas = []
    for epsilon in (0.0, 0.001, 100.0):
        with made(epsilon=epsilon).engine_closed() as experiment:
            etas.append(collect(experiment, list(0.1 * torch.eye(6))))
    assert etas[0] > etas[1] > etas[2] == 1.0


def test_clients_count_by_their_samples_in_both_sums() -> None:
    """A client that has nearly all samples is nearly alone."""
    with made(epsilon=0.0).engine_closed() as experiment:
        assert collect(experiment, list(torch.eye(4)), samples=[10**6, 1, 1, 1]) == 1.0
    with made(epsilon=0.0, weighting="uniform").engine_closed() as experiment:
        assert collect(experiment, list(torch.eye(4)), samples=[10**6, 1, 1, 1]) == pytest.approx(2.0, rel=1e-5)


def test_buffers_are_the_plain_mean_and_count_in_no_norm() -> None:
    with made(epsilon=0.0).engine_closed() as experiment:
        layout, server = experiment.layout, experiment.rounds.parts.server
        before = server.bank.rows[0].clone()
        changes = torch.zeros(6, layout.floats)
        changes[:, :6] = torch.eye(6)
        changes[:, layout.trainable :] = torch.arange(6.0)[:, None] - 2
        assert collect(experiment, list(changes)) == pytest.approx(3.0, rel=1e-5)
        buffers = slice(layout.trainable, layout.floats)
        torch.testing.assert_close(server.bank.rows[0, buffers], before[buffers] + 0.5, rtol=1e-5, atol=1e-6)


def test_the_mean_of_the_last_two_is_deployed_and_the_last_is_trained_on() -> None:
    with made().engine_closed() as experiment:
        server, floats, seen = experiment.rounds.parts.server, experiment.layout.floats, []
        for number in range(3):
            experiment.rounds.run_round(number)
            seen.append(server.bank.rows[0].clone())
            assert torch.equal(next(iter(server.dispatch(number + 1, [0]))).row, seen[-1])
            if number == 0:
                assert torch.equal(server.global_model(), seen[0]), "after the first round there is only one"
            else:
                mean = (seen[-1] + seen[-2])[:floats] / 2
                torch.testing.assert_close(server.global_model()[:floats], mean, rtol=1e-5, atol=1e-6)
        kept = server.global_model().clone()
        server.aggregate(3, iter([]))
        assert torch.equal(server.global_model(), kept)


def test_a_large_epsilon_without_averaging_is_fedavg() -> None:
    neutral = {"epsilon": 1e300, "average": False}
    assert small_run("fedexp", {"fedexp": neutral}).digest == small_run("fedavg", {}).digest
    uniform = small_run("fedexp", {"fedexp": {**neutral, "weighting": "uniform"}}).digest
    assert uniform == small_run("fedavg", {"fedavg": {"weighting": "uniform"}}).digest
