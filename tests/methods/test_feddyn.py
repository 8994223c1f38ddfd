"""Tests of FedDyn: invariants, first round, convergence."""

from pathlib import Path

import pytest
import torch

import fedloom
from fedloom.core.layout import TensorKind
from fedloom.testing import check_method
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run, small_run
from tests.support.quadratics import Point, Quadratics

UNIFORM = {"fedavg": {"weighting": "uniform"}}


def test_h_is_always_the_mean_of_all_g() -> None:
    with build_small_run("feddyn", {"feddyn": {"alpha": 0.1}}).engine_closed() as experiment:
        for number in range(5):
            experiment.rounds.run_round(number)
            homes = experiment.engine.client_states
            total = sum(homes.get(client)["g"].double() for client in homes.client_ids())
            h = experiment.rounds.parts.server.h.double()
            torch.testing.assert_close(h, total / len(experiment.data.federated_data), rtol=1e-4, atol=1e-7)
        assert len(homes) > 4
        assert h.norm() > 0


@pytest.mark.parametrize("alpha", [0.01, 0.5])
def test_in_the_first_round_clients_do_what_fedprox_does(alpha: float) -> None:
    def run(method: str, options: dict, rounds: int) -> str:
        return small_run(method, options, rounds=rounds, epochs=2).digest

    own, prox = {"feddyn": {"alpha": alpha}}, {"fedprox": {"mu": alpha}, **UNIFORM}
    assert run("feddyn", own, 1) == run("fedprox", prox, 1)
    assert run("feddyn", own, 2) != run("fedprox", prox, 2)


@pytest.mark.parametrize("clients_per_round", [4, 8])
def test_after_the_first_round_the_model_runs_ahead_of_the_mean_by_the_share_of_clients(clients_per_round: int) -> None:
    with build_small_run("feddyn", {}, clients_per_round=clients_per_round).engine_closed() as experiment:
        server, layout = experiment.rounds.parts.server, experiment.layout
        start = experiment.rounds.context.initial[: layout.trainable]
        experiment.rounds.run_round(0)
        w, m = server.bank.rows
        ahead = m[: layout.trainable] + clients_per_round / 8 * (m[: layout.trainable] - start)
        torch.testing.assert_close(w[: layout.trainable], ahead, rtol=1e-4, atol=1e-6)
        assert torch.equal(w[layout.trainable :], m[layout.trainable :]), "buffers are the plain mean"
        assert torch.equal(server.global_model(), m)


def test_it_finds_the_minimum_of_clients_that_disagree_and_fedavg_does_not(tmp_path: Path) -> None:
    federation, found = Quadratics(), {}
    best = federation.minimiser()
    for method, options in (("feddyn", {"feddyn": {"alpha": 1.0}}), ("fedavg", UNIFORM)):
        settings = {"rounds": 60, "epochs": 100, "lr": 0.1, "batch_size": 0, "engine": "sequential", "report": False}
        run = fedloom.run(method, federation, Point, options=options, out=tmp_path / method, **settings)
        found[method] = run.model().v.detach()
    torch.testing.assert_close(found["feddyn"], best, rtol=1e-3, atol=1e-3)
    assert (found["fedavg"] - best).norm() > 0.1


def test_a_refused_update_leaves_g_alone() -> None:
    experiment = build_small_run("feddyn", {})
    with experiment.engine_closed():
        experiment.engine.context.data._clients = SmallFederatedDataset(poisoned=3)._clients
        for number in range(3):
            experiment.rounds.run_round(number)
        assert 3 not in experiment.engine.client_states
        assert experiment.layout.is_finite(experiment.rounds.parts.server.global_model())


def test_running_variances_stay_positive_where_the_model_overshoots() -> None:
    with build_small_run(
        "feddyn", {"feddyn": {"alpha": 1e-3}}, clients_per_round=8, lr=0.5
    ).engine_closed() as experiment:
        for number in range(4):
            experiment.rounds.run_round(number)
        layout, (w, _) = experiment.layout, experiment.rounds.parts.server.bank.rows
        variances = [e.view(w) for e in layout.entries if e.kind is TensorKind.BUFFER and "var" in e.name]
        assert variances
        assert all(bool((variance > 0).all()) for variance in variances)


def test_the_model_that_trains_on_may_be_deployed_instead() -> None:
    check_method("feddyn", {"feddyn": {"global_model": "model"}})


def test_a_refiner_sees_what_is_deployed() -> None:
    for deploy, rows in (("mean", 2), ("model", 1)):
        with build_small_run("feddyn", {"feddyn": {"global_model": deploy}}).engine_closed() as experiment:
            server = experiment.rounds.parts.server
            experiment.rounds.run_round(0)
            assert len(server.models()) == rows
            server.models()[:, 0] = 7.0
            assert server.global_model()[0] == 7.0
            assert next(iter(server.dispatch(1, [0]))).row[0] == 7.0
