"""Tests of FedLAW: learned weights, learned factor, and what they may change."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.core.averaging import WeightedMean
from fedloom.core.layout import TensorKind
from fedloom.methods.fedlaw import FedLAWServer
from fedloom.runs.build import BuiltRun
from fedloom.testing import check_method
from fedloom.testing.fixtures import batch_norm_network, simple_network
from fedloom.training.optimizers import Adam
from tests.support.proxy_data import always, answers, noisy, play, put_together


def server_of(experiment: BuiltRun) -> FedLAWServer:
    server = experiment.rounds.parts.server
    assert isinstance(server, FedLAWServer)
    return server


def mean_of(experiment: BuiltRun, rows: list[Tensor], weights: list[float]) -> Tensor:
    mean, made = WeightedMean(experiment.layout), torch.empty_like(rows[0])
    for row, weight in zip(rows, weights, strict=True):
        mean.add(row, weight)
    mean.write_to(made)
    return made


def loss_of(experiment: BuiltRun, row: Tensor) -> float:
    proxy = server_of(experiment)._proxy
    return float(F.cross_entropy(proxy.outputs(row), proxy.samples.y))


@pytest.mark.parametrize("form", ["exp", "quad"])
def test_without_steps_it_starts_at_the_shares_of_samples_and_factor_one(form: str) -> None:
    with put_together("fedlaw", {"form": form, "lr": 0.0, "epochs": 1}) as experiment:
        rows = noisy(experiment, 3)
        weights, gamma = server_of(experiment).learn(0, torch.stack(rows), [1, 2, 5])
        assert weights == pytest.approx([1 / 8, 2 / 8, 5 / 8])
        assert gamma == pytest.approx(1)


@pytest.mark.parametrize("form", ["exp", "quad"])
def test_the_weights_lie_on_the_simplex_and_the_factor_is_positive(form: str) -> None:
    with put_together("fedlaw", {"form": form, "lr": 0.3, "epochs": 30}) as experiment:
        weights, gamma = server_of(experiment).learn(0, torch.stack(noisy(experiment, 4, 0.5)), [1, 2, 3, 4])
        assert sum(weights) == pytest.approx(1)
        assert min(weights) >= 0
        assert gamma > 0
        assert weights != pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.05)


@pytest.mark.parametrize("network", [simple_network, batch_norm_network])
def test_what_is_learned_lowers_the_loss_on_the_servers_data(network: Callable[[], nn.Module]) -> None:
    with put_together("fedlaw", {"lr": 0.1}, network) as experiment:
        rows, sizes = noisy(experiment, 5, 0.3), [5, 4, 3, 2, 1]
        plain = mean_of(experiment, rows, [float(size) for size in sizes])
        merged = play(experiment, answers(experiment, rows, sizes))
        assert loss_of(experiment, merged) < loss_of(experiment, plain) - 0.01


def test_the_factor_scales_trainable_parameters_only() -> None:
    with put_together("fedlaw", {"lr": 0.1}, batch_norm_network) as experiment:
        rows, layout = noisy(experiment, 3), experiment.layout
        for number, row in enumerate(rows):
            layout.views(row, TensorKind.INTEGER)[0].fill_(number + 4)
        weights, gamma = server_of(experiment).learn(0, torch.stack(rows), [10] * 3)
        merged, mean = play(experiment, answers(experiment, rows)), mean_of(experiment, rows, weights)
        assert abs(gamma - 1) > 0.01
        assert torch.allclose(merged[: layout.trainable], gamma * mean[: layout.trainable])
        assert torch.equal(merged[layout.trainable :], mean[layout.trainable :])
        assert int(layout.views(merged, TensorKind.INTEGER)[0]) == 6


def test_without_shrinking_the_factor_stays_one() -> None:
    with put_together("fedlaw", {"lr": 0.1, "shrink": False}) as experiment:
        weights, gamma = server_of(experiment).learn(0, torch.stack(noisy(experiment, 3, 0.5)), [10] * 3)
        assert gamma == 1
        assert max(weights) > 0.34


def test_a_client_that_does_harm_loses_its_weight() -> None:
    with put_together("fedlaw", {"lr": 0.5, "epochs": 60, "shrink": False}) as experiment:
        data = experiment.rounds.context.server.data
        assert data is not None
        data.y.fill_(2)
        rows = torch.stack([always(experiment, 2), always(experiment, 3), always(experiment, 2)])
        weights, _ = server_of(experiment).learn(0, rows, [10] * 3)
        assert weights[1] < 0.01
        assert weights[0] == pytest.approx(weights[2])


@pytest.mark.parametrize("form", ["exp", "quad"])
def test_one_step_follows_the_gradient_of_the_merged_models_loss(form: str) -> None:
    """Adam's first step has the sign of the gradient, which finite differences of (u, s) give too."""
    with put_together("fedlaw", {"form": form, "epochs": 1, "batch_size": 0, "lr": 1e-3}) as experiment:
        server, rows, layout = server_of(experiment), torch.stack(noisy(experiment, 3, 0.5)), experiment.layout
        p = torch.tensor([1.0, 2.0, 5.0]) / 8
        start = torch.cat([p.sqrt() if form == "quad" else p.log(), torch.ones(1) * (form == "quad")])

        def loss(z: Tensor) -> float:
            weights, gamma = server.merge(z)
            row = mean_of(experiment, list(rows), weights.tolist())
            row[: layout.trainable] *= gamma
            return loss_of(experiment, row)

        slopes = [loss(start + step) - loss(start - step) for step in 0.01 * torch.eye(4)]
        learned = torch.stack([start - 1e-3 * torch.sign(torch.tensor(slopes))])[0]
        weights, gamma = server.learn(0, rows, [1, 2, 5])
        expected, factor = server.merge(learned)
        assert weights == pytest.approx(expected.tolist(), abs=2e-6)
        assert gamma == pytest.approx(float(factor), abs=2e-6)


def test_the_rate_is_halved_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    monkeypatch.setattr(Adam, "step", lambda self, weights, gradient, lr: rates.append(lr))
    with put_together("fedlaw", {"epochs": 5, "lr": 0.4, "halve_every": 2, "batch_size": 40}) as experiment:
        server_of(experiment).learn(0, torch.stack(noisy(experiment, 2)), [1, 1])
    assert rates == [0.4] * 4 + [0.2] * 4 + [0.1] * 2, "two batches of 40 in each epoch"


def test_clients_without_samples_change_nothing() -> None:
    merged = []
    for empty in (False, True):
        with put_together("fedlaw", {}) as experiment:
            rows = noisy(experiment, 4)
            sizes = [3, 4, 5, 0] if empty else [3, 4, 5]
            merged.append(play(experiment, answers(experiment, rows[: len(sizes)], sizes)))
    assert torch.equal(merged[0], merged[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [{"form": "quad"}, {"shrink": False}, {"batch_size": 16, "halve_every": 1}, {"swa": True}]
)
def test_conformance_with_other_options(options: dict[str, Any]) -> None:
    check_method("fedlaw", {"fedlaw": {**options, "epochs": 2}})


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["fedlaw+fedprox", "fedlaw+scaffold", "abavg+lss"])
def test_conformance_together(method: str) -> None:
    check_method(method, {"lss": {"models": 2}} if "lss" in method else {})


def by_torch(experiment: BuiltRun, rows: Tensor, start: Tensor, moves: list[bool], epochs: int) -> list[Tensor]:
    """(u, s) after each step of PyTorch's own Adam on all of the server's data, of which only some numbers move."""
    server, layout, module = server_of(experiment), experiment.layout, experiment.rounds.context.make_model()
    z = start.clone().requires_grad_()
    optimizer, seen = torch.optim.Adam([z], lr=0.1, betas=(0.5, 0.999)), []
    for _ in range(epochs):
        lam, gamma = server.merge(z)
        state = {e.name: gamma * sum(a * e.view(row) for a, row in zip(lam, rows, strict=True)) for e in layout.entries}
        data = server._proxy.samples
        (slope,) = torch.autograd.grad(F.cross_entropy(functional_call(module, state, (data.x,)), data.y), z)
        z.grad = slope * torch.tensor(moves)
        optimizer.step()
        seen.append(z.detach().clone())
    return seen


def test_while_it_learns_batch_norm_has_the_statistics_that_would_be_deployed() -> None:
    """The clients' mean by the weights of the moment, through which no gradient goes; against PyTorch's own Adam."""
    with put_together("fedlaw", {"epochs": 6, "batch_size": 0, "lr": 0.1}, batch_norm_network) as experiment:
        server, rows, layout = server_of(experiment), torch.stack(noisy(experiment, 3, 0.5)), experiment.layout
        rows[:, layout.trainable : layout.floats] *= torch.tensor([0.2, 1.0, 6.0])[:, None]  # far apart
        module, data = experiment.rounds.context.make_model().eval(), server._proxy.samples
        z = torch.tensor([1 / 8, 2 / 8, 5 / 8, 1.0]).log().requires_grad_()
        optimizer = torch.optim.Adam([z], lr=0.1, betas=(0.5, 0.999))
        for _ in range(6):
            lam, gamma = F.softmax(z[:-1], dim=0), z[-1].exp()
            state = {}
            for entry in layout.entries:
                views = [entry.view(row) for row in rows]
                if entry.kind is TensorKind.PARAMETER:
                    state[entry.name] = gamma * sum(a * view for a, view in zip(lam, views, strict=True))
                elif entry.kind is TensorKind.BUFFER:
                    state[entry.name] = sum(a * view for a, view in zip(lam.detach(), views, strict=True))
            optimizer.zero_grad()
            F.cross_entropy(functional_call(module, state, (data.x,)), data.y).backward()
            optimizer.step()
        weights, factor = server.learn(0, rows, [1, 2, 5])
        assert weights == pytest.approx(F.softmax(z[:-1], dim=0).tolist(), abs=1e-4)
        assert factor == pytest.approx(float(z[-1].detach().exp()), abs=1e-4)


@pytest.mark.parametrize("start", [0, 2, 9])
def test_in_two_stages_the_weights_are_a_mean_over_epochs_and_the_factor_comes_after_them(start: int) -> None:
    options = {"swa": True, "swa_start": start, "epochs": 9, "batch_size": 0, "lr": 0.1}
    with put_together("fedlaw", options) as experiment:
        rows = torch.stack(noisy(experiment, 3, 0.5))
        begin = torch.tensor([1 / 8, 2 / 8, 5 / 8, 1.0]).log()
        first = by_torch(experiment, rows, begin, [True, True, True, False], 5)
        mean = torch.stack(first[start:] or first[-1:]).mean(0)
        expected = by_torch(experiment, rows, mean, [False, False, False, True], 4)[-1]
        weights, gamma = server_of(experiment).learn(0, rows, [1, 2, 5])
        lam, factor = server_of(experiment).merge(expected)
        assert weights == pytest.approx(lam.tolist(), abs=1e-5)
        assert gamma == pytest.approx(float(factor), abs=1e-5)
        assert abs(gamma - 1) > 0.05
        assert lam.tolist() != pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.01)


def test_in_two_stages_without_a_factor_all_epochs_are_for_the_weights() -> None:
    learned = []
    for swa in (False, True):
        with put_together(
            "fedlaw", {"swa": swa, "swa_start": 9, "shrink": False, "epochs": 4, "lr": 0.1}
        ) as experiment:
            rows = torch.stack(noisy(experiment, 3, 0.5))
            learned.append(server_of(experiment).learn(0, rows, [1, 2, 5]))
    assert learned[0] == learned[1]
    assert learned[0][1] == 1
