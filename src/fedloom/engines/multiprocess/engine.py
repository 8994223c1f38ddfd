"""The host engine: this machine's cores as worker processes over rows in shared memory.

One thread a worker: processes need not wait for each other as threads do (docs/engines.md has the figures). A worker
that dies is replaced and its order carried out again; nothing a client did is visible before its update is
accepted, so the result does not change. Answers are handed on in the order of the jobs whatever the order in which
clients finish, so that sums round alike.
"""

import multiprocessing
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import torch
from torch import Tensor

from fedloom.core.bank import Bank
from fedloom.core.evaluation import EvaluationResult, evaluation_slices
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.engines.base import Engine
from fedloom.engines.multiprocess.worker import (
    CANNOT_TRAIN,
    SIGNALS,
    Order,
    Reply,
    WorkerErrorReply,
    WorkerEvaluateClientReply,
    WorkerEvaluateClientRequest,
    WorkerEvaluateReply,
    WorkerEvaluateRequest,
    WorkerTensorAddress,
    WorkerTrainReply,
    WorkerTrainRequest,
    run_worker_process,
)
from fedloom.engines.parallel import LargestFirstQueue, ResultSlots, estimate_client_work
from fedloom.errors import FedloomError
from fedloom.training.local_training import EngineContext
from fedloom.utils.system import available_cpu_count

SLOT_MEMORY = 1 << 30
"""Bytes for models that are being trained or wait for their turn to be taken in."""

LIVES = 3
"""How often an order may cost its worker's life before its client is given up."""


def multiprocess_engine_available() -> bool:
    """Whether this system can fork, which is how workers get a user's own module and loss as they are."""
    return "fork" in multiprocessing.get_all_start_methods()


class _Worker:
    """A worker process as the coordinator sees it."""

    def __init__(self, shop: EngineContext, slots: ResultSlots, others: Sequence["_Worker"]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        inherited = [self.pipe, *(other.pipe for other in others)]
        self.process: ForkProcess = context.Process(
            target=run_worker_process, args=(theirs, inherited, shop, slots), daemon=True
        )
        with warnings.catch_warnings():
            # A child of a process with threads must not take locks they may hold; ours computes with torch and no more.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                self.process.start()
            except OSError as error:
                raise FedloomError(f"no more worker processes can be started: {error.strerror}; use fewer.") from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.orders: deque[Order] = deque()
        """What it was told to do and has not replied to yet, in that order."""

    def give(self, order: Order) -> None:
        self.orders.append(order)
        try:
            self.pipe.send(order)
        except OSError:  # it has died; waiting for its reply will show that
            return

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


class MultiprocessEngine(Engine):
    """Worker processes, one thread each."""

    name = "host"

    def __init__(self, shop: EngineContext, workers: int = 0) -> None:
        super().__init__(shop)
        self.count = workers or available_cpu_count()
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        one = ResultSlots(1, shop.workshop)
        affordable = SLOT_MEMORY // max(1, one.bank.rows.stride(0) * shop.workshop.layout.dtype.itemsize)
        self._slots = ResultSlots(max(4 * self.count, min(affordable, 4096)), shop.workshop)
        self._workers: list[_Worker] = []
        self._known = 0
        self._lent: list[Bank] = []
        self.deaths = 0
        """How many workers have died and been replaced."""

    @staticmethod
    def make_bank(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Bank:
        return Bank.shared(count, width, dtype)

    def train(self, round: int, jobs: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        places = self._publish([tensor for job in jobs for tensor in (job.row, *job.extras.values())], len(jobs))
        free = list(range(len(self._slots)))
        slot_of: dict[int, int] = {}
        waiting = LargestFirstQueue(
            [estimate_client_work(self.shop.federation, job) for job in jobs], window=len(self._slots)
        )
        replies: dict[int, Reply] = {}

        def make(index: int) -> Order:
            job = jobs[index]
            slot = slot_of.get(index)
            if slot is None:
                slot = slot_of[index] = free.pop()
            self._bring_home(job.client, slot)
            extras = tuple((name, places[_key(tensor)]) for name, tensor in job.extras.items())
            return WorkerTrainRequest(
                index, round, job.client, slot, places[_key(job.row)], extras, job.client not in self.homes
            )

        try:
            for turn, job in enumerate(jobs):
                while turn not in replies:
                    self._advance(waiting, make, replies)
                reply = replies.pop(turn)
                slot = slot_of.pop(turn)
                if isinstance(reply, WorkerTrainReply):
                    uploads, home = self._slots.group(slot, "uploads"), self._slots.group(slot, "home")
                    row = self._slots.row(slot)
                    yield ClientUpdate(job, row, reply.samples, reply.loss, reply.steps, uploads, home, reply.finite)
                elif isinstance(reply, WorkerErrorReply):
                    yield ClientFailure(job, reply.reason)
                free.append(slot)
                waiting.delivered += 1
        finally:
            self._abandon()

    def score(self, row: Tensor) -> EvaluationResult | None:
        test = self.shop.federation.test
        if test is None or not len(test):
            return None
        pieces = len(evaluation_slices(test))
        place = self._publish([row], pieces)[_key(row)]
        waiting = LargestFirstQueue([1] * pieces, window=pieces)
        replies: dict[int, Reply] = {}
        try:
            while len(replies) < pieces:
                self._advance(waiting, lambda index: WorkerEvaluateRequest(index, place), replies)
        finally:
            self._abandon()
        scores = []
        for index in range(pieces):
            reply = replies[index]
            if not isinstance(reply, WorkerEvaluateReply):
                reason = reply.reason if isinstance(reply, WorkerErrorReply) else "no score came"
                raise FedloomError(f"the model cannot be scored: {reason}.")
            scores.append(reply.score)
        return sum(scores[1:], start=scores[0])

    def score_clients(self, round: int, jobs: Sequence[ClientTask]) -> list[float | None]:
        places = self._publish([job.row for job in jobs], len(jobs))
        free, slot_of = list(range(len(self._slots))), dict[int, int]()
        waiting = LargestFirstQueue([estimate_client_work(self.shop.federation, job) for job in jobs], window=len(jobs))
        replies: dict[int, Reply] = {}

        def make(index: int) -> Order:
            job = jobs[index]
            slot = slot_of[index] if index in slot_of else slot_of.setdefault(index, free.pop())
            self._bring_home(job.client, slot)
            new = job.client not in self.homes
            return WorkerEvaluateClientRequest(index, round, job.client, slot, places[_key(job.row)], new)

        try:
            while len(replies) < len(jobs):
                self._advance(waiting, make, replies)
                free += [slot_of.pop(index) for index in list(slot_of) if index in replies]
        finally:
            self._abandon()
        found = [replies[index] for index in range(len(jobs))]
        return [reply.accuracy if isinstance(reply, WorkerEvaluateClientReply) else None for reply in found]

    def _bring_home(self, client: int, slot: int) -> None:
        """Lay out a copy of what the client keeps."""
        kept = self.homes.get(client)
        for name, tensor in self._slots.group(slot, "home").items():
            tensor.copy_(kept[name]) if name in kept else tensor.zero_()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        torch.set_num_threads(self._threads)

    def worker_pids(self) -> list[int]:
        """The processes that are at work."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def _advance(self, waiting: "LargestFirstQueue", make: Callable[[int], Order], replies: dict[int, Reply]) -> None:
        """Give orders to the workers, then wait until something happens and take note of it.

        A worker has its next order in hand before it replies to the last, so that it does not wait for us; except for
        the last ones of a round, which go to whoever is free first.
        """
        for hand in (1, 2):
            for worker in self._workers:
                if len(worker.orders) < hand and (hand == 1 or waiting.left() > len(self._workers)):
                    index = waiting.next()
                    if index is not None:
                        worker.give(make(index))
        pipes: dict[Connection, _Worker] = {w.pipe: w for w in self._workers if w.orders}
        for pipe in wait(list(pipes)):
            assert isinstance(pipe, Connection)
            worker = pipes[pipe]
            order = worker.orders[0]
            try:
                replies[order.index] = pipe.recv()
                worker.orders.popleft()
            except (EOFError, OSError):
                self._bury(worker)
                how = worker.process.exitcode
                if how == CANNOT_TRAIN:
                    raise FedloomError(
                        "worker processes cannot be forked from a process that has trained on a machine with a GPU; "
                        "use the plain engine, or start from a fresh process."
                    ) from None
                for untouched in list(worker.orders)[1:]:
                    waiting.put_back(untouched.index)
                if waiting.again(order.index) < LIVES:
                    continue
                waiting.drop(order.index)
                cause = f"signal {-how}" if how is not None and how < 0 else f"exit code {how}"
                replies[order.index] = WorkerErrorReply(order.index, f"its worker died {LIVES} times ({cause})")

    def _bury(self, worker: _Worker) -> None:
        """Replace a worker that has died."""
        self.deaths += 1
        worker.process.join()
        worker.pipe.close()
        rest = [other for other in self._workers if other is not worker]
        self._workers[self._workers.index(worker)] = _Worker(self.shop, self._slots, rest)

    def _abandon(self) -> None:
        """End the workers that are still busy with orders nobody waits for any more."""
        for worker in [w for w in self._workers if w.orders]:
            worker.end()
            self._workers.remove(worker)

    def _publish(self, tensors: Sequence[Tensor], work: int) -> dict[object, WorkerTensorAddress]:
        """Where workers find these tensors (look up by `_key`); those outside shared memory are copied there first.

        There are then as many workers as were asked for, or as there is `work` for if that is less.

        Workers see the banks that were there when they were forked, so a new bank means new workers; that happens
        in the first round and then no more.
        """
        shared: dict[object, Tensor] = {}
        lent = 0
        for tensor in tensors:
            if _key(tensor) in shared:
                continue
            if Bank.locate(tensor, Bank.made()) is None:
                shared[_key(tensor)] = self._lend(lent, tensor)
                lent += 1
            else:
                shared[_key(tensor)] = tensor
        if any(Bank.locate(tensor, self._known) is None for tensor in shared.values()):
            for worker in self._workers:
                worker.end()
            self._workers.clear()
        if not self._workers:
            self._known = Bank.made()
        while len(self._workers) < min(self.count, work):
            self._workers.append(_Worker(self.shop, self._slots, self._workers))
        return {
            key: WorkerTensorAddress(tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
            for key, tensor in shared.items()
        }

    def _lend(self, index: int, tensor: Tensor) -> Tensor:
        """Copy a tensor into shared memory that is used again every round."""
        if index == len(self._lent):
            self._lent.append(Bank.shared(1, tensor.numel(), tensor.dtype))
        space = self._lent[index].rows[0]
        if space.dtype is not tensor.dtype or space.numel() < tensor.numel():
            self._lent[index] = Bank.shared(1, tensor.numel(), tensor.dtype)
            space = self._lent[index].rows[0]
        return space[: tensor.numel()].view(tensor.shape).copy_(tensor)


def _key(tensor: Tensor) -> object:
    """What tells tensors apart: two views of the same row are one tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
