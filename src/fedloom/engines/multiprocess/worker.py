"""One worker process of the host engine: it trains the clients and scores the pieces it is told to.

It was forked from the coordinator, so it has the module, the loss, the samples and the method as they were there,
whatever they are, without anything having been pickled. Rows pass through shared memory; only small records pass
through the pipe.
"""

import gc
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from fedloom.core.bank import tensor_at_address
from fedloom.core.evaluation import EvaluationResult, evaluation_slices
from fedloom.core.layout import all_finite
from fedloom.engines.parallel import ResultSlots
from fedloom.errors import describe_error
from fedloom.training.local_training import EngineContext, evaluate_client, train_client
from fedloom.training.trainer import LocalTrainer
from fedloom.utils.system import die_with_parent, keep_freed_memory


@dataclass(frozen=True)
class WorkerTensorAddress:
    """Where in shared memory a tensor lies."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return tensor_at_address(self.address, self.shape, self.dtype)


@dataclass(frozen=True)
class WorkerTrainRequest:
    """Train one client in one slot."""

    index: int
    round: int
    client: int
    slot: int
    row: WorkerTensorAddress
    extras: tuple[tuple[str, WorkerTensorAddress], ...]
    first_visit: bool


@dataclass(frozen=True)
class WorkerEvaluateRequest:
    """Score a model on one piece of the test set."""

    index: int
    row: WorkerTensorAddress


@dataclass(frozen=True)
class WorkerEvaluateClientRequest:
    """Score one client's own model, which is made in a slot."""

    index: int
    round: int
    client: int
    slot: int
    row: WorkerTensorAddress
    first_visit: bool


@dataclass(frozen=True)
class WorkerTrainReply:
    index: int
    samples: int
    loss: float
    steps: int
    finite: bool
    """Whether all of it is: a worker that has just written it looks through it faster than the coordinator can."""


@dataclass(frozen=True)
class WorkerErrorReply:
    index: int
    reason: str


@dataclass(frozen=True)
class WorkerEvaluateReply:
    index: int
    score: EvaluationResult


@dataclass(frozen=True)
class WorkerEvaluateClientReply:
    index: int
    accuracy: float | None


CANNOT_TRAIN = 77
"""Exit code of a worker in which autograd does not work: torch's threads for GPUs do not survive a fork."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Held back while a worker is forked: Python loses what is raised in its fork hooks, and the child has our handlers."""

Order = WorkerTrainRequest | WorkerEvaluateRequest | WorkerEvaluateClientRequest
Reply = WorkerTrainReply | WorkerErrorReply | WorkerEvaluateReply | WorkerEvaluateClientReply


def run_worker_process(pipe: Connection, others: Sequence[Connection], shop: EngineContext, slots: ResultSlots) -> None:
    """The life of a worker: take an order, carry it out, reply; end when the coordinator is gone."""
    for other in others:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    die_with_parent()
    keep_freed_memory()
    gc.freeze()  # what was inherited is never garbage; leaving it alone keeps its pages shared
    torch.set_num_threads(1)
    try:
        one = torch.ones((), requires_grad=True)
        torch.autograd.grad(one * one, [one])
    except RuntimeError:
        os._exit(CANNOT_TRAIN)
    bench: LocalTrainer | None = None
    try:
        while True:
            order = pipe.recv()
            try:
                bench = bench or LocalTrainer(shop.workshop)
                reply = _carry_out(order, bench, shop, slots)
            except (Exception, SystemExit) as error:  # whatever a client's code does, the round goes on without it
                reply = WorkerErrorReply(order.index, describe_error(error))
            pipe.send(reply)
    except (EOFError, OSError):
        os._exit(0)


def _carry_out(order: Order, bench: LocalTrainer, shop: EngineContext, slots: ResultSlots) -> Reply:
    if isinstance(order, WorkerEvaluateRequest):
        test = shop.federation.test
        assert test is not None, "the coordinator asks for scores only where there is a test set"
        return WorkerEvaluateReply(
            order.index, bench.score(order.row.tensor(), test[evaluation_slices(test)[order.index]])
        )
    if isinstance(order, WorkerEvaluateClientRequest):
        row, home = slots.row(order.slot), slots.group(order.slot, "home")
        received = order.row.tensor()
        accuracy = evaluate_client(bench, shop, order.round, order.client, row, received, home, order.first_visit)
        return WorkerEvaluateClientReply(order.index, accuracy)
    row, uploads, home = slots.row(order.slot), slots.group(order.slot, "uploads"), slots.group(order.slot, "home")
    for tensor in uploads.values():
        tensor.zero_()
    samples, loss, steps = train_client(
        bench,
        shop,
        order.round,
        order.client,
        row,
        order.row.tensor(),
        {name: place.tensor() for name, place in order.extras},
        home,
        uploads,
        order.first_visit,
    )
    finite = shop.workshop.layout.is_finite(row) and all(map(all_finite, (*uploads.values(), *home.values())))
    return WorkerTrainReply(order.index, samples, loss, steps, finite)
