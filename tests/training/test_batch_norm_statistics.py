"""Tests of batch norm statistics that a client estimates before it uploads."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.config import TrainingConfig, config_to_command, make_config
from fedloom.core.layout import Layout, TensorKind
from fedloom.core.tasks import ClientTask, TaskMemory
from fedloom.data import Augment, Samples
from fedloom.methods.base import Client, Options
from fedloom.testing.fixtures import SmallFederatedDataset, batch_norm_network, simple_network, small_run
from fedloom.training import trainer as bench_module
from fedloom.training.trainer import LocalTrainer
from tests.support.trainers import context_of


def seat(count: int, module: nn.Module | None = None, augment: Augment | None = None, **options: Any) -> LocalTrainer:
    """A bench with a client of `count` samples, whose first feature rises: samples lie in order, as classes do."""
    torch.manual_seed(0)
    module = module or nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    layout, training = Layout.of(module), TrainingConfig(**{"batch_size": 4, "lr": 0.1, **options})
    x = torch.stack([torch.linspace(5, 9, count), torch.randn(count)], dim=1)
    bench = LocalTrainer(context_of(module, training, augment=augment))
    received = layout.read(module)
    samples = Samples(x, torch.arange(count) % 2)
    bench.start_task(ClientTask(0, received, round=0), TaskMemory(layout.empty()), samples)
    return bench


def train(bench: LocalTrainer) -> None:
    for piece in Client(None, Options()).train(bench):  # type: ignore[arg-type]
        bench.run_steps(piece)
    bench.finish_task()


def tensors(bench: LocalTrainer) -> dict[str, Tensor]:
    return bench.layout.state_dict(bench.row)


@given(st.integers(2, 60))
@settings(deadline=None, max_examples=20)
def test_one_batch_gives_the_statistics_of_the_samples(count: int) -> None:
    bench = seat(count)
    bench.update_batch_norm_statistics()
    x = bench._data.x
    torch.testing.assert_close(tensors(bench)["0.running_mean"], x.mean(0))
    torch.testing.assert_close(tensors(bench)["0.running_var"], x.var(0))
    bench.bind(bench.row)
    hidden = bench.module[1]((x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt())
    torch.testing.assert_close(tensors(bench)["2.running_mean"], hidden.mean(0), rtol=1e-4, atol=1e-5)


@given(st.integers(2, 60), st.integers(3, 9))
@settings(deadline=None, max_examples=20)
def test_batches_are_averaged_by_their_samples(count: int, size: int) -> None:
    """So the mean is that of all samples however they are cut, and no batch has one sample only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_module, "EVALUATION_BATCH_SIZE", size)
        bench = seat(count)
        sizes: list[int] = []
        bench.module.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
        bench.update_batch_norm_statistics()
    assert sum(sizes) == count
    assert max(sizes) <= size
    assert min(sizes) >= 2
    torch.testing.assert_close(tensors(bench)["0.running_mean"], bench._data.x.mean(0))


def test_samples_are_shuffled_because_they_may_lie_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "EVALUATION_BATCH_SIZE", 50)
    bench = seat(200)
    bench.update_batch_norm_statistics()
    whole = float(bench._data.x[:, 0].var())
    assert float(tensors(bench)["0.running_var"][0]) == pytest.approx(whole, rel=0.1)
    assert float(bench._data.x[:50, 0].var()) < 0.1 * whole


def test_nothing_else_changes() -> None:
    running, estimated = seat(30), seat(30, statistics="estimated")
    train(running)
    train(estimated)
    for entry in running.layout.entries:
        a, b = tensors(running)[entry.name], tensors(estimated)[entry.name]
        if entry.kind is TensorKind.BUFFER:
            assert not torch.equal(a, b), entry.name
        else:  # weights, and the counters of training batches
            assert torch.equal(a, b), entry.name
    assert all(module.training for module in estimated.module.modules())
    assert [norm.momentum for norm in estimated._norms] == [0.1, 0.1]
    assert estimated._bound is estimated.row


def test_it_draws_nothing_and_uses_no_noise() -> None:
    """Neither dropout nor augmentation has a say, and the batches to come stay the same."""

    class Flipped(Augment):
        def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return -x

    def middle(dropout: float) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Dropout(dropout), nn.BatchNorm1d(2), nn.Linear(2, 2))

    bench = seat(20, middle(0.5), augment=Flipped())
    before = torch.get_rng_state()
    order = bench._order.bit_generator.state
    bench.update_batch_norm_statistics()
    assert torch.equal(torch.get_rng_state(), before)
    assert str(bench._order.bit_generator.state) == str(order)
    torch.testing.assert_close(tensors(bench)["1.running_mean"], bench._data.x.mean(0))


@pytest.mark.parametrize("count", [0, 1])
def test_with_fewer_than_two_samples_the_statistics_stay(count: int) -> None:
    bench = seat(count, statistics="estimated")
    bench.update_batch_norm_statistics()
    assert torch.equal(bench.row, bench.received)
    train(bench)
    names = [name for name in tensors(bench) if "running" in name]
    received = bench.layout.state_dict(bench.received)
    assert all(torch.equal(tensors(bench)[name], received[name]) for name in names)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 2))],
    ids=["no batch norm", "no running statistics"],
)
def test_where_there_are_no_statistics_nothing_happens(module: nn.Module) -> None:
    bench = seat(10, module, statistics="estimated")
    calls: list[object] = []
    bench.module.register_forward_hook(lambda *_: calls.append(1))
    bench.finish_task()
    assert torch.equal(bench.row, bench.received)
    assert not calls


class Half(nn.Module):
    """Has a batch norm that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.out = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.used(x))  # type: ignore[no-any-return]


def test_a_layer_that_takes_no_part_keeps_what_it_has() -> None:
    module = Half()
    module.unused.running_mean.fill_(7.0)
    bench = seat(10, module)
    bench.update_batch_norm_statistics()
    assert torch.equal(tensors(bench)["unused.running_mean"], torch.full((2,), 7.0))
    assert not torch.equal(tensors(bench)["used.running_mean"], torch.zeros(2))


def test_a_network_that_raises_leaves_the_bench_in_order() -> None:
    bench = seat(10)
    handle = bench.module[2].register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        bench.update_batch_norm_statistics()
    handle.remove()
    assert [norm.momentum for norm in bench._norms] == [0.1, 0.1]
    bench.restart()
    assert all(module.training for module in bench.module.modules())


def test_it_sees_the_row_that_is_sent_whatever_is_bound() -> None:
    bench = seat(10)
    bench.row[: bench.layout.trainable] *= 2
    other = bench.row * 0
    bench.bind(other)
    bench.update_batch_norm_statistics()
    assert bench._bound is other
    expected = seat(10)
    expected.row[: bench.layout.trainable] *= 2
    expected.update_batch_norm_statistics()
    assert torch.equal(bench.row, expected.row)


def test_networks_may_have_many_batch_norms() -> None:
    """Their statistics are views of one row, and still one may change before the gradient of another is taken."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64))]
    finished = small_run("fedavg", {}, model=lambda: nn.Sequential(*layers, nn.Linear(64, 10)))
    assert not any(record["failed"] for record in finished.records)
    assert finished.loss < 2.0


# as a setting of a run


def test_it_is_a_setting_of_every_method_and_engine() -> None:
    settings = {"rounds": 2, "federated_data": SmallFederatedDataset(sizes={0: 0, 1: 1}), "clients_per_round": 8}
    for method in ("fedavg", "fedcross+fedprox"):
        running = small_run(method, {}, **settings)
        plain = small_run(method, {}, statistics="estimated", **settings)
        host = small_run(method, {}, statistics="estimated", engine="multiprocess", workers=2, **settings)
        assert plain.digest == host.digest != running.digest
        assert not any(record["failed"] for record in plain.records)
    alike = {small_run("fedavg", {}, model=simple_network, statistics=s).digest for s in ("running", "estimated")}
    assert len(alike) == 1, "without batch norm it makes no difference"
    assert any(isinstance(module, nn.BatchNorm1d) for module in batch_norm_network().modules())


def test_the_command_says_it() -> None:
    config = make_config({"statistics": "estimated"})
    assert "--statistics estimated" in config_to_command(config)
    assert "--statistics" not in config_to_command(make_config({}))
