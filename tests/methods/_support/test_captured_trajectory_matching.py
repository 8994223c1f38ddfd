"""Tests of captured trajectory matching against the eager version.

Fake graphs keep addresses and numbers as CUDA graphs do.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.core.layout import Layout
from fedloom.devices.cuda_graphs import EagerRunner
from fedloom.methods._support.differentiable_augmentation import (
    DifferentiableAugmentation,
    parse_differentiable_augmentation,
)
from fedloom.methods._support.distillation import DistillationModel
from fedloom.methods._support.trajectory_matching import (
    GraphedTrajectoryMatcher,
    TrajectoryMatchingData,
    TrajectoryStep,
    match_trajectory,
    trajectory_soft_label_loss,
)
from fedloom.methods.dynafed import DynaFedSteps
from fedloom.testing.fixtures import build_small_run
from fedloom.training.optimizers import SGD, Adam
from tests.support.fake_graphs import FakeGraphTape, fake_tape

CPU, SHAPE, CLASSES = torch.device("cpu"), (2, 6, 6), 3


def problem() -> tuple[DistillationModel, TrajectoryMatchingData, torch.Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(4, 4), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    ).double()
    layout = Layout.of(module)
    row = layout.read(module)
    data = TrajectoryMatchingData(
        torch.randn(5, *SHAPE, dtype=row.dtype), torch.randn(5, CLASSES, dtype=row.dtype), row.new_tensor(0.7)
    )
    return DistillationModel(module, layout, CPU), data, row


def steps_of(kinds: str, batch: int, noise: torch.Generator, seed: int, count: int = 8) -> list[TrajectoryStep]:
    draw, names = torch.Generator().manual_seed(seed), parse_differentiable_augmentation(kinds)
    made = []
    for k in range(count):
        index = torch.randperm(5, generator=draw)[:batch] if batch else None
        kind = names[k % len(names)] if names else None
        change = (
            DifferentiableAugmentation(kind, 1000 * seed + k, batch or 5, SHAPE, torch.float64, noise) if kind else None
        )
        made.append(TrajectoryStep(index, change))
    return made


@pytest.mark.parametrize("tape", [lambda *_: EagerRunner(), fake_tape], ids=["as it is written", "replayed"])
@pytest.mark.parametrize("distance", ["squared", "cosine"])
@pytest.mark.parametrize(("kinds", "batch"), [("none", 0), ("none", 3), ("dsa", 0), ("dsa", 2)])
def test_it_finds_what_match_finds(
    tape: Callable[..., EagerRunner], distance: Any, kinds: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.methods._support.trajectory_matching.make_graph_runner", tape)
    network, data, row = problem()
    noise = torch.Generator()
    sweep = GraphedTrajectoryMatcher(network, data, row, noise)
    for n in range(3):
        start, target = row + 0.05 * n, row + 0.1 * torch.randn(row.shape, generator=torch.Generator().manual_seed(n))
        steps = steps_of(kinds, batch, noise, n)
        expected = match_trajectory(network, data, steps, start, target, distance)
        found = sweep.match(steps, start, target, distance)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.end_weights, expected.end_weights, rtol=1e-12, atol=1e-14)
        for mine, theirs in zip(found.gradients.tensors(), expected.gradients.tensors(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-13)
        for tensor, gradient in zip(data.tensors(), expected.gradients.tensors(), strict=True):
            tensor.sub_(0.1 * gradient)  # in place, as an optimiser does
    if tape is fake_tape:
        assert sweep._graph_runner.replayed >= 2 * sweep._graph_runner.captured
    sweep.close()


@pytest.mark.parametrize("make", [lambda: Adam(), lambda: SGD()])
def test_fine_tuning_is_ordinary_training(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.methods._support.trajectory_matching.make_graph_runner", fake_tape)
    network, data, row = problem()
    noise = torch.Generator()
    sweep = GraphedTrajectoryMatcher(network, data, row, noise)
    for n in range(2):  # the second time with an optimiser that must have forgotten the first
        steps, tuned, plain = steps_of("flip+crop", 2, noise, n), row + n, row + n
        sweep.train(tuned, steps, make, 0.01)
        optimizer = make()
        for step in steps:
            x, y = step.take(data.images, data.label_logits)
            weights = plain[: network.trainable].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(trajectory_soft_label_loss(network(weights, x, plain), y), weights)
            with torch.no_grad():
                optimizer.step(weights, gradient, 0.01)
        torch.testing.assert_close(tuned, plain, rtol=1e-9, atol=1e-12)
        assert not torch.equal(tuned, row + n)


def test_a_run_that_replays_is_the_run_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "L": 3, "s": 1, "iterations": 6, "inner_steps": 4, "images_per_class": 1, "refine_epochs": 3, "inner_lr": 1.0,
        "refine_lr": 1e-3,
    }  # fmt: skip

    def deployed() -> torch.Tensor:
        with build_small_run(
            "dynafed", {"dynafed": options}, engine="sequential", rounds=6
        ).engine_closed() as experiment:
            for round in range(6):
                experiment.rounds.run_round(round)
            return experiment.rounds.parts.server.global_model().clone()[: experiment.layout.trainable]

    plain = deployed()
    tapes: list[FakeGraphTape] = []

    def make(*given: Any) -> FakeGraphTape:
        tapes.append(fake_tape(*given))
        return tapes[-1]

    monkeypatch.setattr("fedloom.methods._support.trajectory_matching.make_graph_runner", make)
    monkeypatch.setattr(DynaFedSteps, "replays", lambda _: True)
    torch.testing.assert_close(deployed(), plain, rtol=1e-4, atol=1e-6)
    assert len(tapes) == 2, "one for the synthesis, one for all fine-tuning"
    assert all(tape.replayed > 0 for tape in tapes)
