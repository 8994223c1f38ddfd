"""A worker process of the multiprocess engine, and its messages.

It is forked from the main process, so it has the module, the loss, the samples and the method without pickling them.
Models pass through shared memory, and only small messages through the pipe.
"""

import gc
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fedloom.core.bank import bank_tensor_at_address
from fedloom.core.evaluation import EvaluationResult, evaluation_slices
from fedloom.core.layout import all_finite
from fedloom.engines.parallel import ResultSlots
from fedloom.errors import describe_error
from fedloom.training.local_training import EngineContext, evaluate_client, train_client
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
class WorkerTrainRequest:
    """A request to train one client in a slot."""

    index: int
    round: int
    client_id: int
    slot: int
    row: WorkerTensorAddress
    extras: tuple[tuple[str, WorkerTensorAddress], ...]
    first_visit: bool


@dataclass(frozen=True)
class WorkerEvaluateRequest:
    """A request to evaluate a model on one slice of the test set."""

    index: int
    row: WorkerTensorAddress


@dataclass(frozen=True)
class WorkerEvaluateClientRequest:
    """A request to evaluate one client's personalized model, which is computed in a slot."""

    index: int
    round: int
    client_id: int
    slot: int
    row: WorkerTensorAddress
    first_visit: bool


@dataclass(frozen=True)
class WorkerTrainReply:
    index: int
    num_examples: int
    loss: float
    steps: int
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
    pipe: Connection, inherited_pipes: Sequence[Connection], context: EngineContext, result_slots: ResultSlots
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
                trainer = trainer or LocalTrainer(context.training_context)
                reply = _carry_out(request, trainer, context, result_slots)
            except (Exception, SystemExit) as error:  # the round goes on without this client
                reply = WorkerErrorReply(request.index, describe_error(error))
            pipe.send(reply)
    except (EOFError, OSError):
        os._exit(0)


def _carry_out(request: Order, trainer: LocalTrainer, context: EngineContext, result_slots: ResultSlots) -> Reply:
    if isinstance(request, WorkerEvaluateRequest):
        test = context.federated_data.test
        assert test is not None, "the main process requests an evaluation only with a test set"
        return WorkerEvaluateReply(
            request.index, trainer.evaluate(request.row.tensor(), test[evaluation_slices(test)[request.index]])
        )
    if isinstance(request, WorkerEvaluateClientRequest):
        row, client_state = result_slots.row(request.slot), result_slots.group(request.slot, "client_state")
        received = request.row.tensor()
        accuracy = evaluate_client(
            trainer, context, request.round, request.client_id, row, received, client_state, request.first_visit
        )
        return WorkerEvaluateClientReply(request.index, accuracy)
    row, uploads, client_state = (
        result_slots.row(request.slot),
        result_slots.group(request.slot, "uploads"),
        result_slots.group(request.slot, "client_state"),
    )
    for tensor in uploads.values():
        tensor.zero_()
    num_examples, loss, steps = train_client(
        trainer,
        context,
        request.round,
        request.client_id,
        row,
        request.row.tensor(),
        {name: address.tensor() for name, address in request.extras},
        client_state,
        uploads,
        request.first_visit,
    )
    finite = context.training_context.layout.is_finite(row) and all(
        map(all_finite, (*uploads.values(), *client_state.values()))
    )
    return WorkerTrainReply(request.index, num_examples, loss, steps, finite)
