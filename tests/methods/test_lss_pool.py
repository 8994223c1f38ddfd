"""Tests of LSS: the pool, the interpolation weights, and what is sent."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.methods.base import Client
from fedloom.methods.lss import LSSClient, LSSOptions, lss_simplex_weights
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalTrainer
from tests.support.lss_trainers import AUTHORS, CONTEXT, forced, grow, network, seat, soup

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_weights_are_uniform_on_the_simplex(count: int) -> None:
    """Then P(a_1 > t) = (1 - t)^(count - 1), and one coordinate is like another."""
    torch.manual_seed(0)
    draws = torch.stack([lss_simplex_weights(count, torch.zeros(1)) for _ in range(6000)])
    assert draws.shape == (6000, count)
    assert bool((draws >= 0).all())
    torch.testing.assert_close(draws.sum(1), torch.ones(6000))
    for column in draws.T:
        assert float(column.mean()) == pytest.approx(1 / count, abs=0.01)
        for t in (0.1, 0.3, 0.6):
            assert float((column > t).float().mean()) == pytest.approx((1 - t) ** (count - 1), abs=0.03)


@pytest.mark.parametrize(("options", "sizes"), [({}, [2, 3, 4]), ({"include_init": False}, [2, 3])])
def test_the_weights_are_over_the_whole_pool(options: dict[str, Any], sizes: list[int]) -> None:
    bench = seat()
    with forced(lambda count: torch.full((count,), 1 / count)) as asked:
        grow(soup(models=3, **options), bench)
    assert asked == [size for size in sizes for _ in range(4)], "four steps of each member"


@pytest.mark.parametrize("options", [{}, AUTHORS, {"first_alone": True}, {"distance": "l2"}])
def test_only_the_active_member_moves_and_each_starts_at_the_mean(options: dict[str, Any]) -> None:
    bench, local = seat(), soup(models=4, **options)
    received, init = bench.received.clone(), local.options.include_init
    seen: list[Tensor] = []
    for i, piece in enumerate(local.train(bench)):
        frozen = bench.scratch["rows"][:i].clone()
        f_p = received[: bench.layout.trainable]
        pool = torch.stack([f_p] * init + [f_p + row for row in frozen] or [f_p])
        torch.testing.assert_close(bench.weights, pool.mean(0), msg="a member starts at the mean of the pool")
        before = bench.weights.clone()
        bench.run_steps(piece)
        assert torch.equal(bench.scratch["rows"][:i], frozen), "frozen members stay as they are"
        assert torch.equal(bench.received, received)
        assert not torch.equal(bench.weights, before)
        assert not bench.scratch["rows"].requires_grad
        seen.append(bench.weights.clone())
    mean = torch.stack([f_p] * init + seen).mean(0)
    torch.testing.assert_close(bench.weights, mean)


@pytest.mark.parametrize("options", [{"models": 0}, {"epochs": 0}, {"steps": 0}, {"epochs": 0, "include_init": False}])
def test_without_training_the_received_model_is_sent(options: dict[str, Any]) -> None:
    bench = seat(module=network(nn.BatchNorm1d(4)))
    for piece in soup(**options).train(bench):
        bench.run_steps(piece)
    assert torch.equal(bench.row, bench.received)


def test_the_gradient_is_the_weight_times_the_gradient_at_the_point() -> None:
    """Held against autograd through the sum of the members."""
    bench, local = seat(), soup(models=3, affinity=0, diversity=0)
    model, layout = bench._context.model, bench.layout
    checked: list[float] = []

    def step(batch: Batch) -> None:
        leaf = bench.weights.clone().requires_grad_()
        f_p = bench.received[: layout.trainable]
        others = [f_p, *(f_p + bench.scratch["rows"][:-1])]
        a = lss_simplex_weights(len(others) + 1, leaf)
        point = sum((w * m for w, m in zip(a, [*others, leaf], strict=True)), start=torch.zeros_like(leaf))
        named = {entry.name: entry.view(point) for entry in layout.entries}
        loss = F.cross_entropy(functional_call(model, named, batch.x), batch.y)
        (expected,) = torch.autograd.grad(loss, leaf)
        with forced(lambda count: a):
            got = LSSClient.training_step(local, bench, batch)
        torch.testing.assert_close(got, loss)
        torch.testing.assert_close(bench.gradient, expected)
        checked.append(float(expected.norm()))

    for piece in local.train(bench):
        for cut in bench._batch_slices(piece):
            step(bench._load_batch(cut))
    assert len(checked) == 12
    assert min(checked) > 0


def test_with_all_weight_on_the_member_it_is_plain_training() -> None:
    for optimizer, lr in (("adam", 0.01), ("sgd", 0.1)):
        plain, bench = seat(optimizer=optimizer, lr=lr), seat(optimizer=optimizer, lr=lr)
        for piece in Client.train(Client(CONTEXT, LSSOptions()), plain):
            plain.run_steps(piece)
        with forced(lambda count: torch.eye(count)[-1]):
            (member,) = grow(soup(models=1, affinity=0, diversity=0), bench)
        torch.testing.assert_close(member, plain.weights, rtol=1e-9, atol=1e-12)
        assert plain.weights.sub(plain.received[: plain.layout.trainable]).norm() > 0.01


@pytest.mark.parametrize(("init", "sizes"), [(True, [3, 4]), (False, [2, 3])])
def test_a_first_member_trained_alone_is_neither_interpolated_nor_pushed(init: bool, sizes: list[int]) -> None:
    """Ordinary training on the loss and affinity, as in the authors' code; the others go on as usual."""
    options = {"scale": "absolute", "affinity": 1.0, "first_alone": True, "include_init": init}
    with forced(lambda count: torch.full((count,), 1 / count)) as asked:
        first = grow(soup(models=3, diversity=0.9, **options), seat())[0]
    assert asked == [size for size in sizes for _ in range(4)], "four steps of the second and of the third member"
    bench = seat()
    f_p = bench.received[: bench.layout.trainable]

    class Pulled(Client[LSSOptions]):
        def adjust_gradient(self, trainer: LocalTrainer) -> None:
            trainer.gradient.add_(trainer.weights - f_p, alpha=2.0)

    for piece in Pulled(CONTEXT, LSSOptions()).train(bench):
        bench.run_steps(piece)
    torch.testing.assert_close(first, bench.weights, rtol=1e-9, atol=1e-12)
    assert float((first - f_p).norm()) > 0.01
