"""Tests of FedBE: sampled models, ensemble, student."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.layout import TensorKind
from fedloom.methods._support.distillation import DistillationData
from fedloom.methods.fedbe import FedBERefiner
from fedloom.runs.build import BuiltRun
from fedloom.testing import check_method
from fedloom.testing.fixtures import batch_norm_network, simple_network
from tests.support.proxy_data import answers, noisy, play, put_together

KINDS = ["gaussian", "normalized", "dirichlet"]


def refiner_of(experiment: BuiltRun) -> FedBERefiner:
    refiner = experiment.rounds.parts.refiner
    assert isinstance(refiner, FedBERefiner)
    return refiner


def drawn(experiment: BuiltRun, rows: list[Tensor], count: int, samples: list[int] | None = None) -> Tensor:
    """So many models drawn around `rows`, which were trained from the initial model."""
    sent = experiment.rounds.context.initial.expand(len(rows), -1)
    sizes = samples or [10] * len(rows)
    return torch.stack([refiner_of(experiment).draw(0, s, torch.stack(rows), sent, sizes) for s in range(count)])


@pytest.mark.parametrize("kind", KINDS)
def test_of_identical_clients_that_one_model_is_drawn(kind: str) -> None:
    with put_together("fedbe", {"distribution": kind}, batch_norm_network) as experiment:
        row = noisy(experiment, 1)[0]
        models = drawn(experiment, [row] * 3, 4)
        if kind == "dirichlet":
            assert all(torch.equal(model, row) for model in models)
        else:
            assert torch.allclose(models[:, : experiment.layout.floats], row[: experiment.layout.floats], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_clients_that_have_not_moved_are_no_trouble(kind: str) -> None:
    with put_together("fedbe", {"distribution": kind}) as experiment:
        initial = experiment.rounds.context.initial
        assert torch.allclose(drawn(experiment, [initial.clone()] * 3, 2), initial, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_statistics_of_batch_norm_are_means_and_counters_are_counters(kind: str) -> None:
    """A Gaussian draw of variances as far apart as these would often be negative."""
    with put_together("fedbe", {"distribution": kind}, batch_norm_network) as experiment:
        layout, rows = experiment.layout, noisy(experiment, 3)
        for number, row in enumerate(rows):
            row[layout.trainable : layout.floats] = 0.01 if number else 5.0
            layout.views(row, TensorKind.INTEGER)[0].fill_(7 + number)
        for model in drawn(experiment, rows, 20):
            assert (model[layout.trainable : layout.floats] >= 0.01 - 1e-6).all()
            assert int(layout.views(model, TensorKind.INTEGER)[0]) == 9


def test_gaussian_draws_have_the_clients_mean_and_deviation() -> None:
    with put_together("fedbe", {}) as experiment:
        rows = noisy(experiment, 3)
        models, clients = drawn(experiment, rows, 2000), torch.stack(rows)
        spread = clients.std(dim=0, correction=0)
        error = (models.mean(0) - clients.mean(0)) / spread * 2000**0.5
        assert error.abs().max() < 5
        assert abs(float((models.std(0) / spread).mean()) - 1) < 0.01
        assert not torch.equal(models[0], models[1])


def test_normalised_draws_as_worked_out_by_hand() -> None:
    """Without noise: each tensor moves by the mean length in the mean direction."""
    with put_together("fedbe", {"distribution": "normalized", "scale": 0.0}) as experiment:
        initial, layout = experiment.rounds.context.initial, experiment.layout
        rows = [initial.clone() for _ in range(2)]
        bias = layout.views(rows[0])[-1], layout.views(rows[1])[-1]
        bias[0][0] += 3
        bias[1][1] += 1
        model = drawn(experiment, rows, 1)[0]
        moved = layout.views(model - initial)
        assert torch.allclose(moved[-1], torch.tensor([1.0, 1.0] + [0.0] * 8), atol=1e-6)
        assert all(not tensor.any() for tensor in moved[:-1])


def test_dirichlet_draws_are_means_that_count_samples() -> None:
    with put_together("fedbe", {"distribution": "dirichlet", "alpha": 1e4}) as experiment:
        rows = noisy(experiment, 2)
        model = drawn(experiment, rows, 1, [30, 10])[0]  # a large alpha: nearly the mean by samples
        assert torch.allclose(model, 0.75 * rows[0] + 0.25 * rows[1], atol=0.01)
    with put_together("fedbe", {"distribution": "dirichlet", "alpha": 1e-3}) as experiment:
        rows = noisy(experiment, 2)
        near = [min((model - row).abs().max() for row in rows) for model in drawn(experiment, rows, 10)]
        assert sum(distance < 1e-4 for distance in near) >= 8  # a small one: nearly always one client's


def test_the_teacher_is_the_sharpened_mean_of_all_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    taught: list[Tensor] = []
    monkeypatch.setattr(
        DistillationData, "distill", lambda self, row, index, teacher, optimizer, lr: taught.append(teacher)
    )
    with put_together("fedbe", {"samples": 2, "epochs": 1}) as experiment:
        rows, refiner = noisy(experiment, 3, 0.5), refiner_of(experiment)
        mean = play(experiment, answers(experiment, rows))
        everyone = [mean, *rows, *drawn(experiment, rows, 2)]
        p = torch.stack([F.softmax(refiner._proxy.outputs(row), dim=1) for row in everyone]).mean(0)
        expected = p.square() / p.square().sum(1, keepdim=True)
        assert len(taught) == 1
        assert torch.allclose(taught[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("start", "every", "counted"),
    [(2, 2, (4, 6)), (0, 3, (3, 6)), (5, 1, (6,)), (6, 1, (6,)), (500, 25, (6,))],
)
def test_the_new_model_is_the_mean_of_the_students_that_count(start: int, every: int, counted: tuple[int, ...]) -> None:
    """Without one that counts it is the last; 6 epochs of one step each."""
    seen: list[Tensor] = []

    class Watched(DistillationData):
        def distill(self, row: Tensor, *others: Any) -> None:  # type: ignore[override]
            super().distill(row, *others)
            seen.append(row.clone())

    options = {"epochs": 6, "batch_size": 0, "lr": 0.1, "swa_start": start, "swa_every": every}
    with put_together("fedbe", options) as experiment:
        refiner_of(experiment)._proxy = Watched(experiment.rounds.context, "fedbe")
        refined = play(experiment, answers(experiment, noisy(experiment, 3, 0.5)))
        assert len(seen) == 6
        assert not torch.equal(seen[0], seen[5])
        expected = torch.stack([seen[step - 1] for step in counted]).mean(0)
        assert torch.allclose(refined, expected, atol=1e-6)


def test_the_student_descends_as_pytorchs_own_sgd_does() -> None:
    """Five steps on all of the server's data, with momentum and weight decay; too few for a student to count."""
    options = {"samples": 2, "epochs": 5, "batch_size": 0, "lr": 0.1, "momentum": 0.7, "weight_decay": 0.05}
    with put_together("fedbe", options, batch_norm_network) as experiment:
        rows, refiner, context = noisy(experiment, 3, 0.5), refiner_of(experiment), experiment.rounds.context
        experiment.rounds.parts.server.aggregate(0, iter(answers(experiment, rows)))
        expected = experiment.rounds.parts.server.global_model().clone()
        everyone = [expected, *rows, *drawn(experiment, rows, 2)]
        p = torch.stack([F.softmax(refiner._proxy.outputs(row), dim=1) for row in everyone]).mean(0)
        teacher = p.square() / p.square().sum(1, keepdim=True)
        assert context.server.data is not None
        student = context.make_model().eval()
        experiment.layout.bind(student, expected)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.7, weight_decay=0.05)
        for _ in range(5):
            optimizer.zero_grad()
            said = F.log_softmax(student(context.server.data.x), dim=1)
            (teacher * (teacher.log() - said)).sum(1).mean().backward()
            optimizer.step()
        refined = play(experiment, answers(experiment, rows))
        assert torch.allclose(refined, expected, atol=1e-5)


def test_only_trainable_parameters_learn() -> None:
    with put_together("fedbe", {"lr": 0.1}, batch_norm_network) as experiment:
        rows, trainable = noisy(experiment, 3, 0.5), experiment.layout.trainable
        experiment.rounds.parts.server.aggregate(0, iter(answers(experiment, rows)))
        mean = experiment.rounds.parts.server.global_model().clone()
        refined = play(experiment, answers(experiment, rows))
        assert torch.equal(refined[trainable:], mean[trainable:])
        assert not torch.equal(refined[:trainable], mean[:trainable])


def test_the_order_of_clients_does_not_matter() -> None:
    digests = []
    for turn in (1, -1):
        with put_together("fedbe", {"distribution": "dirichlet"}, simple_network) as experiment:
            updates = answers(experiment, noisy(experiment, 4, 0.5), [1, 2, 3, 4])[::turn]
            digests.append(play(experiment, updates))
    assert torch.allclose(digests[0], digests[1], atol=1e-6)


def test_a_round_without_an_answer_changes_nothing() -> None:
    with put_together("fedbe", {}) as experiment:
        before = experiment.rounds.parts.server.global_model().clone()
        assert torch.equal(play(experiment, []), before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_conformance_of_every_distribution(kind: str) -> None:
    check_method("fedbe", {"fedbe": {"distribution": kind, "epochs": 1, "samples": 2}})


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["fedmr+fedbe", "fedlaw+fedbe"])
def test_conformance_together(method: str) -> None:
    check_method(method, {"fedbe": {"epochs": 1, "samples": 2}})
