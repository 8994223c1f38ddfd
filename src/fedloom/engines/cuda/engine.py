"""The CUDA engine: many clients at once on one GPU, or on several.

Each slot trains one client after the other in a stream of its own, with recorded steps (slot.py, tapes.py); the slots'
kernels fill the chip together. The host goes round the slots and puts one step of each into its stream, far ahead of
the GPU, and waits only for answers, in the order of the jobs. Samples lie on the GPU as they are stored. The arithmetic
is that of the plain engine on the same GPU: the same clients, batches and draws.

With several GPUs clients go to whichever has a free slot, and their answers are brought to the first, where the server
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
from fedloom.devices.cuda_runtime import DEVICE_ERROR, is_out_of_memory_error
from fedloom.engines.base import Engine, raise_insufficient_memory
from fedloom.engines.cuda.device import CudaDevice, PendingUpdate
from fedloom.engines.cuda.graph_evaluator import GraphEvaluator
from fedloom.engines.cuda.slot import CudaSlot, copy_slot_context
from fedloom.engines.parallel import LargestFirstQueue, estimate_client_work
from fedloom.errors import InsufficientMemoryError, describe_error
from fedloom.training.local_training import EngineContext, Train, evaluate_clients_in_turn, finish_client_update
from fedloom.training.trainer import LocalTrainer

MOST_SLOTS = 16
"""More slots than this do not make a GPU busier, but each keeps a model, its optimiser's state and its recordings."""

LEAD = 2
"""Launches of a client's steps before the next client is seated. Seating takes the host longer than a GPU takes for the
one step of each client that it would have before it."""

T = TypeVar("T")
Work = Iterator[PendingUpdate | None]
Devices = torch.device | str | Sequence[torch.device | str]


class CudaEngine(Engine):
    """Slots on GPUs; on a CPU the same without recordings, one step after the other, for tests."""

    name = "cuda"

    def __init__(self, shop: EngineContext, devices: Devices = "cuda", slots: int = 0) -> None:
        super().__init__(shop)
        named = [devices] if isinstance(devices, torch.device | str) else devices
        most = slots or MOST_SLOTS
        self.gpus = [CudaDevice(shop, torch.device(name), most, first=not i) for i, name in enumerate(named)]
        self.device = self.homes.device = self.gpus[0].device
        self._trains = WeakKeyDictionary[CudaSlot, Train]()
        self._judge: GraphEvaluator | None = None
        self._fitting: LocalTrainer | None = None
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    @property
    def slots(self) -> list[CudaSlot]:
        """All slots, those of the GPUs in turn, so that the largest clients are spread over them."""
        most = max(len(gpu.slots) for gpu in self.gpus)
        return [gpu.slots[i] for i in range(most) for gpu in self.gpus if i < len(gpu.slots)]

    @property
    def at_once(self) -> int:
        return max(len(gpu.slots) for gpu in self.gpus)

    def train(self, round: int, jobs: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        places = [gpu.make_room(len(jobs)) for gpu in self.gpus]
        for gpu in self.gpus:
            gpu.add_slots(ceil(len(jobs) / len(self.gpus)))
        self._refuse_none()
        home = {id(slot): gpu for gpu in self.gpus for slot in gpu.slots}
        # Each GPU alone could hold all answers of a window, so whichever has a free slot has a free place too.
        waiting = LargestFirstQueue(
            [estimate_client_work(self.shop.federation, job) for job in jobs], window=min(places, default=0)
        )
        idle = self.slots
        answers: dict[int, PendingUpdate | ClientFailure] = {}

        def enqueue() -> None:
            """Put the work of every client that may begin into the streams of the slots, a step of each in turn.

            All of it before anybody waits for an answer, or slots would run dry meanwhile.
            """
            # After all that the server asked for: models to send, and answers that it read out of their places.
            before = [gpu.mark() for gpu in self.gpus]
            working: deque[tuple[CudaSlot, int, int, Work]] = deque()
            turns = 0
            while True:
                # Seating takes the host a while, so all who are seated get a step before the next one is: otherwise the
                # first, who has the most to do, would have nothing to do until the last is seated.
                if not turns and idle and (index := waiting.next()) is not None:
                    slot = idle.pop(0)
                    gpu = home[id(slot)]
                    place = gpu.free.pop()
                    working.appendleft((slot, index, place, self._work(gpu, slot, round, jobs[index], place, before)))
                    turns = len(working)
                if not working:
                    return
                turns = max(0, turns - 1)
                slot, index, place, work = working.popleft()
                gpu = home[id(slot)]
                try:
                    with slot.tape.stream():
                        answer: PendingUpdate | ClientFailure | None = next(work)
                except (Exception, SystemExit) as error:  # whatever a client's code does, the round goes on without it
                    if is_out_of_memory_error(error):
                        waiting.put_back(index)
                        gpu.free.append(place)
                        error.with_traceback(None)  # it holds what the step had
                        self._forget_scoring()  # which takes memory too, and may have to load its kernels again
                        if not gpu.drop(slot):
                            idle.append(slot)
                        self._refuse_none(error)
                        continue
                    if isinstance(error, DEVICE_ERROR):
                        raise
                    answer = ClientFailure(jobs[index], describe_error(error))
                    gpu.free.append(place)
                if answer is None:
                    working.append((slot, index, place, work))
                else:
                    answers[index] = answer
                    idle.append(slot)

        for turn, job in enumerate(jobs):
            if waiting.left():
                enqueue()
            answer = answers.pop(turn)
            if isinstance(answer, ClientFailure):
                yield answer
            else:
                loss, finite = answer.wait()
                row, uploads, kept = self._here(answer)
                yield ClientUpdate(job, row, answer.samples, loss, answer.steps, uploads, kept, finite)
                answer.gpu.free.append(answer.place)
            waiting.delivered += 1

    def _work(
        self, gpu: CudaDevice, slot: CudaSlot, round: int, job: ClientTask, place: int, before: Sequence[Any]
    ) -> Work:
        """One client's work from begin to end; gives way after every step, and hands out the answer at last."""
        for event in before:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
        store, positions = gpu.samples_of(slot, job.client)
        home, first = self.homes.get(job.client), job.client not in self.homes
        slot.seat(round, job.client, store, positions, job.row, job.extras, home, first)
        row, places = slot.row, {"home": dict(slot.home), "uploads": dict(slot.uploads)}
        passes, ahead = self._train_of(slot)(slot), LEAD
        while True:
            with slot.randomness():
                piece = next(passes, None)
            if piece is None:
                break
            for _ in slot.launch(piece):
                if not ahead:
                    yield None
                ahead = max(0, ahead - 1)
        with slot.randomness():
            slot.finish()
        finish_client_update(slot, row, places)
        gpu.keep(place, row, places)
        yield PendingUpdate(gpu, place, slot.samples, slot.host["steps"], slot.last_words(), gpu.mark())

    def _train_of(self, slot: CudaSlot) -> Train:
        if slot not in self._trains:
            self._trains[slot] = self.shop.train_apart() if self.shop.train_apart is not None else self.shop.train
        return self._trains[slot]

    def _here(self, answer: PendingUpdate) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """An answer on the first GPU, where the server is."""
        row, *groups = answer.gpu.answer(answer.place)
        if answer.gpu is not self.gpus[0]:
            row = row.to(self.device, copy=True)
            groups = [{name: tensor.to(self.device, copy=True) for name, tensor in group.items()} for group in groups]
        uploads, kept = groups
        return row, uploads, kept

    def _refuse_none(self, error: BaseException | None = None) -> None:
        if not any(gpu.slots for gpu in self.gpus) and any(not gpu.most for gpu in self.gpus):
            raise_insufficient_memory(error)

    def score(self, row: Tensor) -> EvaluationResult | None:
        test = self.shop.federation.test
        if test is None or not len(test):
            return None
        return self._in_memory(lambda: self._judge_of(test).score(row))

    def _judge_of(self, test: Samples) -> GraphEvaluator:
        if self._judge is None:
            self._judge = GraphEvaluator(
                LocalTrainer(copy_slot_context(self.shop.workshop), self.device), self.shop.workshop, test
            )
        return self._judge

    def score_clients(self, round: int, jobs: Sequence[ClientTask]) -> list[float | None]:
        """One after the other, step by step: there are few of them, and only when there is an evaluation."""

        def work() -> list[float | None]:
            if self._fitting is None:
                self._fitting = LocalTrainer(copy_slot_context(self.shop.workshop), self.device)
            return evaluate_clients_in_turn(self._fitting, self.shop, self.homes, round, jobs)

        return self._in_memory(work)

    def _in_memory(self, work: Callable[[], T]) -> T:
        """Do this work of the server; where there is no memory for it, slots make room."""
        gpu = self.gpus[0]
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not is_out_of_memory_error(error):
                    raise
                error.with_traceback(None)  # it holds what the work had
                self._forget_scoring()
                if not gpu.slots:
                    raise InsufficientMemoryError("the GPU has not enough memory to score a model.") from error
                gpu.drop(gpu.slots[-1])
                gpu.most = max(1, gpu.most)

    def _forget_scoring(self) -> None:
        if self._judge is not None:
            self._judge.close()
        self._judge = self._fitting = None

    def close(self) -> None:
        for gpu in self.gpus:
            gpu.close()
        self._forget_scoring()
        torch.set_num_threads(self._threads)
