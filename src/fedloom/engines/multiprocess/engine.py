"""The multiprocess engine: one worker process per core.

Models lie in shared memory.

Each worker uses one thread, because threads would wait for each other (numbers in docs/engines.md). A worker that dies
is replaced and its request repeated. The result does not change, because nothing that a client did is visible before
its update is accepted. Updates are yielded in the order of the tasks, whatever the order in which clients finish, so
sums round alike.
"""

import multiprocessing
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess

import torch
from torch import Tensor

from fedloom.core.bank import Bank
from fedloom.core.evaluation import EvaluationResult, evaluation_slices
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.devices.threads import SingleThread
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
    WorkerTask,
    WorkerTensorAddress,
    WorkerTrainReply,
    WorkerTrainRequest,
    run_worker_process,
)
from fedloom.engines.parallel import LargestFirstQueue, ResultSlots, estimate_client_work
from fedloom.errors import FedloomError
from fedloom.training.context import TrainingContext
from fedloom.utils.system import available_cpu_count

SLOT_MEMORY = 1 << 30
"""Bytes for models in training and for updates that wait for the server."""

LIVES = 3
"""How many workers may die on one request before its client fails."""


def multiprocess_engine_available() -> bool:
    """Return whether this system can fork. Workers inherit the user's module and loss through the fork."""
    return "fork" in multiprocessing.get_all_start_methods()


class _Worker:
    """The main process's handle of a worker process."""

    def __init__(self, context: TrainingContext, result_slots: ResultSlots, other_workers: Sequence["_Worker"]) -> None:
        process_context = multiprocessing.get_context("fork")
        self.pipe, worker_pipe = process_context.Pipe()
        inherited_pipes = [self.pipe, *(other.pipe for other in other_workers)]
        self.process: ForkProcess = process_context.Process(
            target=run_worker_process, args=(worker_pipe, inherited_pipes, context, result_slots), daemon=True
        )
        with warnings.catch_warnings():
            # A forked child must not take locks that threads of its parent may hold. A worker only computes with torch.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                self.process.start()
            except OSError as error:
                raise FedloomError(f"no more worker processes can be started: {error.strerror}; use fewer.") from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        worker_pipe.close()
        self.requests: deque[Order] = deque()
        """Requests without a reply yet, in the order in which they were sent."""

    def send_request(self, request: Order) -> None:
        """Send a request to the worker."""
        self.requests.append(request)
        try:
            self.pipe.send(request)
        except OSError:  # it has died, which the wait for its reply will notice
            return

    def kill(self) -> None:
        """End the process at once."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


class MultiprocessEngine(Engine):
    """Train clients in worker processes with one thread each."""

    name = "multiprocess"

    def __init__(self, context: TrainingContext, workers: int = 0) -> None:
        super().__init__(context)
        self.num_workers = workers or available_cpu_count()
        self._threads = SingleThread()
        one = ResultSlots(1, context)
        affordable = SLOT_MEMORY // max(1, one.bank.rows.stride(0) * context.layout.dtype.itemsize)
        self._slots = ResultSlots(max(4 * self.num_workers, min(affordable, 4096)), context)
        self._workers: list[_Worker] = []
        self._num_mapped = 0
        self._shared_copies: list[Bank] = []
        self.num_dead_workers = 0
        """How many workers died and were replaced."""

    @staticmethod
    def make_bank(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Bank:
        return Bank.shared(count, width, dtype)

    def train(self, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        addresses = self._share_tensors(
            [tensor for task in tasks for tensor in (task.row, *task.extras.values())], len(tasks)
        )
        free = list(range(len(self._slots)))
        slot_of: dict[int, int] = {}
        queue = LargestFirstQueue(
            [estimate_client_work(self.context.data, task) for task in tasks], max_ahead=len(self._slots)
        )
        replies: dict[int, Reply] = {}

        def make(index: int) -> Order:
            task = tasks[index]
            slot = slot_of.get(index)
            if slot is None:
                slot = slot_of[index] = free.pop()
            first_visit = self._load_client_state(task.client_id, slot)
            result_row = _address(self._result_row(task, slot))
            return WorkerTrainRequest(index, _worker_task(task, addresses), slot, first_visit, result_row)

        try:
            for turn, task in enumerate(tasks):
                while turn not in replies:
                    self._advance(queue, make, replies)
                reply = replies.pop(turn)
                slot = slot_of.pop(turn)
                if isinstance(reply, WorkerTrainReply):
                    memory, outcome = self._slots.memory(slot, False), reply.outcome
                    yield ClientUpdate(
                        task,
                        self._result_row(task, slot),
                        outcome.num_examples,
                        outcome.loss,
                        outcome.steps,
                        memory.uploads,
                        memory.client_state,
                        reply.finite,
                    )
                elif isinstance(reply, WorkerErrorReply):
                    yield ClientFailure(task, reply.reason)
                free.append(slot)
                queue.num_delivered += 1
        finally:
            self._stop_busy_workers()

    def evaluate(self, row: Tensor) -> EvaluationResult | None:
        test = self.context.data.test
        if test is None or not len(test):
            return None
        num_slices = len(evaluation_slices(test))
        address = self._share_tensors([row], num_slices)[_key(row)]
        queue = LargestFirstQueue([1] * num_slices, max_ahead=num_slices)
        replies: dict[int, Reply] = {}
        try:
            while len(replies) < num_slices:
                self._advance(queue, lambda index: WorkerEvaluateRequest(index, address), replies)
        finally:
            self._stop_busy_workers()
        results = []
        for index in range(num_slices):
            reply = replies[index]
            if not isinstance(reply, WorkerEvaluateReply):
                reason = reply.reason if isinstance(reply, WorkerErrorReply) else "the worker sent no result"
                raise FedloomError(f"the model cannot be evaluated: {reason}.")
            results.append(reply.result)
        return sum(results[1:], start=results[0])

    def evaluate_clients(self, tasks: Sequence[ClientTask]) -> list[float | None]:
        addresses = self._share_tensors([task.row for task in tasks], len(tasks))
        free, slot_of = list(range(len(self._slots))), dict[int, int]()
        queue = LargestFirstQueue(
            [estimate_client_work(self.context.data, task) for task in tasks], max_ahead=len(tasks)
        )
        replies: dict[int, Reply] = {}

        def make(index: int) -> Order:
            task = tasks[index]
            slot = slot_of[index] if index in slot_of else slot_of.setdefault(index, free.pop())
            first_visit = self._load_client_state(task.client_id, slot)
            return WorkerEvaluateClientRequest(index, _worker_task(task, addresses), slot, first_visit)

        try:
            while len(replies) < len(tasks):
                self._advance(queue, make, replies)
                free += [slot_of.pop(index) for index in list(slot_of) if index in replies]
        finally:
            self._stop_busy_workers()
        found = [replies[index] for index in range(len(tasks))]
        return [reply.accuracy if isinstance(reply, WorkerEvaluateClientReply) else None for reply in found]

    def _result_row(self, task: ClientTask, slot: int) -> Tensor:
        """Return where a client's model is written: where the task says, if workers see that memory, or in its slot."""
        row = task.result_row
        seen = row is not None and Bank.locate(row, self._num_mapped) is not None
        return row if row is not None and seen else self._slots.row(slot)

    def _load_client_state(self, client_id: int, slot: int) -> bool:
        """Copy the client state into a slot, zeros if there is none yet. Return whether this is the first visit."""
        client_state = self.client_states.get(client_id)
        for name, tensor in self._slots.group(slot, "client_state").items():
            tensor.copy_(client_state[name]) if name in client_state else tensor.zero_()
        return client_id not in self.client_states

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._threads.release()

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def _advance(self, queue: "LargestFirstQueue", make: Callable[[int], Order], replies: dict[int, Reply]) -> None:
        """Send requests to the workers, then wait for at least one reply or dead worker.

        A worker gets its next request before it replies to the last one, so it never waits. The last requests of a
        round go to whichever worker is free first.
        """
        for max_requests in (1, 2):
            for worker in self._workers:
                if len(worker.requests) < max_requests and (
                    max_requests == 1 or queue.num_waiting() > len(self._workers)
                ):
                    index = queue.next()
                    if index is not None:
                        worker.send_request(make(index))
        pipes: dict[Connection, _Worker] = {w.pipe: w for w in self._workers if w.requests}
        for pipe in wait(list(pipes)):
            assert isinstance(pipe, Connection)
            worker = pipes[pipe]
            request = worker.requests[0]
            try:
                replies[request.index] = pipe.recv()
                worker.requests.popleft()
            except (EOFError, OSError):
                self._replace_dead_worker(worker)
                how = worker.process.exitcode
                if how == CANNOT_TRAIN:
                    raise FedloomError(
                        "worker processes cannot be forked from a process that has trained on a machine with a GPU; "
                        "use the sequential engine, or start from a fresh process."
                    ) from None
                for untouched in list(worker.requests)[1:]:
                    queue.put_back(untouched.index)
                if queue.put_back_after_death(request.index) < LIVES:
                    continue
                queue.drop(request.index)
                cause = f"signal {-how}" if how is not None and how < 0 else f"exit code {how}"
                replies[request.index] = WorkerErrorReply(request.index, f"its worker died {LIVES} times ({cause})")

    def _replace_dead_worker(self, worker: _Worker) -> None:
        """Start a new worker in place of one that died."""
        self.num_dead_workers += 1
        worker.process.join()
        worker.pipe.close()
        rest = [other for other in self._workers if other is not worker]
        self._workers[self._workers.index(worker)] = _Worker(self.context, self._slots, rest)

    def _stop_busy_workers(self) -> None:
        """Kill workers that are busy with requests whose replies nobody reads any more."""
        for worker in [w for w in self._workers if w.requests]:
            worker.kill()
            self._workers.remove(worker)

    def _share_tensors(self, tensors: Sequence[Tensor], num_requests: int) -> dict[object, WorkerTensorAddress]:
        """Return the addresses of these tensors, by `_key`. Tensors outside shared memory are copied there first.

        This also starts workers, at most `num_workers` or `num_requests`. Workers see only banks that existed when they
        were forked, so a new bank needs new workers. That happens in the first round.
        """
        shared: dict[object, Tensor] = {}
        num_copied = 0
        for tensor in tensors:
            if _key(tensor) in shared:
                continue
            if Bank.locate(tensor, Bank.num_mapped()) is None:
                shared[_key(tensor)] = self._copy_to_shared(num_copied, tensor)
                num_copied += 1
            else:
                shared[_key(tensor)] = tensor
        if any(Bank.locate(tensor, self._num_mapped) is None for tensor in shared.values()):
            for worker in self._workers:
                worker.kill()
            self._workers.clear()
        if not self._workers:
            self._num_mapped = Bank.num_mapped()
        while len(self._workers) < min(self.num_workers, num_requests):
            self._workers.append(_Worker(self.context, self._slots, self._workers))
        return {key: _address(tensor) for key, tensor in shared.items()}

    def _copy_to_shared(self, index: int, tensor: Tensor) -> Tensor:
        """Copy a tensor into shared memory that is reused in every round."""
        if index == len(self._shared_copies):
            self._shared_copies.append(Bank.shared(1, tensor.numel(), tensor.dtype))
        space = self._shared_copies[index].rows[0]
        if space.dtype is not tensor.dtype or space.numel() < tensor.numel():
            self._shared_copies[index] = Bank.shared(1, tensor.numel(), tensor.dtype)
            space = self._shared_copies[index].rows[0]
        return space[: tensor.numel()].view(tensor.shape).copy_(tensor)


def _worker_task(task: ClientTask, addresses: Mapping[object, WorkerTensorAddress]) -> WorkerTask:
    extras = tuple((name, addresses[_key(tensor)]) for name, tensor in task.extras.items())
    return WorkerTask(task.client_id, task.round, addresses[_key(task.row)], extras)


def _address(tensor: Tensor) -> WorkerTensorAddress:
    return WorkerTensorAddress(tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)


def _key(tensor: Tensor) -> object:
    """Return the identity of a tensor. Two equal views of a row have the same one."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
