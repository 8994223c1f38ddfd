"""The sequential engine: one client after the other, in this process.

It is the reference: the tests compare the other engines with it. On the CPU it computes with one thread, as the workers
of the multiprocess engine do, so both give the same bits.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedloom.core.evaluation import EvaluationResult, evaluation_slices
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate, TaskMemory
from fedloom.devices.cuda_runtime import is_cuda_memory_error
from fedloom.devices.threads import SingleThread
from fedloom.engines.base import Engine, raise_engine_memory_error
from fedloom.errors import describe_error
from fedloom.training.context import TrainingContext
from fedloom.training.local_training import evaluate_clients_locally, train_client
from fedloom.training.trainer import LocalTrainer


class SequentialEngine(Engine):
    """Train one client at a time with one trainer."""

    name = "sequential"

    def __init__(self, context: TrainingContext, device: torch.device | str = "cpu") -> None:
        super().__init__(context)
        self.device = self.client_states.device = torch.device(device)
        self._threads = SingleThread()
        self._trainer = LocalTrainer(context, self.device)
        self._row = context.layout.empty(self.device)

    def train(self, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        for task in tasks:
            memory = self._memory_for(task)
            try:
                outcome = train_client(self._trainer, self.context, task, memory)
            except (Exception, SystemExit) as error:  # the round goes on without this client
                if is_cuda_memory_error(error):  # not the client's fault: the next one would fail too
                    raise_engine_memory_error(error)
                yield ClientFailure(task, describe_error(error))
                continue
            yield ClientUpdate(
                task,
                memory.row,
                outcome.num_examples,
                outcome.loss,
                outcome.steps,
                memory.uploads,
                memory.client_state,
            )

    def _memory_for(self, task: ClientTask) -> TaskMemory:
        """Return memory for one client's training; all clients share the row, unless their tasks name another."""
        uploads = {
            name: torch.zeros(shape, dtype=self.context.layout.dtype, device=self.device)
            for name, shape in self.context.client.upload_shapes.items()
        }
        client_state = self.client_states.copy_for(task.client_id, self.device)
        row = self._row if task.result_row is None else task.result_row
        return TaskMemory(row, client_state, uploads, task.client_id not in self.client_states)

    def evaluate(self, row: Tensor) -> EvaluationResult | None:
        test = self.context.data.test
        if test is None or not len(test):
            return None
        results = [self._trainer.evaluate(row, test[chunk]) for chunk in evaluation_slices(test)]
        return sum(results[1:], start=results[0])

    def evaluate_clients(self, tasks: Sequence[ClientTask]) -> list[float | None]:
        return evaluate_clients_locally(self._trainer, self.context, self.client_states, tasks)

    def close(self) -> None:
        self._threads.release()
