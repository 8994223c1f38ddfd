"""Tests of MOON: the contrastive loss, its first value, the client state."""

from math import log

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.layout import model_digest
from fedloom.core.tasks import ClientUpdate
from fedloom.errors import InputError
from fedloom.methods._support.classifier_head import find_classifier_head
from fedloom.methods.moon import moon_contrastive_loss
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run, small_run
from tests.support.task_rounds import in_round


def naive(z: Tensor, z_g: Tensor, z_p: Tensor, tau: float) -> Tensor:
    """As the paper writes it."""
    near, far = F.cosine_similarity(z, z_g, dim=1) / tau, F.cosine_similarity(z, z_p, dim=1) / tau
    return -(near.exp() / (near.exp() + far.exp())).log().mean()


def test_the_contrast_is_the_papers_and_so_is_its_gradient() -> None:
    z = torch.randn(6, 5, requires_grad=True)
    z_g, z_p = torch.randn(6, 5), torch.randn(6, 5)
    ours, theirs = moon_contrastive_loss(z, z_g, z_p, 0.5), naive(z, z_g, z_p, 0.5)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, z), torch.autograd.grad(theirs, z))


@pytest.mark.parametrize("count", [1, 7])
def test_where_the_past_is_the_global_model_it_is_log_two_without_a_gradient(count: int) -> None:
    z, z_g = torch.randn(count, 5, requires_grad=True), torch.randn(count, 5)
    value = moon_contrastive_loss(z, z_g, z_g.clone(), 0.5)
    assert value.item() == pytest.approx(log(2), abs=1e-7)
    (gradient,) = torch.autograd.grad(value, z)
    assert not gradient.any()


def test_a_representation_of_zeros_is_no_trouble() -> None:
    z = torch.zeros(3, 5, requires_grad=True)
    value = moon_contrastive_loss(z.relu(), torch.randn(3, 5), torch.zeros(3, 5), 0.5)
    (gradient,) = torch.autograd.grad(value, z)
    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()


def test_the_first_round_is_fedavg_and_later_ones_are_not() -> None:
    assert small_run("moon", {}, rounds=1).digest == small_run("fedavg", {}, rounds=1).digest
    assert small_run("moon", {}, rounds=4).digest != small_run("fedavg", {}, rounds=4).digest


def test_without_mu_it_is_fedavg_bit_for_bit() -> None:
    assert small_run("moon", {"moon": {"mu": 0.0}}).digest == small_run("fedavg", {}).digest


def visit(experiment: BuiltRun, round: int, client: int) -> ClientUpdate:
    jobs = list(experiment.rounds.parts.server.dispatch(round, [client]))
    (update,) = experiment.engine.train(in_round(round, jobs))
    assert isinstance(update, ClientUpdate), update
    return update


def test_a_client_keeps_the_model_it_returned_and_starts_from_the_received_one() -> None:
    with build_small_run("moon", {}).engine_closed() as experiment:
        for number in range(2):
            update = visit(experiment, number, 2)
            assert model_digest(update.client_state["previous"]) == model_digest(update.row)
            experiment.engine.commit_update(update)
        kept = model_digest(experiment.engine.client_states.get(2)["previous"])
        assert kept == model_digest(update.row)


def test_frozen_models_stay_as_they_are_and_statistics_see_a_batch_once() -> None:
    """Where nothing is learned, all but the home is FedAvg's: the frozen passes move no statistics."""
    rows = []
    for name in ("moon", "fedavg"):
        with build_small_run(name, {}, lr=0.0).engine_closed() as experiment:
            experiment.engine.commit_update(visit(experiment, 0, 2))
            sent = model_digest(experiment.rounds.parts.server.bank.rows[0])
            rows.append(model_digest(visit(experiment, 1, 2).row))
            assert model_digest(experiment.rounds.parts.server.bank.rows[0]) == sent
    assert rows[0] == rows[1]


def test_the_contrast_draws_the_representation_to_the_global_models() -> None:
    """One client, visited again: with a strong contrast its features end nearer to those of the model it received."""
    near = []
    for mu in (0.0, 20.0):
        with build_small_run("moon", {"moon": {"mu": mu}}, epochs=5).engine_closed() as experiment:
            experiment.engine.commit_update(visit(experiment, 0, 2))
            update = visit(experiment, 1, 2)
            x = experiment.data.federated_data.client_samples(2).x
            module, features = experiment.rounds.context.make_model().eval(), []
            for row in (update.row.clone(), experiment.rounds.parts.server.bank.rows[0]):
                experiment.layout.bind(module, row)
                features.append(module[:-1](x).detach())
            near.append(float(F.cosine_similarity(*features).mean()))
    assert near[1] > near[0]


def test_a_clients_step_follows_the_papers_loss() -> None:
    """One step of plain SGD on all samples, against the loss as the paper writes it, differentiated as it is."""
    given = {"steps": 1, "batch_size": 0, "lr": 0.1, "clients_per_round": 8}
    with build_small_run("moon", {"moon": {"mu": 3.0, "tau": 0.2}}, **given).engine_closed() as experiment:
        experiment.rounds.run_round(0)
        local, layout, batches = experiment.rounds.parts.client, experiment.layout, []
        step = local.training_step
        local.training_step = lambda bench, batch: (batches.append(batch), step(bench, batch))[1]
        received = experiment.rounds.parts.server.global_model().clone()
        previous = experiment.engine.client_states.get(2)["previous"].clone()
        row = visit(experiment, 1, 2).row.clone()
        networks = [experiment.rounds.context.make_model() for _ in range(3)]
    (batch,) = batches
    for network, start in zip(networks, (received, received, previous), strict=True):
        layout.bind(network, start.clone())
    own, z = networks[0].train(), networks[0][:-1](batch.x)
    z_g, z_p = (network.eval()[:-1](batch.x).detach() for network in networks[1:])
    loss = F.cross_entropy(own[-1](z), batch.y) + 3.0 * naive(z, z_g, z_p, 0.2)
    gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(own.parameters()))])
    torch.testing.assert_close((received - row)[: layout.trainable] / 0.1, gradient, rtol=1e-3, atol=1e-5)


def test_batches_of_one_are_no_trouble() -> None:
    finished = small_run(
        "moon", {}, federated_data=SmallFederatedDataset(sizes={1: 1, 2: 9}), clients_per_round=8, batch_size=8
    )
    assert not any(record["failed"] for record in finished.records)


def test_a_network_without_a_linear_layer_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(10, 64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.table.T

    with pytest.raises(InputError, match="moon needs a network that ends in a linear layer"):
        small_run("moon", {}, model=Bare)


def test_the_head_is_the_layer_of_that_name_or_else_the_last_linear_one() -> None:
    last = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.Dropout())
    assert find_classifier_head(last, "moon") == ("2", last[2])
    named = nn.ModuleDict({"head": nn.Linear(3, 2), "body": nn.Linear(4, 3)})
    assert find_classifier_head(named, "moon") == ("head", named["head"])
