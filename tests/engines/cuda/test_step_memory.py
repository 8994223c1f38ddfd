"""Tests of steps with memory: other networks, buffers, optimizers.

Replayed or not, they compute the same.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.engines.sequential import SequentialEngine
from fedloom.methods import Client, Options
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.captured_steps import as_plain
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
from tests.support.task_rounds import in_round
from tests.support.trainers import Counting

pytestmark = pytest.mark.usefixtures("fake_graphs")


@pytest.mark.parametrize("local", [Teaching, OwnOptimizers, OneEnclosed])
def test_a_replay_that_is_looked_at_is_taken_back_wherever_it_has_written(local: type[Client[Options]]) -> None:
    """Or the step would have been done twice there."""
    (slot,) = as_plain(local).slots
    assert slot.graph_runner.replayed > slot.graph_runner.captured > 0


@pytest.mark.parametrize("local", [Buffered, Reshaped])
def test_a_step_that_makes_buffers_is_done_as_it_is_written(local: type[Client[Options]]) -> None:
    as_plain(local)


def test_where_a_buffer_lies_is_part_of_what_is_recorded() -> None:
    (slot,) = as_plain(Moving).slots
    assert slot.graph_runner.replayed > slot.graph_runner.captured > 0


@pytest.mark.parametrize("way", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.001}])
@pytest.mark.parametrize("local", [InTurn, Anew])
def test_a_new_optimiser_leaves_the_old_one_to_who_holds_it(local: type[Client[Options]], way: dict[str, Any]) -> None:
    (slot,) = as_plain(local, **way).slots
    assert slot.graph_runner.replayed > slot.graph_runner.captured > 0
    if local is Anew:
        assert slot.graph_runner.captured <= 4, "it lies where the old one lay"


class Between(Client[Options]):
    """Asks for a loss between its passes and after them, in the mode of training."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        for _ in range(2):
            yield LocalSteps(self.training_step, steps=5)
            trainer.loss(Batch(torch.ones(2, 64), torch.arange(2)))


@pytest.mark.parametrize("write", ["in place", "anew"])
@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_that_are_written_between_passes_are_the_clients_own(write: str, persistent: bool) -> None:
    """Every client counts its ten steps and the two losses, and no other's."""
    engine = as_plain(Between, model=partial(Counting, write, persistent))
    assert sum(slot.graph_runner.replayed for slot in engine.slots) > 0
    for one in (CudaEngine(engine.context, "cpu", 1), SequentialEngine(engine.context)):
        layout = engine.context.layout
        start = torch.zeros(layout.size)
        for update in one.train(in_round(0, [ClientTask(client, start) for client in (3, 4)])):
            assert isinstance(update, ClientUpdate)
            (seen,) = (entry for entry in layout.entries if "seen" in entry.names)
            assert seen.view(update.row).item() == 12.0
