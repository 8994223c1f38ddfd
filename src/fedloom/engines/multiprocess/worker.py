"""A worker process of the multiprocess engine, and its messages.

It is forked from the main process, so it has the module, the loss, the samples and the method without pickling them.
Models pass through shared memory, and only small messages through the pipe.
"""

import gc
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fedloom.core.bank import bank_tensor_at_address
from fedloom.core.evaluation import EvaluationResult, evaluation_slices
from fedloom.core.layout import all_finite
from fedloom.core.tasks import ClientTask
from fedloom.engines.parallel import ResultSlots
from fedloom.errors import describe_error
from fedloom.training.context import TrainingContext
from fedloom.training.local_training import TrainOutcome, evaluate_client, train_client
from fedloom.training.trainer import LocalTrainer
from fedloom.utils.system import die_with_parent, keep_freed_memory


@dataclass(frozen=True)
class WorkerTensorAddress:
    """The address, shape and dtype of a tensor in shared memory."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return bank_tensor_at_address(self.address, self.shape, self.dtype)


@dataclass(frozen=True)
class WorkerTask:
    """A `ClientTask` for another process: its tensors are given by their addresses."""

    client_id: int
    round: int
    row: WorkerTensorAddress
    extras: tuple[tuple[str, WorkerTensorAddress], ...]

    def task(self) -> ClientTask:
        extras = {name: address.tensor() for name, address in self.extras}
        return ClientTask(self.client_id, self.row.tensor(), extras=extras, round=self.round)


@dataclass(frozen=True)
class WorkerTrainRequest:
    """A request to train one client in a slot."""

    index: int
    task: WorkerTask
    slot: int
    first_visit: bool
    result_row: WorkerTensorAddress
    """Where to write the model; the slot holds the other results."""


@dataclass(frozen=True)
class WorkerEvaluateRequest:
    """A request to evaluate a model on one slice of the test set."""

    index: int
    row: WorkerTensorAddress


@dataclass(frozen=True)
class WorkerEvaluateClientRequest:
    """A request to evaluate one client's personalized model, which is computed in a slot."""

    index: int
    task: WorkerTask
    slot: int
    first_visit: bool


@dataclass(frozen=True)
class WorkerTrainReply:
    index: int
    outcome: TrainOutcome
    finite: bool
    """Whether every number of the result is finite. The worker has the result in its cache, so it checks faster."""


@dataclass(frozen=True)
class WorkerErrorReply:
    index: int
    reason: str


@dataclass(frozen=True)
class WorkerEvaluateReply:
    index: int
    result: EvaluationResult


@dataclass(frozen=True)
class WorkerEvaluateClientReply:
    index: int
    accuracy: float | None


CANNOT_TRAIN = 77
"""Exit code of a worker in which autograd fails, because torch's GPU threads do not survive a fork."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Blocked during a fork: Python drops exceptions of fork hooks, and the child still has the parent's handlers."""

Order = WorkerTrainRequest | WorkerEvaluateRequest | WorkerEvaluateClientRequest
Reply = WorkerTrainReply | WorkerErrorReply | WorkerEvaluateReply | WorkerEvaluateClientReply


def run_worker_process(
    pipe: Connection, inherited_pipes: Sequence[Connection], context: TrainingContext, result_slots: ResultSlots
) -> None:
    """Receive requests, carry them out and reply, until the main process is gone."""
    for inherited_pipe in inherited_pipes:
        inherited_pipe.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    die_with_parent()
    keep_freed_memory()
    gc.freeze()  # keeps inherited pages shared: the collector would write to them
    torch.set_num_threads(1)
    try:
        one = torch.ones((), requires_grad=True)
        torch.autograd.grad(one * one, [one])
    except RuntimeError:
        os._exit(CANNOT_TRAIN)
    trainer: LocalTrainer | None = None
    try:
        while True:
            request = pipe.recv()
            try:
                trainer = trainer or LocalTrainer(context)
                reply = _carry_out(request, trainer, context, result_slots)
            except (Exception, SystemExit) as error:  # the round goes on without this client
                reply = WorkerErrorReply(request.index, describe_error(error))
            pipe.send(reply)
    except (EOFError, OSError):
        os._exit(0)


def _carry_out(request: Order, trainer: LocalTrainer, context: TrainingContext, result_slots: ResultSlots) -> Reply:
    if isinstance(request, WorkerEvaluateRequest):
        test = context.data.test
        assert test is not None, "the main process requests an evaluation only with a test set"
        return WorkerEvaluateReply(
            request.index, trainer.evaluate(request.row.tensor(), test[evaluation_slices(test)[request.index]])
        )
    task, memory = request.task.task(), result_slots.memory(request.slot, request.first_visit)
    if isinstance(request, WorkerEvaluateClientRequest):
        accuracy = evaluate_client(trainer, context, task, replace(memory, uploads={}))
        return WorkerEvaluateClientReply(request.index, accuracy)
    for tensor in memory.uploads.values():
        tensor.zero_()
    memory = replace(memory, row=request.result_row.tensor())
    outcome = train_client(trainer, context, task, memory)
    finite = context.layout.is_finite(memory.row) and all(
        map(all_finite, (*memory.uploads.values(), *memory.client_state.values()))
    )
    return WorkerTrainReply(request.index, outcome, finite)
