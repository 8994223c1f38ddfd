"""Tests of the engines on a GPU, for `make test-gpu`."""

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.errors import FedloomError
from fedloom.methods import Client, Method, Options, methods, register
from fedloom.models import build_model
from fedloom.testing import CHECKS
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run, small_run
from fedloom.training.batches import Batch
from fedloom.training.mixed_precision import _cast_parameters
from fedloom.training.optimizers import SGD, Adam, StatefulOptimizer
from fedloom.training.trainer import LocalTrainer
from tests.support.cuda_agreement import (
    NETWORKS,
    apart,
    experiment_of,
    in_double,
    jobs_of,
    trained,
    trained_at_once,
    trained_by_a_loop,
)
from tests.support.step_dependency_clients import (
    CallableObject,
    FromIterator,
    FromTorch,
    InSet,
    Leaving,
    OwnAttribute,
    Renewing,
    Slowing,
)
from tests.support.step_memory_clients import (
    Anew,
    Buffered,
    InTurn,
    Moving,
    OneEnclosed,
    OwnOptimizers,
    Reshaped,
    Teaching,
)
from tests.support.trainers import Counting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:RNN module weights"),  # they lie in a row, in torch's order and not in cuDNN's
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


NEVER_RECORDED: set[str] = set()
"""Methods none of whose steps can be recorded."""


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold"])
def test_the_same_seed_gives_the_same_bits(method: str) -> None:
    assert small_run(method, {}, device="cuda").digest == small_run(method, {}, device="cuda").digest


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold"])
def test_a_round_agrees_with_the_cpu(method: str) -> None:
    rows = []
    for device in ("cpu", "cuda"):
        given = {"device": device, "engine": "sequential", "precision": "fp32"}
        with build_small_run(method, {}, **given).engine_closed() as experiment:
            experiment.rounds.run_round(0)
            rows.append(experiment.rounds.parts.server.global_model()[: experiment.layout.floats].cpu())
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-5)


def test_it_resumes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("fedloom.testing.fixtures").testing.fixtures.SETTINGS, "device", "cuda")
    CHECKS["resumes exactly"]("scaffold", {})


def test_convolutions_give_the_same_bits_twice(tmp_path: Path) -> None:
    digests = [
        fedloom.run("fedavg", "digits", "cnn", rounds=3, device="cuda", out=tmp_path / str(number), report=False).digest
        for number in range(2)
    ]
    assert digests[0] == digests[1]


def test_workers_are_not_forked_from_a_process_that_has_trained_beside_a_gpu() -> None:
    torch.zeros((), device="cuda", requires_grad=True).backward()
    with (
        build_small_run("fedavg", {}, engine="multiprocess").engine_closed() as host,
        pytest.raises(FedloomError, match="use the sequential engine"),
    ):
        host.rounds.run_round(0)


# Against a plain loop, and against the sequential engine


@pytest.mark.parametrize("model", NETWORKS)
def test_networks_train_as_in_a_plain_loop(model: str) -> None:
    """Within a part in a hundred thousand in float32, and far closer in float64. In float32 deep networks use the same
    kernels here and there, or they would not stay together."""
    for double, most in ((False, 1e-5), (True, 1e-9)):
        with experiment_of(model, "cuda", double).engine_closed() as experiment:
            jobs, floats = jobs_of(experiment), experiment.layout.floats
            rows, replayed = trained_at_once(experiment, jobs, "cuda")
            loop = trained_by_a_loop(experiment, jobs, "cuda")
            assert replayed > 0
            assert apart(rows, loop, floats) <= most, "float64" if double else "float32"


@pytest.mark.parametrize("model", NETWORKS)
def test_both_engines_give_the_same_bits(model: str) -> None:
    with experiment_of(model, "cuda", double=False, epochs=2).engine_closed() as experiment:
        jobs, floats = jobs_of(experiment), experiment.layout.floats
        rows, _ = trained_at_once(experiment, jobs, "cuda", slots=3)
        assert apart(rows, trained(experiment.engine, jobs), floats) == 0.0


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("model", ["cnn", "resnet20", "vgg16"])
def test_kernels_of_our_own_are_replayed_rightly(model: str, precision: str) -> None:
    """They write statistics and counts of batches where torch cannot see it."""
    given = {"precision": precision, "channels_last": True, "epochs": 2}
    with experiment_of(model, "cuda", double=False, **given).engine_closed() as experiment:
        jobs = jobs_of(experiment)
        rows, replayed = trained_at_once(experiment, jobs, "cuda", slots=3)
        assert replayed > 0
        for row, step_by_step in zip(rows, trained(experiment.engine, jobs), strict=True):
            ours, theirs = experiment.layout.state_dict(row), experiment.layout.state_dict(step_by_step)
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def dense(dropout: float = 0.0) -> nn.Module:
    width = int(np.prod(SmallFederatedDataset().shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 20), nn.Dropout(dropout), nn.ReLU(), nn.Linear(20, 10))


def both(method: str, rounds: int = 3, **settings: Any) -> tuple[list[Tensor], int]:
    """The models that both engines deploy after some rounds, in full precision, and the steps that were replayed."""
    rows = []
    for engine in ("sequential", "cuda"):
        given = {"device": "cuda", "precision": "fp32", "engine": engine, "model": dense, "momentum": 0.5, **settings}
        with build_small_run(method, {}, **given).engine_closed() as experiment:
            for round in range(rounds):
                record = experiment.rounds.run_round(round)
                assert not record["failed_clients"]
            rows.append(experiment.rounds.parts.server.global_model()[: experiment.layout.floats].clone())
            used = experiment.engine
            replayed = sum(slot.graph_runner.replayed for slot in used.slots) if isinstance(used, CudaEngine) else 0
    return rows, replayed


@pytest.mark.parametrize("method", sorted(methods()))
def test_the_cuda_engine_does_what_the_plain_one_does(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where a method that decides by small differences decides alike."""
    monkeypatch.setattr(
        "fedloom.engines.cuda.slot.STEPS_PER_GRAPH", 2
    )  # few kinds of recordings, so that each is replayed soon
    rows, replayed = both(method, rounds=2, model=lambda: in_double(dense()))
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-7, atol=1e-9)
    assert (replayed > 0) is (method not in NEVER_RECORDED)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam", "lr": 0.001},
        {"lr_decay": 0.5},
        {"clip": 0.1},
        {"batch_size": 0},
        {"slots": 2},
        {"model": lambda: dense(0.5)},
        {"momentum": 0.0},
        *({"model": partial(Counting, write, kept)} for write in ("in place", "anew") for kept in (True, False)),
    ],
)
def test_every_way_to_train_is_replayed_rightly(settings: dict[str, Any]) -> None:
    rows, replayed = both("fedavg", rounds=4, **settings)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-5, atol=1e-6)
    assert replayed > 0


@pytest.mark.parametrize("augment", ["crop", "flip", "crop+flip"])
def test_augmentation_draws_the_same(augment: str) -> None:
    with experiment_of("lenet", "cuda", double=False, augment=augment, epochs=2).engine_closed() as experiment:
        jobs, floats = jobs_of(experiment), experiment.layout.floats
        rows, replayed = trained_at_once(experiment, jobs, "cuda")
        assert apart(rows, trained(experiment.engine, jobs), floats) == 0.0
        assert replayed > 0


@pytest.mark.parametrize("method", ["fedavg", "fedcross", "scaffold"])
def test_the_cuda_engine_gives_the_same_bits_twice(method: str) -> None:
    given = {"device": "cuda", "engine": "cuda"}
    assert small_run(method, {}, **given).digest == small_run(method, {}, **given).digest


class Looking(Client[Options]):
    """Its step asks the device for a number, which cannot be recorded."""

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        if float(trainer.gradient.sum()) > 0:
            trainer.gradient.mul_(0.5)


class Rated(Client[Options]):
    """Its step uses the learning rate as a number, which a recording would keep."""

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        loss = trainer.loss(batch)
        trainer.backward(loss)
        trainer.weights.sub_(trainer.gradient, alpha=trainer.lr)
        return loss


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("local", "replayed"), [(Looking, False), (Rated, True)])
def test_what_cannot_be_recorded_is_done_all_the_same(
    local: type[Client[Options]], replayed: bool, dropout: float
) -> None:
    """Also where it draws: a generator must not be left believing that it is being recorded."""
    register(Method("special", "", "", client=local))
    rows, number = both("special", rounds=4, lr_decay=0.5, model=lambda: dense(dropout))
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-5, atol=1e-6)
    assert (number > 0) is replayed


OWN = (
    Slowing, Renewing, Leaving, FromTorch, FromIterator, InSet, OwnAttribute, CallableObject,
    Teaching, OwnOptimizers, OneEnclosed, Buffered, Reshaped, Moving, InTurn, Anew,
)  # fmt: skip


@pytest.mark.parametrize("local", OWN)
def test_steps_of_ones_own_do_what_is_written(local: type[Client[Options]]) -> None:
    register(Method("special", "", "", client=local))
    rows, _ = both("special", rounds=4, momentum=0.9, lr=0.02, batch_size=3)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-5, atol=1e-6)


class Recurrent(nn.Module):
    """With dropout between its layers, for which cuDNN has a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, 16, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.rnn(x.view(-1, 8, 8))[0][:, -1])
        return y


@pytest.mark.parametrize("slots", [1, 3])
def test_dropout_between_recurrent_layers_is_the_clients_own(slots: int) -> None:
    rows, replayed = both("fedavg", rounds=4, model=Recurrent, slots=slots)
    assert torch.equal(rows[0], rows[1])
    assert replayed > 0


class Asking(nn.Module):
    """Asks the device for a number when it is tested, which cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = dense(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dense(x)
        return y if self.training or float(y.sum()) < 1e9 else -y


def test_a_score_that_cannot_be_recorded_leaves_everyones_generator_alone() -> None:
    given = {"device": "cuda", "engine": "cuda", "model": Asking}
    with build_small_run("fedavg", {}, **given).engine_closed() as experiment:
        row = experiment.rounds.parts.server.global_model()
        for _ in range(3):
            assert experiment.engine.evaluate(row) is not None
        torch.rand(2, device="cuda")
        assert not experiment.rounds.run_round(0)["failed_clients"]
        torch.rand(2, device="cuda")


@pytest.mark.parametrize("way", [{"optimizer": "adam", "lr": 0.01}, {"momentum": 0.5}])
def test_clients_keep_what_their_optimiser_knew(way: dict[str, Any]) -> None:
    kept, number = both("fedavg", rounds=5, keep_optimizer=True, **way)
    anew, _ = both("fedavg", rounds=5, **way)
    assert number
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], anew[0])


def test_lower_precision_learns_too() -> None:
    accuracy = {}
    for precision in ("fp32", "bf16"):
        given = {"device": "cuda", "engine": "cuda", "precision": precision, "rounds": 10}
        with build_small_run("fedavg", {}, **given).engine_closed() as experiment:
            for round in range(10):
                found = experiment.rounds.run_round(round)
            accuracy[precision] = found["accuracy"]
    assert accuracy["bf16"] > accuracy["fp32"] - 0.1


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("model", ["cnn", "resnet20", "vgg16"])
def test_weights_are_rounded_as_autocast_rounds_them(model: str, channels_last: bool) -> None:
    torch.backends.cudnn.deterministic = True
    module = build_model(model, (3, 32, 32), 10).cuda()
    x = torch.randn(8, 3, 32, 32, device="cuda")
    if channels_last:
        order: Any = torch.channels_last
        module, x = module.to(memory_format=order), x.to(memory_format=order)
    weights, found = list(module.parameters()), []
    for cast in (nullcontext(), _cast_parameters(module, torch.bfloat16)):
        torch.manual_seed(0)  # VGG-16 drops some
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), cast:
            output = module(x)
        found.append([output, *torch.autograd.grad(output.float().square().sum(), weights)])
    for usual, ours in zip(*found, strict=True):
        assert torch.equal(usual, ours)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_batch_norm_finds_its_statistics_in_a_row(precision: str) -> None:
    """ResNet-18 has ten biases before them; kernels for channels-last images read statistics four numbers at a time."""
    given = {"precision": precision, "channels_last": True}
    with experiment_of("resnet18", "cuda", double=False, **given).engine_closed() as experiment:
        rows, _ = trained_at_once(experiment, jobs_of(experiment), "cuda")
        assert all(experiment.layout.is_finite(row) for row in rows)


@pytest.mark.parametrize("size", [7, 5000, 200_000])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SGD(), partial(torch.optim.SGD, lr=0.03)),
        (SGD(0.9, weight_decay=5e-4), partial(torch.optim.SGD, lr=0.03, momentum=0.9, weight_decay=5e-4)),
        (SGD(0.5, nesterov=True), partial(torch.optim.SGD, lr=0.03, momentum=0.5, nesterov=True)),
        (Adam(weight_decay=1e-3), partial(torch.optim.Adam, lr=0.03, weight_decay=1e-3)),
    ],
)
def test_optimisers_step_as_torchs_fused_ones_do(ours: StatefulOptimizer, theirs: Any, size: int) -> None:
    draw = torch.Generator("cuda").manual_seed(size)
    weights = torch.randn(size, generator=draw, device="cuda")
    twin = nn.Parameter(weights.clone())
    lr = torch.tensor(0.03, device="cuda")
    optimizer = theirs([twin], fused=True)
    optimizer.param_groups[0]["lr"] = lr  # on the device, as ours has it
    ours.allocate_state(weights)
    for _ in range(6):
        twin.grad = torch.randn(size, generator=draw, device="cuda")
        ours.step(weights, twin.grad.clone(), lr)
        optimizer.step()
        assert torch.equal(weights, twin.detach())


def test_every_first_replay_is_checked_to_the_bit(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.devices.cuda_graphs.CHECK_ALL", True)
    with (
        caplog.at_level(logging.WARNING, "fedloom"),
        experiment_of("cnn", "cuda", double=False, epochs=3).engine_closed() as experiment,
    ):
        trained_at_once(experiment, jobs_of(experiment), "cuda")
    assert "replay" not in caplog.text


def test_runs_side_by_side_are_what_they_are_alone(tmp_path: Path) -> None:
    given = {"rounds": 3, "device": "cuda", "report": False, "model": "lenet:padding=2", "eval_every": 1}
    found = [
        fedloom.compare(["fedavg", "scaffold"], seeds=2, out=tmp_path / str(at_once), concurrent_runs=at_once, **given)
        for at_once in (1, 4)
    ]
    assert [run.digest for run in found[0].runs] == [run.digest for run in found[1].runs]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")
def test_the_number_of_gpus_does_not_change_a_bit() -> None:
    with experiment_of("cnn", "cuda:0", double=False).engine_closed() as experiment:
        jobs, shop = jobs_of(experiment), experiment.engine.context
        rows = []
        for devices in (["cuda:0"], ["cuda:0", "cuda:1"]):
            with CudaEngine(shop, devices) as engine:
                rows.append(trained(engine, jobs))
        assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))
