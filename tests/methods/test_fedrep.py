"""Tests of FedRep: personal heads, and frozen layers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom import LocalTrainer
from fedloom.core.layout import Layout, TensorKind
from fedloom.errors import InputError
from fedloom.models import build_model
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import SmallFederatedDataset, batch_norm_network, build_small_run, small_run
from fedloom.training.context import PERSONAL_KEY
from tests.support.task_rounds import in_round

HARD = {"momentum": 0.9, "weight_decay": 0.1, "clip": 1.0}
"""Everything that moves a weight whose gradient is zero."""


def steps_of(experiment: BuiltRun, client: int = 2, round: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The model before and after each step of one client's training."""
    local, seen = experiment.rounds.parts.client, []
    plain = type(local).training_step

    def step(bench: LocalTrainer, batch: Any) -> Tensor:
        before = bench.row.clone()
        loss = plain(local, bench, batch)
        seen.append((before, bench.row.clone()))
        return loss

    local.training_step = step
    (update,) = experiment.engine.train(in_round(round, list(experiment.rounds.parts.server.dispatch(round, [client]))))
    experiment.engine.commit_update(update)
    del local.training_step
    return seen


@pytest.mark.parametrize("settings", [{}, HARD, {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1}])
def test_the_head_moves_first_and_alone_then_the_body_alone(settings: dict[str, Any]) -> None:
    options = {"fedrep": {"head_epochs": 2, "body_epochs": 1}}
    with build_small_run("fedrep", options, **settings).engine_closed() as experiment:
        layout = experiment.layout
        head = experiment.rounds.parts.client.head(layout)
        seen = steps_of(experiment)
        assert len(seen) % 3 == 0
        first = len(seen) // 3 * 2
        inside = torch.zeros(layout.size, dtype=torch.bool)
        inside[head] = True
        for number, (before, after) in enumerate(seen):
            moved, still = (inside, ~inside) if number < first else (~inside, inside)
            assert torch.equal(before[still], after[still]), "statistics and all"
            assert not torch.equal(before[moved], after[moved])
        counters = [
            layout.views(row, TensorKind.INTEGER)[0].item() for row in (seen[0][0], seen[first][0], seen[-1][1])
        ]
        assert counters[0] == counters[1] < counters[2], "the body's statistics are renewed in its own phase"


def test_each_phase_begins_with_a_new_optimiser() -> None:
    """The first step of a new Adam is as long as its rate in every weight that has a gradient."""
    with build_small_run("fedrep", {}, optimizer="adam", lr=0.01).engine_closed() as experiment:
        seen, trainable = steps_of(experiment), experiment.layout.trainable
        steps = [(after - before)[:trainable].abs() for before, after in seen]
        first = len(seen) // 11 * 10
        for number in (0, first):
            assert float(steps[number].max()) == pytest.approx(0.01, rel=1e-3)
            assert float(steps[number][steps[number] > 0].median()) == pytest.approx(0.01, rel=1e-2)
        assert float(steps[first - 1].max()) != pytest.approx(0.01, rel=1e-3)


def test_a_clipped_gradient_is_that_of_the_part_which_moves() -> None:
    """Were the frozen part's gradient to count, steps would be shorter than the clip allows."""
    with build_small_run("fedrep", {"fedrep": {"head_epochs": 1}}, clip=1e-2, lr=0.5).engine_closed() as experiment:
        trainable = experiment.layout.trainable
        ways = [float((after - before)[:trainable].norm()) for before, after in steps_of(experiment)]
    assert ways == pytest.approx([0.5 * 1e-2] * len(ways), rel=1e-3)


def test_heads_are_the_clients_own_and_never_reach_the_server() -> None:
    with build_small_run("fedrep", {}, clients_per_round=8).engine_closed() as experiment:
        layout, server = experiment.layout, experiment.rounds.parts.server
        head = experiment.rounds.parts.client.head(layout)
        initial = server.global_model().clone()
        for number in range(2):
            record = experiment.rounds.run_round(number)
            heads = [experiment.engine.client_states.get(c)[PERSONAL_KEY].clone() for c in range(8)]
            assert torch.equal(server.global_model()[head], initial[head])
            assert len({tuple(values.tolist()) for values in heads}) == 8
        size = head.stop - head.start
        assert size == 16 * 10 + 10
        assert record["bytes_up"] == record["bytes_down"] == 8 * 4 * (layout.size - size)
        weights = torch.tensor([float(experiment.data.federated_data.num_examples(c)) for c in range(8)])
        mean = weights / weights.sum() @ torch.stack(heads)
        torch.testing.assert_close(experiment.rounds.global_model()[head], mean, rtol=1e-5, atol=1e-6)


def test_a_client_goes_on_with_its_own_head() -> None:
    with build_small_run("fedrep", {"fedrep": {"head_epochs": 1}}).engine_closed() as experiment:
        head = experiment.rounds.parts.client.head(experiment.layout)
        first, second = steps_of(experiment, 2, 0), steps_of(experiment, 2, 1)
        assert torch.equal(second[0][0][head], first[-1][1][head])
        assert not torch.equal(first[0][0][head], first[-1][1][head])


def test_the_head_is_fitted_once_more_after_the_last_round_and_only_then() -> None:
    runs = {
        final: small_run("fedrep", {"fedrep": {"final_epochs": final, "head_epochs": 1}}).records for final in (0, 10)
    }
    without, fitted = ([r["personal_accuracy_mean"] for r in runs[final]] for final in (0, 10))
    assert without[:-1] == fitted[:-1]
    assert without[-1] != fitted[-1]
    deployed = [[r["accuracy"] for r in runs[final]] for final in (0, 10)]
    assert deployed[0] == deployed[1], "what is done to be scored is forgotten"


class Named(nn.Module):
    """The layer called head is not the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.scale = nn.Linear(64, 8), nn.Linear(8, 10), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x)) * self.scale.weight


@pytest.mark.parametrize(("network", "head"), [(Named, "head"), (batch_norm_network, "3")])
def test_the_head_is_the_layer_called_so_or_the_last(network: Callable[[], nn.Module], head: str) -> None:
    with build_small_run("fedrep", {}, model=network).engine_closed() as experiment:
        layout: Layout = experiment.layout
        columns = experiment.rounds.parts.client.head(layout)
        inside = {e.name for e in layout.entries if columns.start <= e.offset < columns.stop}
        assert inside == {f"{head}.weight", f"{head}.bias"}
        body = experiment.rounds.parts.client.body(layout)
        assert sum(p.stop - p.start for p in (*body, columns)) == layout.trainable


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (1, 8, 8)),
        ("cnn", (1, 8, 8)),
        ("resnet20:width=2", (3, 8, 8)),
        ("vgg16:width=2", (3, 32, 32)),
        ("lstm-shakespeare:hidden=4,vocabulary=9", (5,)),
        ("vit-tiny:depth=1,width=16,heads=2", (1, 8, 8)),
        ("vit-tiny-lora:depth=1,width=16,heads=2", (1, 8, 8)),
    ],
)
def test_the_head_of_our_networks_is_what_scores_classes(name: str, shape: tuple[int, ...]) -> None:
    if name.startswith("vit"):
        pytest.importorskip("peft", reason="peft (the extra fedloom[vit]) is not installed")
    layout = Layout.of(build_model(name, shape, 7))
    with build_small_run("fedrep", {}).engine_closed() as experiment:
        columns = experiment.rounds.parts.client.head(layout)
    weight, bias = [e for e in layout.entries if columns.start <= e.offset < columns.stop]
    assert (weight.shape[0], bias.shape) == (7, (7,))
    assert columns.stop - columns.start == weight.size + bias.size


def test_a_network_of_one_layer_has_no_body() -> None:
    with pytest.raises(
        InputError, match="fedrep and fedbabu share the body of a network, but a network with a single layer"
    ):
        small_run("fedrep", {}, model=lambda: nn.Linear(64, 10))


def test_it_serves_clients_better_than_one_model_does() -> None:
    """What it is for: each client has its own mixture of classes."""
    settings = {"rounds": 10, "clients_per_round": 8, "federated_data": SmallFederatedDataset()}
    own = small_run("fedrep", {}, **settings).records[-1]
    assert own["personal_accuracy_mean"] > own["accuracy"]
    assert own["personal_accuracy_worst10"] <= own["personal_accuracy_mean"]


def test_a_head_that_is_not_finite_is_refused() -> None:
    """With no epoch for the body, the body alone would look sound."""
    options = {"fedrep": {"body_epochs": 0, "head_epochs": 1}}
    records = small_run(
        "fedrep", options, federated_data=SmallFederatedDataset(poisoned=3), clients_per_round=8
    ).records
    assert all("client state personal is not finite" in record["failed_clients"]["3"] for record in records)
