"""Tests of the trainer: row, loss and batch norm after local steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.layout import Layout
from fedloom.core.rng import RngStreams
from fedloom.data import Samples
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps
from tests.support.trainers import begin, make_bench, normed, numbered, sgd


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
        {"optimizer": "adam", "lr": 0.01},
        {"clip": 0.1},
        {"lr_decay": 0.5},
    ],
)
def test_training_equals_a_plain_torch_loop(options: dict[str, Any]) -> None:
    samples = Samples(torch.randn(10, 3), torch.arange(10) % 2)
    bench = begin(make_bench(batch_size=4, epochs=2, **options), samples, round=2, client=1)
    bench.run_steps(LocalSteps(sgd))

    training, module = bench.config, nn.Linear(3, 2)
    layout = Layout.of(module)
    layout.bind(module, torch.linspace(-0.5, 0.5, layout.size))
    made: dict[str, Any] = {"lr": training.lr_at(2), "weight_decay": training.weight_decay}
    optimizer: torch.optim.Optimizer
    if training.optimizer == "adam":
        optimizer = torch.optim.Adam(module.parameters(), **made)
    else:
        optimizer = torch.optim.SGD(module.parameters(), momentum=training.momentum, nesterov=training.nesterov, **made)
    order = RngStreams(0).numpy("batches", 2, 1)
    for _ in range(2):
        for index in torch.from_numpy(order.permutation(10)).split(4):
            optimizer.zero_grad()
            F.cross_entropy(module(samples.x[index]), samples.y[index]).backward()
            if training.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), training.clip)
            optimizer.step()
    assert torch.allclose(bench.row, layout.read(module), rtol=1e-6, atol=1e-7)


def test_restart_goes_back_to_the_received_model_and_the_same_batches() -> None:
    bench = begin(make_bench(batch_size=3, momentum=0.9), numbered(10))
    bench.run_steps(LocalSteps(sgd))
    first, loss = bench.row.clone(), bench.mean_loss
    assert not torch.equal(first, bench.received)
    bench.run_steps(LocalSteps(sgd, epochs=1))
    bench.module.eval()
    bench.restart()
    assert torch.equal(bench.row, bench.received)
    assert bench.steps == 0
    assert np.isnan(bench.mean_loss)
    bench.run_steps(LocalSteps(sgd))
    assert torch.equal(bench.row, first)
    assert bench.mean_loss == loss


def test_a_client_does_not_see_what_the_one_before_did() -> None:
    alone = begin(make_bench(momentum=0.9), numbered(9), client=2)
    alone.run_steps(LocalSteps(sgd))
    shared = begin(make_bench(momentum=0.9), numbered(30), client=1)
    shared.scratch["left"] = torch.ones(1)
    shared.run_steps(LocalSteps(sgd))
    begin(shared, numbered(9), client=2)
    assert shared.scratch == {}
    shared.run_steps(LocalSteps(sgd))
    assert torch.equal(shared.row, alone.row)
    assert shared.mean_loss == alone.mean_loss


def test_mean_loss_is_that_of_the_last_epoch() -> None:
    bench = begin(make_bench(batch_size=4), numbered(10))
    losses = iter([9.0, 9.0, 9.0, 1.0, 2.0, 4.0])
    bench.run_steps(LocalSteps(lambda *_: torch.tensor(next(losses)), epochs=2))
    assert bench.mean_loss == pytest.approx((4 * 1 + 4 * 2 + 2 * 4) / 10)
    losses = iter([5.0])
    bench.run_steps(LocalSteps(lambda *_: torch.tensor(next(losses)), steps=1))
    assert bench.mean_loss == 5.0
    bench.run_steps(LocalSteps(sgd, epochs=0))
    assert bench.mean_loss == 5.0, "a pass without steps has no epoch"


class TwoHeads(nn.Module):
    """Only one head takes part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.idle = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.body(x))


def test_a_layer_without_gradient_has_gradient_zero() -> None:
    bench = begin(make_bench(TwoHeads(), batch_size=5, epochs=1), numbered(5))
    bench.gradient.fill_(float("nan"))
    bench.run_steps(LocalSteps(sgd))
    views = {e.name: e.view(bench.gradient) for e in bench.layout.entries}
    assert bool((views["idle.weight"] == 0).all())
    assert bool((views["idle.bias"] == 0).all())
    assert bool(views["used.weight"].abs().sum() > 0)
    rows = {e.name: (e.view(bench.row), e.view(bench.received)) for e in bench.layout.entries}
    assert torch.equal(*rows["idle.weight"])
    assert not torch.equal(*rows["used.weight"])


class Twice(nn.Module):
    """One layer is used twice, and one weight has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)
        self.other.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.body(x).relu())
        return self.head(x) * self.other(x)


@pytest.mark.parametrize("network", [TwoHeads, Twice, normed])
def test_a_gradient_that_is_copied_by_parameter_has_the_same_bits(
    network: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for least in (0, 1 << 60):
        monkeypatch.setattr("fedloom.training.trainer.LARGE_GRADIENT", least)
        torch.manual_seed(0)
        bench = begin(make_bench(network(), batch_size=5, epochs=1), numbered(5))
        bench.gradient.fill_(float("nan"))
        bench.run_steps(LocalSteps(sgd))
        assert all(parameter.grad is None for parameter in bench.module.parameters())
        found.append((bench.gradient.view(torch.int32), bench.row.view(torch.int32)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_gradients_that_a_method_left_are_neither_added_nor_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.training.trainer.LARGE_GRADIENT", 0)
    bench = begin(make_bench(batch_size=5, epochs=1), numbered(5))
    bench.module.weight.grad = torch.full((2, 3), 7.0)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    bench.backward(bench.loss(Batch(x, y)))
    expected = torch.autograd.grad(F.cross_entropy(bench.module(x), y), list(bench.module.parameters()))
    assert torch.equal(bench.gradient, torch.cat([part.reshape(-1) for part in expected]))
    assert bool((bench.module.weight.grad == 7).all())


# batch norm


def test_a_batch_of_one_leaves_batch_norm_statistics_alone() -> None:
    bench = begin(make_bench(normed(), batch_size=4, epochs=1), numbered(1))
    floats = slice(bench.layout.trainable, bench.layout.size)
    bench.run_steps(LocalSteps(sgd))
    assert torch.equal(bench.row[floats], bench.received[floats])
    assert not torch.equal(bench.weights, bench.received[: bench.layout.trainable]), "it still learns"
    assert bench.layout.is_finite(bench.row)
    assert bench.module.training
    assert all(module.training for module in bench.module.modules())


def test_only_the_lonely_batch_is_without_statistics() -> None:
    bench = begin(make_bench(normed(), batch_size=4, epochs=1), numbered(9))
    bench.run_steps(LocalSteps(sgd))
    assert int(bench.layout.state_dict(bench.row)["1.num_batches_tracked"]) == 2


def test_a_norm_that_its_model_keeps_in_evaluation_stays_there() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            self[1].eval()
            return self

    module = Frozen(*normed())
    bench = begin(make_bench(module, batch_size=4, epochs=2), numbered(9))
    bench.run_steps(LocalSteps(sgd))
    assert not module[1].training
    assert int(module[1].num_batches_tracked) == 0


def test_a_failed_step_does_not_spoil_the_next_client() -> None:
    bench = begin(make_bench(normed(), batch_size=1), numbered(2))

    def fail(*_: object) -> Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        bench.run_steps(LocalSteps(fail))
    begin(bench, numbered(8))
    assert all(module.training for module in bench.module.modules())
