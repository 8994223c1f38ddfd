"""Tests that the optimizers on a row give the bits of `torch.optim`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.config import TrainingConfig, make_config
from fedloom.training.optimizers import (
    MOST_PIECES,
    SGD,
    Adam,
    Optimizer,
    clip_gradient_,
    make_optimizer,
    split_row_for_foreach,
)

SIZES = [1, 7, 64, 1003]


def follow(mine: Optimizer, theirs: Callable[[Tensor], torch.optim.Optimizer], size: int, lr: float) -> None:
    """Take 20 steps with both from one start along the same gradients, and compare after each."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.randn(size, generator=generator)
    twin = weights.clone().requires_grad_()
    optimizer = theirs(twin)
    for _ in range(20):
        gradient = torch.randn(size, generator=generator)
        twin.grad = gradient.clone()
        optimizer.step()
        mine.step(weights, gradient.clone(), lr)
        assert torch.equal(weights, twin.detach())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.5, True)])
def test_sgd_equals_torch(size: int, weight_decay: float, momentum: float, nesterov: bool) -> None:
    follow(
        SGD(momentum, nesterov, weight_decay),
        lambda w: torch.optim.SGD([w], lr=0.03, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay),
        size,
        0.03,
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weight_decay", [0.0, 1e-3])
def test_adam_equals_torch(size: int, weight_decay: float) -> None:
    follow(
        Adam(weight_decay=weight_decay), lambda w: torch.optim.Adam([w], lr=0.01, weight_decay=weight_decay), size, 0.01
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(),
        lambda: SGD(0.9, False, 1e-3),
        lambda: SGD(0.5, True, 0.0),
        lambda: Adam(),
        lambda: Adam(weight_decay=1e-3),
    ],
)
def test_with_settled_state_and_a_rate_in_a_tensor_the_steps_are_the_same(make: Callable[[], SGD | Adam]) -> None:
    steady = make()
    steady.allocate_state(torch.empty(50))
    for lr in (0.03, 0.01):  # the second time after a reset
        generator = torch.Generator().manual_seed(0)
        weights, usual = torch.randn(50, generator=generator), make()
        twin = weights.clone()
        for _ in range(20):
            gradient = torch.randn(50, generator=generator)
            steady.step(weights, gradient.clone(), torch.tensor(lr))
            usual.step(twin, gradient.clone(), lr)
        torch.testing.assert_close(weights, twin, rtol=1e-5, atol=1e-6)
        steady.reset()


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40), st.floats(1e-3, 1e3))
@settings(deadline=None, max_examples=80)
def test_clip_equals_torch(values: list[float], largest: float) -> None:
    gradient = torch.tensor(values)
    parameter = torch.zeros_like(gradient, requires_grad=True)
    parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([parameter], largest)
    clip_gradient_(gradient, largest)
    assert torch.equal(gradient, parameter.grad)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40), st.floats(0.01, 100))
@settings(deadline=None, max_examples=50)
def test_clip_never_lengthens_and_bounds_the_norm(values: list[float], largest: float) -> None:
    gradient = torch.tensor(values)
    before = gradient.clone()
    clip_gradient_(gradient, largest)
    assert float(gradient.norm()) <= largest * (1 + 1e-5)
    assert bool((gradient.abs() <= before.abs()).all())
    if float(before.norm()) < largest * 0.99:
        assert torch.equal(gradient, before)


@pytest.mark.parametrize("make", [lambda: SGD(0.9), Adam])
def test_state_is_the_optimisers_own(make: Callable[[], Optimizer]) -> None:
    """A gradient that is overwritten after a step, as the bench does, must not reach the state."""
    gradients = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    one, two = torch.ones(6), torch.ones(6)
    first, second, reused = make(), make(), torch.empty(6)
    for gradient in gradients:
        reused.copy_(gradient)
        first.step(one, reused, 0.1)
        reused.fill_(1e9)
        second.step(two, gradient.clone(), 0.1)
    assert torch.equal(one, two)


def test_training_makes_the_optimizer_it_names() -> None:
    adam = make_optimizer(TrainingConfig(optimizer="adam", weight_decay=0.2))
    assert isinstance(adam, Adam)
    assert adam.weight_decay == 0.2
    sgd = make_optimizer(TrainingConfig(momentum=0.9, nesterov=True, weight_decay=0.1))
    assert isinstance(sgd, SGD)
    assert (sgd.momentum, sgd.nesterov, sgd.weight_decay) == (0.9, True, 0.1)
    assert make_optimizer(TrainingConfig()) is not make_optimizer(TrainingConfig())


def test_learning_rate_decays_by_the_round() -> None:
    training = TrainingConfig(lr=0.5, lr_decay=0.5)
    assert [training.lr_at(round) for round in (0, 1, 3)] == [0.5, 0.25, 0.0625]


@given(st.floats(1e-6, 10), st.floats(0.1, 2), st.integers(1, 9), st.integers(0, 20))
def test_the_schedule_step_is_that_of_torch(lr: float, decay: float, step: int, rounds: int) -> None:
    training = TrainingConfig(lr=lr, lr_decay=decay, lr_step=1 if decay == 1 else step)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, training.lr_step, decay)
    for round in range(rounds):
        assert training.lr_at(round) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


@given(st.floats(1e-6, 10), st.integers(1, 30))
def test_the_schedule_cosine_is_that_of_torch(lr: float, rounds: int) -> None:
    config = make_config({"lr": lr, "rounds": rounds, "lr_schedule": "cosine"})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds)
    for round in range(rounds):
        assert config.lr_at(round) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert config.lr_at(0) == lr


@given(st.sampled_from([{"lr_decay": 0.5, "lr_step": 2}, {"lr_schedule": "cosine"}, {}]), st.integers(1, 8))
def test_after_the_warm_up_the_schedule_begins(schedule: dict[str, Any], warmup: int) -> None:
    warm = make_config({"rounds": 12, "lr": 0.3, "lr_warmup": warmup, **schedule})
    cold = make_config({"rounds": 12 - warmup, "lr": 0.3, **schedule})
    rising = [warm.lr_at(round) for round in range(warmup + 1)]
    assert rising == pytest.approx([0.3 * (round + 1) / (warmup + 1) for round in range(warmup + 1)])
    assert [warm.lr_at(warmup + round) for round in range(12 - warmup)] == [
        cold.lr_at(round) for round in range(12 - warmup)
    ]


@given(st.integers(1, 300_000), st.sampled_from(sorted(MOST_PIECES)))
@settings(max_examples=60, deadline=None)
def test_pieces_are_the_whole_row_and_begin_where_a_gpu_reads_four_numbers_at_once(size: int, lists: int) -> None:
    row = torch.arange(size)
    found = split_row_for_foreach(row, lists)
    assert torch.equal(torch.cat(found), row)
    assert len(found) <= MOST_PIECES[lists]
    assert all(int(piece[0]) % 4 == 0 for piece in found)
