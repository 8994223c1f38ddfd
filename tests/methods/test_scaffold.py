"""Tests of SCAFFOLD: its invariants and its convergence."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedloom
from fedloom.config import make_config
from fedloom.errors import InputError
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.resolve import UserObjects, resolve_run
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run, simple_network, small_run
from tests.support.quadratics import Point, Quadratics
from tests.support.task_rounds import in_round


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1).mean() / 2


@pytest.mark.parametrize("option", ["I", "II"])
def test_it_reaches_the_minimiser_that_fedavg_misses(option: str, tmp_path) -> None:
    federation = Quadratics()
    settings = {"rounds": 200, "epochs": 10, "batch_size": 0, "lr": 0.05, "loss": half_square, "engine": "sequential"}

    def solve(method: str, **more: object) -> Tensor:
        out = tmp_path / method
        return fedloom.run(method, federation, Point, out=out, report=False, **settings, **more).model().v.detach()

    wanted = federation.minimiser()
    with_control = solve("scaffold", options={"scaffold": {"option": option}})
    without = solve("fedavg", options={"fedavg": {"weighting": "uniform"}})
    assert torch.allclose(with_control, wanted, atol=1e-4), (with_control, wanted)
    assert (without - wanted).norm() > 0.1


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("failure_rate", [0.0, 0.4])
def test_the_servers_variate_is_the_mean_of_all_clients(option: str, failure_rate: float) -> None:
    settings = {"rounds": 5, "failure_rate": failure_rate, "weight_decay": 0.01}
    with build_small_run("scaffold", {"scaffold": {"option": option}}, **settings).engine_closed() as experiment:
        for number in range(5):
            experiment.rounds.run_round(number)
            homes = experiment.engine.client_states
            total = sum(homes.get(client)["c"].double() for client in homes.client_ids())
            c = experiment.rounds.parts.extras.c.double()
            torch.testing.assert_close(c, total / len(experiment.data.federated_data), rtol=1e-5, atol=1e-7)
        assert len(homes) > 4
        assert c.norm() > 0


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_first_round_is_fedavg_with_uniform_weights(option: str) -> None:
    first = small_run("scaffold", {"scaffold": {"option": option}}, rounds=1)
    assert first.digest == small_run("fedavg", {"fedavg": {"weighting": "uniform"}}, rounds=1).digest
    later = small_run("scaffold", {"scaffold": {"option": option}}, rounds=2)
    assert later.digest != small_run("fedavg", {"fedavg": {"weighting": "uniform"}}, rounds=2).digest


def one_client(experiment: BuiltRun, round: int = 0) -> tuple[fedloom.ClientUpdate, list[Tensor]]:
    """What client 2 returns, and the gradients of its steps before they were corrected."""
    local, gradients = experiment.rounds.parts.client, []
    plain = type(local).adjust_gradient

    def note(bench: fedloom.LocalTrainer) -> None:
        gradients.append(bench.gradient.clone())
        plain(local, bench)

    local.adjust_gradient = note
    extras = experiment.rounds.parts.extras.send_to_client(round, 2)
    (job,) = experiment.rounds.parts.server.dispatch(round, [2])
    (update,) = experiment.engine.train(
        in_round(round, [fedloom.ClientTask(job.client_id, job.row, job.model_index, extras)])
    )
    assert isinstance(update, fedloom.ClientUpdate), update
    return update, gradients


@pytest.mark.parametrize(("round", "decay"), [(0, 1.0), (3, 0.5)])
def test_option_two_is_the_mean_of_the_gradients_that_were_used(round: int, decay: float) -> None:
    """With the learning rate that the round really has."""
    with build_small_run("scaffold", {}, epochs=2, lr=0.05, lr_decay=decay).engine_closed() as experiment:
        update, gradients = one_client(experiment, round)
        mean = torch.stack(gradients).mean(0)
        torch.testing.assert_close(update.client_state["c"], mean, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(update.extras["delta_c"], mean, rtol=1e-3, atol=1e-5)


def test_option_one_is_the_gradient_of_all_samples_at_the_received_model() -> None:
    options = {"scaffold": {"option": "I"}}
    with build_small_run("scaffold", options, epochs=3, lr=0.2, model=simple_network).engine_closed() as experiment:
        update, gradients = one_client(experiment)
        module, samples = experiment.rounds.context.make_model(), experiment.data.federated_data.client_samples(2)
        experiment.layout.bind(module, experiment.rounds.context.initial.clone())
        loss = F.cross_entropy(module(samples.x), samples.y)
        full = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(module.parameters()))])
        torch.testing.assert_close(update.client_state["c"], full, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(torch.stack(gradients).mean(0), full, rtol=1e-2)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_momentum_lengthens_the_way_and_is_taken_out_again(momentum: float) -> None:
    """On a slope that never changes the variate is that slope, once momentum has built up."""
    values = {"method": "scaffold", "clients": 3, "steps": 400, "batch_size": 0, "lr": 1e-3, "momentum": momentum}
    config = make_config({**values, "data": "slope", "partition": "own", "model": "point", "engine": "sequential"})
    own = UserObjects(Quadratics(), Point, lambda output, _: output.sum(1).mean())
    with build_run(resolve_run(config, own)).engine_closed() as experiment:
        update, _ = one_client(experiment)
        torch.testing.assert_close(update.client_state["c"], Quadratics.slopes[2], rtol=0.03, atol=0.0)


def test_a_refused_update_leaves_the_clients_variate_alone() -> None:
    made = build_small_run("scaffold", {}, federated_data=SmallFederatedDataset(poisoned=3), clients_per_round=8)
    with made.engine_closed() as experiment:
        for round in range(2):
            assert "rejected" in experiment.rounds.run_round(round)["failed_clients"]["3"]
        homes = experiment.engine.client_states
        assert homes.client_ids() == [client for client in range(8) if client != 3]
        total = sum(homes.get(client)["c"].double() for client in homes.client_ids())
        torch.testing.assert_close(experiment.rounds.parts.extras.c.double(), total / 8, rtol=1e-5, atol=1e-7)


def test_adam_needs_option_one() -> None:
    with pytest.raises(InputError, match="option I"):
        small_run("scaffold", {}, optimizer="adam")
    small_run("scaffold", {"scaffold": {"option": "I"}}, optimizer="adam", lr=0.01)
