"""Tests of FedDF: teacher, student, and the end of the distillation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fedloom
from fedloom.core.averaging import WeightedMean
from fedloom.core.layout import TensorKind
from fedloom.data import FederatedDataset, Samples
from fedloom.errors import FedloomError, InputError
from fedloom.methods._support.distillation import DistillationData, distillation_loss
from fedloom.methods.feddf import FedDFRefiner
from fedloom.runs.build import BuiltRun
from fedloom.testing import check_method
from fedloom.testing.fixtures import SmallFederatedDataset, batch_norm_network, simple_network, small_run
from fedloom.training.optimizers import Adam
from tests.support.proxy_data import always, answers, noisy, play, put_together

QUICK: dict[str, Any] = {"steps": 30, "check_every": 10, "patience": 20, "lr": 0.01}


def refiner_of(experiment: BuiltRun) -> FedDFRefiner:
    refiner = experiment.rounds.parts.refiner
    assert isinstance(refiner, FedDFRefiner)
    return refiner


def test_the_teacher_is_the_softmax_of_the_mean_logits_of_networks_in_evaluation_mode() -> None:
    """And not the mean of probabilities; dropout and batch norm are at rest."""

    def network() -> torch.nn.Module:
        return torch.nn.Sequential(*batch_norm_network(), torch.nn.Dropout(0.5))

    with put_together("feddf", {"temperature": 2.0}, network) as experiment:
        refiner, rows = refiner_of(experiment), noisy(experiment, 3, 0.5)
        logits = []
        for update in answers(experiment, rows):
            refiner.receive_update(0, update)
            module = experiment.rounds.context.make_model()
            experiment.layout.bind(module, update.row.clone())
            data = experiment.rounds.context.server.data
            assert data is not None
            logits.append(module.eval()(data.x).detach())
        teacher = refiner.teacher()
        assert teacher is not None
        stacked = torch.stack(logits)
        assert torch.allclose(teacher, F.softmax(stacked.mean(0) / 2, dim=1), atol=1e-6)
        assert not torch.allclose(teacher, F.softmax(stacked / 2, dim=2).mean(0), atol=1e-3)


@pytest.mark.parametrize("validation", [0.0, 0.1])
def test_the_student_comes_nearer_to_the_ensemble(validation: float) -> None:
    with put_together("feddf", {**QUICK, "validation": validation}) as experiment:
        refiner, updates = refiner_of(experiment), answers(experiment, noisy(experiment, 4, 0.5))
        for update in updates:
            refiner.receive_update(0, update)
        teacher = refiner.teacher()
        assert teacher is not None
        experiment.rounds.parts.server.aggregate(0, iter(updates))
        server = experiment.rounds.parts.server
        before = distillation_loss(teacher, refiner._proxy.outputs(server.global_model()))
        refiner.refine(0, server)
        assert distillation_loss(teacher, refiner._proxy.outputs(server.global_model())) < 0.7 * before


def test_equal_teachers_leave_the_mean_as_it_is() -> None:
    """Their mean has no loss and no gradient, and nothing is a gain over that."""
    with put_together("feddf", QUICK, batch_norm_network) as experiment:
        row = noisy(experiment, 1)[0]
        updates = answers(experiment, [row] * 3)
        assert torch.equal(play(experiment, updates), row)
        refiner = refiner_of(experiment)
        for update in updates:
            refiner.receive_update(0, update)
        teacher = refiner.teacher()
        assert teacher is not None
        weights = row[: experiment.layout.trainable].clone().requires_grad_()
        x = refiner._proxy.inputs(torch.arange(20))
        loss = distillation_loss(teacher[:20], refiner._proxy.network(weights, x, row))
        (gradient,) = torch.autograd.grad(loss, weights)
        assert abs(loss.item()) < 1e-7
        assert gradient.abs().max() < 1e-7


def test_only_trainable_parameters_learn() -> None:
    with put_together("feddf", QUICK, batch_norm_network) as experiment:
        rows = noisy(experiment, 4, 0.5)
        mean = WeightedMean(experiment.layout)
        for row in rows:
            mean.add(row, 10)
        expected = torch.empty_like(rows[0])
        mean.write_to(expected)
        refined, trainable = play(experiment, answers(experiment, rows)), experiment.layout.trainable
        assert torch.equal(refined[trainable:], expected[trainable:])
        assert not torch.equal(refined[:trainable], expected[:trainable])
        assert len(experiment.layout.views(refined, TensorKind.INTEGER)) == 1


def test_it_ends_when_nothing_is_gained_and_keeps_the_best() -> None:
    """A rate that only does harm: the start is the best, and the end comes after `patience` steps."""
    with put_together("feddf", {**QUICK, "lr": 10.0, "steps": 1000}) as experiment:
        rows = noisy(experiment, 3)
        expected = sum(rows) / 3
        refined = play(experiment, answers(experiment, rows))
        numbers = experiment.rounds.parts.refiner.diagnostics()  # type: ignore[union-attr]
        assert numbers["steps"] == 20
        assert numbers["divergence after"] == numbers["divergence before"]
        assert torch.allclose(refined, expected, atol=1e-6)


def test_the_rate_falls_to_nothing_by_half_a_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    monkeypatch.setattr(Adam, "step", lambda self, weights, gradient, lr: rates.append(lr))
    with put_together("feddf", {"steps": 4, "lr": 0.2, "validation": 0.0}) as experiment:
        play(experiment, answers(experiment, noisy(experiment, 2)))
    half = 0.5**0.5
    assert rates == pytest.approx([0.2, 0.1 * (1 + half), 0.1, 0.1 * (1 - half)])


def test_the_student_descends_as_pytorchs_own_adam_does() -> None:
    """Seven steps on all of the server's data, at another temperature, with PyTorch's own cosine."""
    options = {"steps": 7, "batch_size": 0, "lr": 0.02, "temperature": 2.0, "validation": 0.0}
    with put_together("feddf", options, batch_norm_network) as experiment:
        rows, refiner, context = noisy(experiment, 3, 0.5), refiner_of(experiment), experiment.rounds.context
        experiment.rounds.parts.server.aggregate(0, iter(answers(experiment, rows)))
        expected = experiment.rounds.parts.server.global_model().clone()
        teacher = F.softmax(torch.stack([refiner._proxy.outputs(row) for row in rows]).mean(0) / 2, dim=1)
        assert context.server.data is not None
        student = context.make_model().eval()
        experiment.layout.bind(student, expected)
        optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
        for _ in range(7):
            optimizer.zero_grad()
            said = F.log_softmax(student(context.server.data.x) / 2, dim=1)
            (teacher * (teacher.log() - said)).sum(1).mean().backward()
            optimizer.step()
            rate.step()
        refined = play(experiment, answers(experiment, rows))
        assert torch.allclose(refined, expected, atol=1e-5)


def test_a_student_that_is_not_finite_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistillationData, "distill", lambda self, row, *others: row[:1].fill_(torch.nan))
    with (
        put_together("feddf", {"steps": 5, "validation": 0.0}) as experiment,
        pytest.raises(FedloomError, match=r"round 1: .*lower feddf\.lr"),
    ):
        play(experiment, answers(experiment, noisy(experiment, 3)))


def test_clients_no_better_than_chance_are_left_out_if_asked_for() -> None:
    with put_together("feddf", {**QUICK, "drop": True}) as experiment:
        refiner, context = refiner_of(experiment), experiment.rounds.context
        assert context.server.data is not None
        context.server.data.y.copy_(torch.arange(80) % 5)  # each of five labels is right one time in five
        good, bad = [always(experiment, label) for label in (0, 1)], always(experiment, 7)
        for update in answers(experiment, [bad, *good, bad]):
            refiner.receive_update(0, update)
        teacher = refiner.teacher()
        assert teacher is not None
        expected = F.softmax(torch.stack([refiner._proxy.outputs(row) for row in good]).mean(0), dim=1)
        assert torch.allclose(teacher, expected, atol=1e-6)
        refiner.refine(0, experiment.rounds.parts.server)
        for update in answers(experiment, [bad, bad]):  # the next round has nobody better, so all are heard
            refiner.receive_update(1, update)
        teacher = refiner.teacher()
        assert teacher is not None
        assert torch.allclose(teacher, F.softmax(refiner._proxy.outputs(bad), dim=1), atol=1e-6)


def test_exactly_chance_is_no_better_than_chance() -> None:
    with put_together("feddf", {**QUICK, "drop": True}) as experiment:
        refiner, context = refiner_of(experiment), experiment.rounds.context
        assert context.server.data is not None
        context.server.data.y.copy_(7 * (torch.arange(80) % 10 == 0))  # one in ten, of ten classes
        good, bad = always(experiment, 0), always(experiment, 7)
        for update in answers(experiment, [bad, good]):
            refiner.receive_update(0, update)
        teacher = refiner.teacher()
        assert teacher is not None
        assert torch.allclose(teacher, F.softmax(refiner._proxy.outputs(good), dim=1), atol=1e-6)


def test_a_round_without_an_answer_changes_nothing() -> None:
    with put_together("feddf", QUICK) as experiment:
        before = experiment.rounds.parts.server.global_model().clone()
        assert torch.equal(play(experiment, []), before)


def test_all_models_of_a_server_learn() -> None:
    with put_together("fedcross+feddf", QUICK) as experiment:
        parts = experiment.rounds.parts
        jobs = list(parts.server.dispatch(0, [0, 1, 2, 3]))
        rows = noisy(experiment, 4, 0.5)
        updates = [
            type(update)(job, update.row, 10, 1.0, 1)
            for job, update in zip(jobs, answers(experiment, rows), strict=True)
        ]
        parts.server.aggregate(0, iter(updates))
        before = parts.server.models().clone()
        assert isinstance(parts.refiner, FedDFRefiner)
        for update in updates:
            parts.refiner.receive_update(0, update)
        parts.refiner.refine(0, parts.server)
        assert (parts.server.models() != before).any(dim=1).all()


def test_labels_of_the_server_are_not_used() -> None:
    digests = []
    for shift in (0, 3):
        federation = SmallFederatedDataset()
        assert federation.server_data is not None
        federation.server_data = Samples(federation.server_data.x, (federation.server_data.y + shift) % 10)
        digests.append(small_run("feddf", {"feddf": QUICK}, federated_data=federation, model=simple_network).digest)
    assert digests[0] == digests[1]


def test_it_needs_classes() -> None:
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    regression = FederatedDataset.from_arrays([(x, x[:, :1]), (x, x[:, :1])])
    regression.server_data = Samples(x, x[:, :1])
    with pytest.raises(InputError, match=r"feddf .* needs data with classes"):
        fedloom.run("feddf", regression, lambda: torch.nn.Linear(3, 1), rounds=1, report=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["fedcross+feddf", "abavg+feddf", "feddf+scaffold"])
def test_conformance_together(method: str) -> None:
    check_method(method, {"feddf": {"steps": 5, "check_every": 2}})
