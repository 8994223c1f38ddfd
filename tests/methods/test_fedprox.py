"""Tests of FedProx: its gradient, and equality with FedAvg."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.tasks import ClientTask, TaskMemory
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import build_small_run, small_run
from tests.support.task_rounds import in_round


def test_without_a_pull_it_is_fedavg_bit_for_bit() -> None:
    assert small_run("fedprox", {"fedprox": {"mu": 0.0}}).digest == small_run("fedavg", {}).digest


@given(st.floats(1e-4, 100))
@settings(max_examples=10, deadline=None)
def test_one_step_is_fedavg_for_any_pull(mu: float) -> None:
    """The first step starts at the received model, where the pull is zero."""
    one = {"steps": 1, "rounds": 2}
    assert small_run("fedprox", {"fedprox": {"mu": mu}}, **one).digest == small_run("fedavg", {}, **one).digest


def drift(experiment: BuiltRun) -> float:
    jobs = list(experiment.rounds.parts.server.dispatch(0, [1]))
    trained = experiment.layout.trainable
    (update,) = experiment.engine.train(in_round(0, jobs))
    return float((update.row - jobs[0].row)[:trained].norm())


def test_a_stronger_pull_keeps_clients_closer() -> None:
    drifts = []
    for mu in (0.0, 0.5, 5.0):
        with build_small_run("fedprox", {"fedprox": {"mu": mu}}, epochs=5).engine_closed() as experiment:
            drifts.append(drift(experiment))
    assert drifts[0] > drifts[1] > drifts[2] > 0


def test_the_pull_is_mu_times_the_way_gone_on_parameters_alone() -> None:
    with build_small_run("fedprox", {"fedprox": {"mu": 0.3}}).engine_closed() as experiment:
        local, bench = experiment.rounds.parts.client, experiment.engine._trainer
        layout = experiment.layout
        received, row = torch.randn(layout.size), torch.randn(layout.size)
        client = experiment.data.federated_data.client_samples(1)
        bench.start_task(ClientTask(1, received, round=0), TaskMemory(row.clone()), client)
        bench.row.copy_(row)
        bench.gradient.fill_(1.0)
        local.adjust_gradient(bench)
        expected = 1 + 0.3 * (row - received)[: layout.trainable]
        torch.testing.assert_close(bench.gradient, expected, rtol=1e-5, atol=1e-6)
        assert bench.gradient.numel() == layout.trainable < layout.floats
