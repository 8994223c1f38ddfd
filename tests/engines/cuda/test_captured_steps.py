"""Tests that steps with host state give the sequential engine's results.

Each step may be replayed or run eagerly.
"""

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.methods import Client, Options
from fedloom.testing.fixtures import SmallFederatedDataset, batch_norm_network
from fedloom.training.batches import Batch
from fedloom.training.optimizers import SGD
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.captured_steps import as_plain, scaled
from tests.support.fake_graphs import FakeGraphTape
from tests.support.trainers import Counting

pytestmark = pytest.mark.usefixtures("fake_graphs")


class Scaling:
    """A step of its own, made for each client. One takes the place in memory of the one before."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(bench, batch, self.factor)


class OwnStep(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(Scaling(0.1 * (1 + trainer.client_id)).step)


class OwnObject(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.scratch["scaling"] = Scaling(0.1 * (1 + trainer.client_id))
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(trainer, batch, trainer.scratch["scaling"].factor)


class OwnNumber(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.scratch["factor"] = np.float32(0.1 * (1 + trainer.client_id))
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(trainer, batch, float(trainer.scratch["factor"]))


class OwnNetwork(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.scratch["other"] = copy.deepcopy(trainer.module).requires_grad_(False)
        for weight in trainer.scratch["other"].parameters():
            weight.mul_(1 + 0.1 * trainer.client_id)
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        apart = trainer.module(batch.x) - trainer.scratch["other"](batch.x)
        loss = trainer.loss(batch) + apart.square().mean()
        trainer.backward(loss)
        trainer.optimizer_step()
        return loss


class OwnRound(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        self.factor = 0.1 * (1 + trainer.round)
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(trainer, batch, self.factor)


class OwnCount(Client[Options]):
    """Every ninth step is another one, which a look at the first replay does not show."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        self.count = 0
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        self.count += 1
        return scaled(trainer, batch, 1.0 if self.count % 9 else -1.0)


class OwnFunction(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        count = 0

        def step(bench: LocalTrainer, batch: Batch) -> Tensor:
            nonlocal count
            count += 1
            return scaled(bench, batch, 1.0 if count % 9 else -1.0)

        yield LocalSteps(step)


class OwnOptimizer(Client[Options]):
    """It makes its state when it takes its first step."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.optimizer = SGD(momentum=0.9)
        yield LocalSteps(self.training_step)


class OwnDraws(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.scratch["draw"] = np.random.default_rng(trainer.client_id)
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(trainer, batch, -1.0 if trainer.scratch["draw"].random() < 0.04 else 1.0)


@pytest.mark.parametrize(
    "local", [OwnStep, OwnObject, OwnNumber, OwnNetwork, OwnRound, OwnCount, OwnFunction, OwnOptimizer, OwnDraws]
)
def test_what_a_step_holds_on_the_host_is_never_that_of_another_client(local: type[Client[Options]]) -> None:
    as_plain(local)


def plain_step(bench: LocalTrainer, batch: Batch) -> Tensor:
    return scaled(bench, batch, 0.5)


class PlainFunction(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(plain_step)
        yield LocalSteps(plain_step)


def test_a_step_that_is_a_plain_function_is_recorded_for_all_clients() -> None:
    tape = as_plain(PlainFunction).slots[0].graph_runner
    assert tape.replayed > 4 * tape.captured > 0


class Enclosed(Client[Options]):
    """A step that is made anew for each client, in `train`."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        factor = 0.1 * (1 + trainer.client_id)

        def step(bench: LocalTrainer, batch: Batch) -> Tensor:
            return scaled(bench, batch, factor)

        yield LocalSteps(step)


def test_a_step_that_is_made_for_each_client_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.devices.cuda_graphs.PATIENCE", 4)
    as_plain(Enclosed)
    assert len([line for line in caplog.messages if "changes from client to client" in line]) == 1


def test_a_step_that_is_not_recorded_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "fedloom"):
        as_plain(OwnCount)
    assert [record.getMessage() for record in caplog.records] == [
        "the step OwnCount.training_step is not captured and runs eagerly each time: "
        "it keeps count of something on the host"
    ]


class Validating(Client[Options]):
    """Takes validation samples into its steps, which lie elsewhere for every client."""

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        held = trainer.validation
        loss = trainer.loss(batch) + trainer.loss(Batch(held.x[:3], held.y[:3]))
        trainer.backward(loss)
        trainer.optimizer_step()
        return loss


class Adopting(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.use_config(
            trainer.config.model_copy(update={"lr_decay": 0.1 * (1 + trainer.client_id), "lr": 0.1 + trainer.round})
        )
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(trainer, batch, trainer.config.lr_decay)


@pytest.mark.parametrize("local", [Validating, Adopting])
def test_what_a_step_reads_on_the_bench_is_that_of_its_client(local: type[Client[Options]]) -> None:
    as_plain(local, validation=0.3)


def test_settings_that_a_step_does_not_read_need_no_recording_of_their_own() -> None:
    class Quicker(Client[Options]):
        def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
            trainer.use_config(trainer.config.model_copy(update={"lr": 0.01 * (1 + trainer.client_id)}))
            yield LocalSteps(self.training_step, steps=4)

    (slot,) = as_plain(Quicker).slots
    assert slot.graph_runner.captured == 2, "one of a single step, and one of three"


class Dropping(Client[Options]):
    """Decides on the host, now and then, to do something else; a look at the first replay hardly ever shows it."""

    draw: Callable[[], float]

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        random.seed(trainer.client_id)
        np.random.seed(trainer.client_id)  # noqa: NPY002 - as many do
        yield LocalSteps(self.training_step)

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        return scaled(trainer, batch, -1.0 if type(self).draw() < 0.04 else 1.0)


@pytest.mark.parametrize("draw", [random.random, np.random.random])
def test_a_step_that_draws_on_the_host_is_never_recorded(
    draw: Callable[[], float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Dropping, "draw", staticmethod(draw), raising=False)
    with caplog.at_level("WARNING", "fedloom"):
        as_plain(Dropping)
    assert "it draws random numbers on the host" in caplog.text


def test_a_batch_of_one_that_cannot_be_recorded_leaves_batch_norm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm rests in a batch of one sample, and must not when the next batch comes."""
    capture, recording = FakeGraphTape.capture, list[bool]()

    class Asking(Client[Options]):
        def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
            loss = trainer.loss(batch)
            if recording:
                raise RuntimeError("it asks the device for a number")
            trainer.backward(loss)
            trainer.optimizer_step()
            return loss

    def failing(self: FakeGraphTape, *given: Any) -> Any:
        recording.append(True)
        try:
            return capture(self, *given)
        finally:
            recording.clear()

    monkeypatch.setattr(FakeGraphTape, "capture", failing)
    samples = len(SmallFederatedDataset().client_samples(1))
    as_plain(Asking, [1], batch_size=samples - 1, steps=6, model=batch_norm_network)


def test_a_local_may_ask_for_the_mean_loss_between_its_passes() -> None:
    class Asking(Client[Options]):
        def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
            assert np.isnan(trainer.mean_loss)
            yield LocalSteps(self.training_step, epochs=1)
            trainer.lr = 0.1 * trainer.mean_loss
            yield LocalSteps(self.training_step, epochs=1)

    as_plain(Asking)


class Network(nn.Module):
    """Has a number on the host, which others set, one that it counts itself, or one on the device alone."""

    def __init__(self, counts: bool, on_device: bool = False) -> None:
        super().__init__()
        self.out, self.factor, self.calls, self.counts = nn.Linear(64, 10), 1.0, 0, counts
        self.register_buffer("seen", torch.zeros(()) if on_device else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counts and self.training
        if self.seen is not None:
            self.seen.add_(0.1 * self.training)
            return self.out(x) * self.seen.cos()
        return self.out(x) * (self.factor if self.calls % 10 else -self.factor)


class Setting(Client[Options]):
    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.module.factor = 1.0 + trainer.round  # type: ignore[assignment]
        yield LocalSteps(self.training_step)


@pytest.mark.parametrize("given", [(False,), (True,), (False, True)], ids=["set", "counted", "on the device"])
def test_numbers_of_the_network_are_those_of_the_moment(given: tuple[bool, ...]) -> None:
    as_plain(Setting, [3], model=lambda: Network(*given))


@pytest.mark.parametrize("write", ["in place", "anew"])
@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_are_those_of_the_client_however_a_network_writes_them(write: str, persistent: bool) -> None:
    engine = as_plain(Client, model=partial(Counting, write, persistent))
    assert sum(slot.graph_runner.replayed for slot in engine.slots) > 0
