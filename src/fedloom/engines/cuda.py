"""The CUDA engine: many clients at once on one GPU.

Each slot trains one client after the other in a stream of its own, with recorded steps (slot.py, tapes.py); the slots'
kernels fill the chip together. The host goes round the slots and puts one step of each into its stream, far ahead of
the GPU, and waits only for answers, in the order of the jobs. Samples lie on the GPU as they are stored. The arithmetic
is that of the plain engine on the same GPU: the same clients, batches and draws.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.banks import Bank
from fedloom.bench import Bench, Score
from fedloom.data import PooledFederation, Samples
from fedloom.engines.base import Engine, Shop, conclude, reason_of, score_in_turn
from fedloom.engines.judge import Judge
from fedloom.engines.order import LargestFirst, work_of
from fedloom.engines.slot import Positions, SlotBench, apart
from fedloom.engines.worker import Slots
from fedloom.errors import FedloomError
from fedloom.exchange import Job, Lost, Update

MOST_SLOTS = 16
"""More slots than this do not make a GPU busier, but each keeps a model, its optimiser's state and its recordings."""

RESULT_MEMORY = 8 << 30
"""Bytes for answers that wait for their turn."""


@dataclass(frozen=True)
class _Answer:
    """A client's training that is on its way; what it holds is there once `ready` has happened."""

    place: int
    samples: int
    steps: int
    losses: tuple[Tensor, list[int]]
    ready: Any

    def wait(self) -> float:
        """Wait for it, and say what the mean loss of its last epoch was."""
        if self.ready is not None:
            self.ready.synchronize()
        values, sizes = self.losses
        if not sizes:
            return float("nan")
        return float(values.double() @ torch.tensor(sizes, dtype=torch.float64)) / sum(sizes)


Work = Iterator[_Answer | None]


class CudaEngine(Engine):
    """Slots on one GPU; on a CPU the same without recordings, one step after the other, for tests."""

    name = "cuda"

    def __init__(self, shop: Shop, device: torch.device | str = "cuda", slots: int = 0) -> None:
        super().__init__(shop)
        self.device = self.homes.device = torch.device(device)
        self.most = slots or MOST_SLOTS
        self.slots: list[SlotBench] = []
        self._results: Slots | None = None
        self._judge: Judge | None = None
        self._fitting: Bench | None = None
        self._pool: Samples | None = None
        if isinstance(shop.federation, PooledFederation):
            pool = shop.federation.pool
            self._pool = Samples(pool.x.to(self.device), pool.y.to(self.device))
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def train(self, round: int, jobs: Sequence[Job]) -> Iterator[Update | Lost]:
        results = self._room(len(jobs))
        while len(self.slots) < min(self.most, len(jobs)):
            self.slots.append(SlotBench(self.shop.workshop, self.device))
        waiting = LargestFirst([work_of(self.shop.federation, job) for job in jobs], window=len(results))
        free, idle = list(range(len(results))), list(self.slots)
        answers: dict[int, _Answer | Lost] = {}
        started = self._mark()

        def enqueue() -> None:
            """Put the work of every client that may begin into the streams of the slots, a step of each in turn.

            All of it before anybody waits for an answer, or slots would run dry meanwhile.
            """
            working: deque[tuple[SlotBench, int, int, Work]] = deque()
            while True:
                while idle and (index := waiting.next()) is not None:
                    slot, place = idle.pop(0), free.pop()
                    working.append((slot, index, place, self._work(slot, round, jobs[index], place, started)))
                if not working:
                    return
                slot, index, place, work = working.popleft()
                try:
                    with slot.tape.stream():
                        answer: _Answer | Lost | None = next(work)
                except torch.OutOfMemoryError as error:
                    waiting.put_back(index)
                    free.append(place)
                    self._give_up(slot, error)
                    continue
                except (Exception, SystemExit) as error:  # whatever a client's code does, the round goes on without it
                    if isinstance(error, torch.AcceleratorError):
                        raise
                    answer = Lost(jobs[index], reason_of(error))
                    free.append(place)
                if answer is None:
                    working.append((slot, index, place, work))
                else:
                    answers[index] = answer
                    idle.append(slot)

        for turn, job in enumerate(jobs):
            if waiting.left():
                enqueue()
            answer = answers.pop(turn)
            if isinstance(answer, Lost):
                yield answer
            else:
                loss, groups = answer.wait(), (results.group(answer.place, name) for name in ("uploads", "home"))
                yield Update(job, results.row(answer.place), answer.samples, loss, answer.steps, *groups)
                free.append(answer.place)
            waiting.delivered += 1

    def _work(self, slot: SlotBench, round: int, job: Job, place: int, started: Any) -> Work:
        """One client's work from begin to end; gives way after every step, and hands out the answer at last."""
        if started is not None:
            torch.cuda.current_stream().wait_event(started)
        store, positions = self._samples(slot, job.client)
        home, first = self.homes.get(job.client), job.client not in self.homes
        slot.seat(round, job.client, store, positions, job.row, job.extras, home, first)
        row, places = slot.row, {"home": dict(slot.home), "uploads": dict(slot.uploads)}
        passes = self.shop.train(slot)
        while True:
            with slot.randomness():
                piece = next(passes, None)
            if piece is None:
                break
            for _ in slot.launch(piece):
                yield None
        with slot.randomness():
            slot.finish()
        conclude(slot, row, places)
        assert self._results is not None
        self._results.row(place).copy_(row)
        for group, tensors in places.items():
            for name, target in self._results.group(place, group).items():
                target.copy_(tensors[name])
        yield _Answer(place, slot.samples, slot.host["steps"], slot.last_losses(), self._mark())

    def _samples(self, slot: SlotBench, client: int) -> tuple[Samples, Positions]:
        """Where a client's samples lie on the device."""
        federation = self.shop.federation
        if self._pool is not None and isinstance(federation, PooledFederation):
            return self._pool, federation.parts[client]
        samples = federation.client(client)
        return slot.bring(samples), np.arange(len(samples))

    def _room(self, jobs: int) -> Slots:
        """Memory for answers: one place for each job, or as many as there is room for."""
        shop = self.shop.workshop

        def make(count: int, width: int) -> Bank:
            return self.make_bank(count, width, shop.layout.dtype, self.device)

        if self._results is None or len(self._results) < jobs:
            one = Slots(1, shop, make).bank.rows
            most = max(2 * self.most, RESULT_MEMORY // (one.stride(0) * one.element_size()))
            if self._results is None or len(self._results) < min(jobs, most):
                self._results = Slots(min(jobs, most), shop, make)
        return self._results

    def _give_up(self, slot: SlotBench, error: Exception) -> None:
        """Go on with one slot less: there is no memory for all of them."""
        self.slots.remove(slot)
        self.most = len(self.slots)
        if not self.slots:
            raise FedloomError("the GPU has not enough memory to train one client; use a smaller batch.") from error
        torch.cuda.synchronize(self.device)
        slot.close()
        torch.cuda.empty_cache()

    def _mark(self) -> Any:
        """An event in the current stream; None where there are no streams."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def score(self, row: Tensor) -> Score | None:
        test = self.shop.federation.test
        if test is None or not len(test):
            return None
        if self._judge is None:
            self._judge = Judge(SlotBench(self.shop.workshop, self.device), self.shop.workshop, test)
        return self._judge.score(row)

    def score_clients(self, round: int, jobs: Sequence[Job]) -> list[float | None]:
        """One after the other, step by step: there are few of them, and only when there is an evaluation."""
        if self._fitting is None:
            self._fitting = Bench(apart(self.shop.workshop), self.device)
        return score_in_turn(self._fitting, self.shop, self.homes, round, jobs)

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
        self.slots.clear()
        if self._judge is not None:
            self._judge.close()
        self._judge = self._fitting = self._results = self._pool = None
        torch.set_num_threads(self._threads)
