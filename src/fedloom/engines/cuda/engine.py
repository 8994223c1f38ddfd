"""The CUDA engine: many clients at once on one or several GPUs.

Each slot trains one client after the other in a stream of its own, by replaying CUDA graphs (slot.py,
devices/cuda_graphs.py). The slots' kernels fill the GPU together. The host visits the slots in turn and enqueues one
step of each, far ahead of the GPU. It waits only for results, in the order of the tasks. Samples stay on the GPU as
they are stored. The arithmetic is that of the sequential engine on the same GPU: the same clients, batches and draws.

With several GPUs, clients go to any GPU with a free slot, and their results are copied to the first, where the server
is. A client's training does not depend on its slot, so on GPUs of one kind the result does not depend on their number.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedloom.core.evaluation import EvaluationResult
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.data import Samples
from fedloom.devices.cuda_runtime import DEVICE_ERROR, is_cuda_memory_error
from fedloom.devices.threads import SingleThread
from fedloom.engines.base import Engine, raise_engine_memory_error
from fedloom.engines.cuda.device import CudaDevice, CudaDeviceUpdate
from fedloom.engines.cuda.graph_evaluator import GraphEvaluator
from fedloom.engines.cuda.slot import CudaSlot, copy_slot_context
from fedloom.engines.parallel import LargestFirstQueue, estimate_client_work
from fedloom.errors import InsufficientMemoryError, describe_error
from fedloom.training.context import Train, TrainingContext
from fedloom.training.local_training import evaluate_clients_locally, finish_client_update
from fedloom.training.trainer import LocalTrainer

MOST_SLOTS = 16
"""Maximum slots by default. More do not make a GPU busier, and each keeps a model, optimizer state and graphs."""

LEAD = 2
"""Launches of a client's steps before the next client is assigned. Assigning takes the host longer than a GPU takes for
a single step of each client."""

T = TypeVar("T")
Work = Iterator[CudaDeviceUpdate | None]
Devices = torch.device | str | Sequence[torch.device | str]


class CudaEngine(Engine):
    """Train clients in slots on GPUs. On a CPU, for tests, steps run one after the other, without graphs."""

    name = "cuda"

    def __init__(self, context: TrainingContext, devices: Devices = "cuda", slots: int = 0) -> None:
        super().__init__(context)
        named = [devices] if isinstance(devices, torch.device | str) else devices
        max_slots = slots or MOST_SLOTS
        self.gpus = [CudaDevice(context, torch.device(name), max_slots, first=not i) for i, name in enumerate(named)]
        self.device = self.client_states.device = self.gpus[0].device
        self._train_functions = WeakKeyDictionary[CudaSlot, Train]()
        self._evaluator: GraphEvaluator | None = None
        self._personal_trainer: LocalTrainer | None = None
        self._threads = SingleThread()

    @property
    def slots(self) -> list[CudaSlot]:
        """Return all slots, alternating between the GPUs, which spreads the largest clients over them."""
        most = max(len(gpu.slots) for gpu in self.gpus)
        return [gpu.slots[i] for i in range(most) for gpu in self.gpus if i < len(gpu.slots)]

    @property
    def concurrency(self) -> int:
        return max(len(gpu.slots) for gpu in self.gpus)

    def train(self, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        rooms = [gpu.allocate_results(len(tasks)) for gpu in self.gpus]
        for gpu in self.gpus:
            gpu.add_slots(ceil(len(tasks) / len(self.gpus)))
        self._check_any_slots()
        gpu_of_slot = {id(slot): gpu for gpu in self.gpus for slot in gpu.slots}
        # Each GPU alone can hold all results of a window, so a GPU with a free slot has a free result slot too.
        queue = LargestFirstQueue(
            [estimate_client_work(self.context.data, task) for task in tasks], max_ahead=min(rooms, default=0)
        )
        idle = self.slots
        answers: dict[int, CudaDeviceUpdate | ClientFailure] = {}

        def enqueue() -> None:
            """Enqueue the work of all clients that may start, one step of each in turn.

            All of it goes before any wait for a result, or slots would run dry meanwhile.
            """
            # Clients start after the server's work in these streams: models to send, and results that it has read.
            before = [gpu.record_event() for gpu in self.gpus]
            working: deque[tuple[CudaSlot, int, int, Work]] = deque()
            turns = 0
            while True:
                # Assigning a task takes the host a while, so all assigned clients get a step before the next one is
                # assigned. Otherwise the first, which has the most to do, would idle until the last is assigned.
                if not turns and idle and (index := queue.next()) is not None:
                    slot = idle.pop(0)
                    gpu = gpu_of_slot[id(slot)]
                    result_slot = gpu.free_result_slots.pop()
                    working.appendleft(
                        (slot, index, result_slot, self._work(gpu, slot, tasks[index], result_slot, before))
                    )
                    turns = len(working)
                if not working:
                    return
                turns = max(0, turns - 1)
                slot, index, result_slot, work = working.popleft()
                gpu = gpu_of_slot[id(slot)]
                try:
                    with slot.graph_runner.stream():
                        answer: CudaDeviceUpdate | ClientFailure | None = next(work)
                except (Exception, SystemExit) as error:  # whatever a client's code raises, the round goes on
                    if is_cuda_memory_error(error):
                        queue.put_back(index)
                        gpu.free_result_slots.append(result_slot)
                        error.with_traceback(None)  # it holds the tensors of the step
                        self._close_evaluators()  # they take memory too, and may have to load kernels again
                        if not gpu.drop_slot(slot):
                            idle.append(slot)
                        self._check_any_slots(error)
                        continue
                    if isinstance(error, DEVICE_ERROR):
                        raise
                    answer = ClientFailure(tasks[index], describe_error(error))
                    gpu.free_result_slots.append(result_slot)
                if answer is None:
                    working.append((slot, index, result_slot, work))
                else:
                    answers[index] = answer
                    idle.append(slot)

        for turn, task in enumerate(tasks):
            if queue.num_waiting():
                enqueue()
            answer = answers.pop(turn)
            if isinstance(answer, ClientFailure):
                yield answer
            else:
                loss, finite = answer.wait()
                row, uploads, client_state = self._on_first_gpu(answer)
                yield ClientUpdate(task, row, answer.num_examples, loss, answer.steps, uploads, client_state, finite)
                answer.gpu.free_result_slots.append(answer.result_slot)
            queue.num_delivered += 1

    def _work(self, gpu: CudaDevice, slot: CudaSlot, task: ClientTask, result_slot: int, before: Sequence[Any]) -> Work:
        """Train one client; yield None after every step, and its `CudaDeviceUpdate` at the end."""
        for event in before:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
        store, sample_indices = gpu.client_samples(slot, task.client_id)
        client_state, first_visit = self.client_states.get(task.client_id), task.client_id not in self.client_states
        slot.assign_task(
            task.round, task.client_id, store, sample_indices, task.row, task.extras, client_state, first_visit
        )
        row, destinations = slot.row, {"client_state": dict(slot.client_state), "uploads": dict(slot.uploads)}
        all_steps, ahead = self._train_function_of(slot)(slot), LEAD
        while True:
            with slot.rng_scope():
                local_steps = next(all_steps, None)
            if local_steps is None:
                break
            for _ in slot.enqueue_steps(local_steps):
                if not ahead:
                    yield None
                ahead = max(0, ahead - 1)
        with slot.rng_scope():
            slot.finish_task()
        finish_client_update(slot, row, destinations)
        gpu.save_result(result_slot, row, destinations)
        yield CudaDeviceUpdate(
            gpu, result_slot, slot.num_examples, slot.host["steps"], slot.final_values(), gpu.record_event()
        )

    def _train_function_of(self, slot: CudaSlot) -> Train:
        if slot not in self._train_functions:
            self._train_functions[slot] = (
                self.context.client.make_copy()
                if self.context.client.make_copy is not None
                else self.context.client.train
            )
        return self._train_functions[slot]

    def _on_first_gpu(self, answer: CudaDeviceUpdate) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return a result on the first GPU, where the server is."""
        row, *groups = answer.gpu.load_result(answer.result_slot)
        if answer.gpu is not self.gpus[0]:
            row = row.to(self.device, copy=True)
            groups = [{name: tensor.to(self.device, copy=True) for name, tensor in group.items()} for group in groups]
        uploads, client_state = groups
        return row, uploads, client_state

    def _check_any_slots(self, error: BaseException | None = None) -> None:
        if not any(gpu.slots for gpu in self.gpus) and any(not gpu.max_slots for gpu in self.gpus):
            raise_engine_memory_error(error)

    def evaluate(self, row: Tensor) -> EvaluationResult | None:
        test = self.context.data.test
        if test is None or not len(test):
            return None
        return self._make_room_for(lambda: self._make_evaluator(test).evaluate(row))

    def _make_evaluator(self, test: Samples) -> GraphEvaluator:
        if self._evaluator is None:
            self._evaluator = GraphEvaluator(
                LocalTrainer(copy_slot_context(self.context), self.device),
                self.context,
                test,
            )
        return self._evaluator

    def evaluate_clients(self, tasks: Sequence[ClientTask]) -> list[float | None]:
        """Evaluate one client after the other, step by step: they are few, and only in rounds with evaluation."""

        def work() -> list[float | None]:
            if self._personal_trainer is None:
                self._personal_trainer = LocalTrainer(copy_slot_context(self.context), self.device)
            return evaluate_clients_locally(self._personal_trainer, self.context, self.client_states, tasks)

        return self._make_room_for(work)

    def _make_room_for(self, work: Callable[[], T]) -> T:
        """Do this work of the server; drop slots if it runs out of memory."""
        gpu = self.gpus[0]
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not is_cuda_memory_error(error):
                    raise
                error.with_traceback(None)  # it holds the tensors of the work
                self._close_evaluators()
                if not gpu.slots:
                    raise InsufficientMemoryError("the GPU has not enough memory to evaluate a model.") from error
                gpu.drop_slot(gpu.slots[-1])
                gpu.max_slots = max(1, gpu.max_slots)

    def _close_evaluators(self) -> None:
        if self._evaluator is not None:
            self._evaluator.close()
        self._evaluator = self._personal_trainer = None

    def close(self) -> None:
        for gpu in self.gpus:
            gpu.close()
        self._close_evaluators()
        self._threads.release()
