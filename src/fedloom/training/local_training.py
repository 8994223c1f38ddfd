"""Train or evaluate one client, and store client states, in every engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core.evaluation import evaluation_slices
from fedloom.core.tasks import ClientTask, Shapes, TaskMemory
from fedloom.data import FederatedDataset, Samples
from fedloom.devices.cuda_runtime import DEVICE_ERROR, is_cuda_memory_error
from fedloom.training.context import TrainingContext
from fedloom.training.trainer import LocalTrainer

CLIENT_STATE_BYTES = 4 << 30
"""Bytes on a GPU for client states. The others are on the host."""


class ClientStates:
    """The tensors that clients keep between rounds. Only clients that have trained take memory."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        self.shapes = shapes
        self.dtype = dtype
        self.device = torch.device("cpu")
        """The device of the states, up to CLIENT_STATE_BYTES."""
        numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
        self._most = CLIENT_STATE_BYTES // max(1, numbers * dtype.itemsize)
        self._states: dict[int, dict[str, Tensor]] = {}
        self.changed: set[int] = set()
        """Clients whose state changed after the last checkpoint."""

    def __contains__(self, client_id: int) -> bool:
        return client_id in self._states

    def __len__(self) -> int:
        return len(self._states)

    def client_ids(self) -> list[int]:
        """Return the clients with a state, sorted."""
        return sorted(self._states)

    def get(self, client_id: int) -> Mapping[str, Tensor]:
        """Return the state of a client; empty if it has not trained yet (it then starts with zeros)."""
        return self._states.get(client_id, {})

    def copy_for(self, client_id: int, device: torch.device) -> dict[str, Tensor]:
        """Return a copy of a client's state on `device`; zeros if there is none yet."""
        state = self.get(client_id)
        zeros = {name: torch.zeros(shape, dtype=self.dtype) for name, shape in self.shapes.items()}
        return {name: state.get(name, zero).to(device, copy=True) for name, zero in zeros.items()}

    def save(self, client_id: int, values: Mapping[str, Tensor]) -> None:
        """Copy `values` into the client's state."""
        if not self.shapes:
            return
        state = self._states.setdefault(client_id, {})
        for name, value in values.items():
            if name in state:
                state[name].copy_(value)
            else:
                state[name] = value.detach().to(self.device if len(self._states) <= self._most else "cpu", copy=True)
        self.changed.add(client_id)


@dataclass(frozen=True)
class TrainOutcome:
    """The numbers of one client's training, whose tensors are in its `TaskMemory`."""

    num_examples: int
    loss: float
    """Mean loss over the last epoch; NaN if there was no step."""
    steps: int


def train_client(trainer: LocalTrainer, context: TrainingContext, task: ClientTask, memory: TaskMemory) -> TrainOutcome:
    """Train one client from start to end."""
    destinations = {"client_state": dict(memory.client_state), "uploads": dict(memory.uploads)}
    with context.rng_streams.seed_global_rng("noise", task.round, task.client_id, trainer.device):
        trainer.start_task(task, memory, context.data.client_samples(task.client_id))
        for local_steps in context.client.train(trainer):
            trainer.run_steps(local_steps)
        trainer.finish_task()
    finish_client_update(trainer, memory.row, destinations)
    return TrainOutcome(trainer.num_examples, trainer.mean_loss, trainer.steps)


def evaluate_client(
    trainer: LocalTrainer, context: TrainingContext, task: ClientTask, memory: TaskMemory
) -> float | None:
    """Return the accuracy of one client's personalized model. The memory is a copy and is discarded.

    A held-out client has the global model, if the method is not personalized.
    """
    first_held_out = len(context.data)
    if context.held_out is not None and task.client_id >= first_held_out:
        samples, test = context.held_out.samples(task.client_id - first_held_out)
        counts = np.bincount(test.y.cpu().numpy(), minlength=context.data.classes)
    else:
        samples = context.data.client_samples(task.client_id)
        test, counts = _test_of(context.data, task.client_id, samples)
    personalize = context.client.personalize
    if not len(test):
        return None
    with context.rng_streams.seed_global_rng("noise", task.round, task.client_id, trainer.device):
        trainer.start_task(task, memory, samples)
        for local_steps in personalize(trainer) if personalize is not None else ():
            trainer.run_steps(local_steps)
        if trainer.steps and trainer.config.statistics == "estimated":
            trainer.update_batch_norm_statistics()
    results = [trainer.evaluate(trainer.row, test[chunk]) for chunk in evaluation_slices(test)]
    return sum(results[1:], start=results[0]).accuracy_for(counts)


def _test_of(federated_data: FederatedDataset, client_id: int, samples: Samples) -> tuple[Samples, NDArray[np.int64]]:
    """Return the test samples for a client's personalized model, and how often each class counts."""
    test = federated_data.test
    assert test is not None, "clients are evaluated only with a test set"
    owners = federated_data.test_owners
    if owners is not None:
        own = test.take(np.flatnonzero(owners == client_id))
        return own, np.bincount(own.y.cpu().numpy(), minlength=federated_data.classes)
    # Other classes do not count. Without them a client with two of ten classes is evaluated five times as fast.
    counts = np.bincount(samples.y.cpu().numpy(), minlength=federated_data.classes)
    return test.take(np.flatnonzero(counts[test.y.cpu().numpy()])), counts


def evaluate_clients_locally(
    trainer: LocalTrainer, context: TrainingContext, client_states: ClientStates, tasks: Sequence[ClientTask]
) -> list[float | None]:
    """Evaluate clients one after the other with one trainer, as `Engine.evaluate_clients` does."""
    row, found = context.layout.empty(trainer.device), list[float | None]()
    for task in tasks:
        client_state = client_states.copy_for(task.client_id, trainer.device)
        memory = TaskMemory(row, client_state, {}, task.client_id not in client_states)
        try:
            found.append(evaluate_client(trainer, context, task, memory))
        except (Exception, SystemExit) as error:  # as in training, a client may fail
            if isinstance(error, DEVICE_ERROR) or is_cuda_memory_error(error):  # not the client's fault
                raise
            found.append(None)
    return found


def finish_client_update(trainer: LocalTrainer, row: Tensor, destinations: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy a client's results to their destinations, in case the method assigned other tensors to the trainer."""
    _fill("row", row, trainer.row)
    for group, now in (("client_state", trainer.client_state), ("uploads", trainer.uploads)):
        if destinations[group].keys() != now.keys():
            raise ValueError(f"{group} holds {sorted(now)}, but {sorted(destinations[group])} was declared")
        for name, destination in destinations[group].items():
            _fill(f"{group}[{name!r}]", destination, now[name])


def _fill(name: str, destination: Tensor, value: Tensor) -> None:
    if value is destination:
        return
    if value.shape != destination.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but {tuple(destination.shape)} was expected")
    destination.copy_(value)
