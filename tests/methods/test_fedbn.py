"""Tests of FedBN: which tensors are sent, and which stay."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedloom.core.layout import Layout, TensorKind
from fedloom.models import build_model
from fedloom.testing.fixtures import build_small_run, simple_network, small_run
from fedloom.training.context import PERSONAL_KEY


class Residual(nn.Module):
    """A residual branch with a norm whose name does not say so, one used twice, and one without statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 8)
        self.downsample = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.shared = nn.BatchNorm1d(8)
        self.again = self.shared
        self.stateless = nn.BatchNorm1d(8, track_running_stats=False)
        self.layer_norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.first(x))
        x = self.layer_norm(self.again(x + self.downsample(x)))
        return self.last(self.stateless(x))


def names_at_home(experiment) -> set[str]:
    columns = experiment.rounds.parts.client.personal_columns(experiment.layout)
    covered = {n for part in columns for n in range(part.start, part.stop)}
    names = set()
    for entry in experiment.layout.entries:
        inside = [n in covered for n in range(entry.columns.start, entry.columns.stop)]
        assert all(inside) or not any(inside), f"{entry.name} is cut in two"
        if all(inside):
            names.add(entry.name)
    return names


def test_norms_are_found_by_type_wherever_they_are() -> None:
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    with build_small_run("fedbn", {}, model=Residual).engine_closed() as experiment:
        wanted = {f"{unit}.{leaf}" for unit in ("downsample.1", "shared") for leaf in ("weight", "bias", *statistics)}
        assert names_at_home(experiment) == wanted | {"stateless.weight", "stateless.bias"}


def test_norms_of_a_resnet_in_its_shortcuts_too() -> None:
    network = build_model("resnet20:width=2", (3, 8, 8), 10)
    norms = {name for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)}
    with build_small_run("fedbn", {}).engine_closed() as experiment:
        local = experiment.rounds.parts.client
        local = type(local)(_with(experiment.rounds.context, network), local.options)
        layout = Layout.of(network)
        columns = local.personal_columns(layout)
        at_home = sum(part.stop - part.start for part in columns)
        assert at_home == sum(entry.size for entry in layout.entries if entry.layer in norms)
        assert len(columns) < len(norms) + 3, "neighbours are one piece"


def _with(context, network):
    return replace(context, make_model=lambda: network)


def test_after_a_round_norms_are_each_clients_own_and_the_rest_is_common() -> None:
    with build_small_run("fedbn", {}, clients_per_round=8).engine_closed() as experiment:
        layout, server = experiment.layout, experiment.rounds.parts.server
        columns = experiment.rounds.parts.client.personal_columns(layout)
        trained = {}
        accept = experiment.engine.commit_update
        experiment.engine.commit_update = lambda update: (
            trained.update({update.client_id: update.client_state[PERSONAL_KEY].clone()}),
            accept(update),
        )
        before = server.global_model().clone()
        experiment.rounds.run_round(0)
        for client in range(8):
            assert torch.equal(experiment.engine.client_states.get(client)[PERSONAL_KEY], trained[client])
        assert len({tuple(values.tolist()) for values in trained.values()}) == 8
        inside = torch.zeros(layout.size, dtype=torch.bool)
        for part in columns:
            inside[part] = True
        assert torch.equal(server.global_model()[inside], before[inside]), "no norm reached the server"
        assert not torch.equal(server.global_model()[~inside], before[~inside])


def test_without_batch_norm_it_is_fedavg() -> None:
    ours = small_run("fedbn", {}, model=simple_network)
    assert ours.digest == small_run("fedavg", {}, model=simple_network).digest
    assert "personal_accuracy_mean" not in ours.records[-1], "its clients use the deployed model"
    assert small_run("fedbn", {}).digest != small_run("fedavg", {}).digest


def test_the_deployed_model_has_the_mean_of_the_clients_norms() -> None:
    with build_small_run("fedbn", {}, clients_per_round=8).engine_closed() as experiment:
        layout, homes = experiment.layout, experiment.engine.client_states
        initial = experiment.rounds.global_model().clone()
        assert torch.equal(initial, experiment.rounds.context.initial), "nobody has been asked"
        experiment.rounds.run_round(0)
        deployed, columns = experiment.rounds.global_model(), experiment.rounds.parts.client.personal_columns(layout)
        rows = []
        for client in range(8):
            rows.append(deployed.clone())
            start = 0
            for part in columns:
                rows[-1][part] = homes.get(client)[PERSONAL_KEY][start : start + part.stop - part.start]
                start += part.stop - part.start
        weights = torch.tensor([float(experiment.data.federated_data.num_examples(c)) for c in range(8)])
        weights /= weights.sum()
        for entry in layout.entries:
            theirs = torch.stack([entry.view(row) for row in rows])
            if entry.kind is TensorKind.INTEGER:
                assert torch.equal(entry.view(deployed), theirs.amax(0))
                assert entry.view(deployed) > 0
            else:
                mean = torch.tensordot(weights, theirs, dims=1)
                torch.testing.assert_close(entry.view(deployed), mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("server", ["fedcross", "fedmr", "fedcda"])
def test_it_works_with_servers_of_many_models(server: str) -> None:
    record = small_run(f"{server}+fedbn", {}).records[-1]
    assert record["personal_clients"] == 8
    assert 0.3 < record["personal_accuracy_mean"] <= 1


def test_bytes_are_counted_without_norms() -> None:
    (fedbn,), (fedavg,) = (small_run(name, {}, rounds=1).records for name in ("fedbn", "fedavg"))
    # Weight and bias of 16 channels, two zeros, mean and variance, and a counter.
    size = 16 * 2 * 4 + 2 * 4 + 16 * 2 * 4 + 8
    for key in ("bytes_down", "bytes_up"):
        assert fedavg[key] - fedbn[key] == 4 * size
