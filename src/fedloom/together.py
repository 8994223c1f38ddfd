"""Several runs at once in one process, watched as one piece of work.

One run of a small network leaves most of a GPU idle, and kernels of different processes take turns instead of running
side by side. So runs that are to share a GPU share a process: a thread each, whose work for the GPU overlaps with that
of the others. Each run is what it would be alone.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.config import Config
from fedloom.cuda_streams import own_stream
from fedloom.devices import make_device
from fedloom.errors import ShortOfMemory
from fedloom.finished import Run
from fedloom.shortage import release
from fedloom.watching import Silent, Stopped, Watcher

_PATIENCE = 1.0
"""Seconds a run has to end after it was interrupted, before it is interrupted once more."""

Job = tuple[Path, Config, Callable[[Watcher], Run]]
"""A run's folder, its config, and what carries it out (or goes on with it) under a watcher."""


@dataclass(frozen=True)
class _Whole:
    """All runs as one plan."""

    method: str
    data: str
    seed: int
    rounds: int
    device: str


class _Hub:
    """What the watcher of all runs is told."""

    def __init__(self, watcher: Watcher, jobs: Sequence[Job]) -> None:
        self.watcher = watcher
        self.lock = threading.RLock()
        self.failed = False
        self._at_work: set[int] = set()
        self._rounds = 0
        self._total = sum(config.rounds for _, config, _ in jobs)

    def count(self, rounds: int, record: Mapping[str, Any] | None = None) -> None:
        """So many rounds have been played, the last with this record."""
        with self.lock:
            self._rounds += rounds
            if record is not None:
                self.watcher.record({"round": min(self._rounds, self._total), "note": record.get("note")})

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let this thread be interrupted by `interrupt`, until the end."""
        thread = threading.get_ident()
        try:
            with self.lock:
                self._at_work.add(thread)
            yield
        finally:
            with self.lock:
                self._at_work.discard(thread)
                _raise_in(thread, None)  # one that is on its way would reach whoever has the thread next

    def interrupt(self) -> None:
        """Python tells Ctrl-C to the main thread alone: tell it to those at work."""
        with self.lock:
            self.failed = True
            for thread in self._at_work:
                _raise_in(thread, KeyboardInterrupt)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise it in another thread before its next step in Python; None takes back one that was not raised yet."""
    what = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)


class _OneOf:
    """The watcher of one of the runs."""

    def __init__(self, hub: _Hub, name: str) -> None:
        self._hub, self._name = hub, name
        self._rounds = 0

    def begin(self, folder: Path, config: Any, history: list[dict[str, Any]]) -> None:
        done = max((record["round"] for record in history), default=0)
        self._hub.count(done - self._rounds)  # it may begin again, from a round that was counted
        self._rounds = done

    def note(self, text: str) -> None:
        with self._hub.lock:
            self._hub.watcher.note(f"{self._name}: {text}")

    def record(self, record: Mapping[str, Any]) -> None:
        if not record["round"]:  # the evaluation before the first round
            return
        self._rounds += 1
        self._hub.count(1, {**record, "note": f"{self._name}: {record['note']}"} if record.get("note") else record)

    def download(self, name: str, done: int, total: int) -> None:
        with self._hub.lock:
            self._hub.watcher.download(name, done, total)

    def work(self, what: str, done: int, total: int) -> None:
        with self._hub.lock:
            self._hub.watcher.work(f"{self._name}: {what}", done, total)

    def wants_stop(self) -> bool:
        return self._hub.failed or self._hub.watcher.wants_stop()

    def end(self) -> None:
        return


def carry_out(jobs: Sequence[Job], at_once: int, watcher: Watcher | None, path: Path) -> list[Run]:
    """Carry out all jobs, `at_once` at a time; results in the order of the jobs. One that fails stops the others.

    One that finds no memory beside the others goes on alone after them.
    """
    watcher = watcher or Silent()
    hub = _Hub(watcher, jobs)
    eyes = [_OneOf(hub, folder.name) for folder, _, _ in jobs]
    first = jobs[0][1]
    whole = _Whole(f"{len(jobs)} runs, {at_once} at once,", first.data, first.seed, hub._total, first.device)
    watcher.begin(path, whole, [])  # type: ignore[arg-type]  # a display needs no more of a config than this

    def one(job: Job, eye: _OneOf) -> Run:
        _, config, run = job
        if hub.failed or watcher.wants_stop():
            raise Stopped("stopped between two runs")
        with own_stream(make_device(config.device)):
            return run(eye)

    def beside(job: Job, eye: _OneOf) -> Run | None:
        """Beside others; None: it found no memory."""
        try:
            with hub.interruptible():
                return one(job, eye)
        except ShortOfMemory as shortage:
            eye.note(f"{shortage} Once the others are done there may be enough, so it goes on after them, alone.")
        except BaseException:
            hub.failed = True
            raise
        release()
        return None

    numbers = iter(range(len(jobs)))
    done: dict[int, Run | None] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while (number := next(numbers, None)) is not None:
            try:
                done[number] = beside(jobs[number], eyes[number])
            except BaseException as error:  # raised below, by the thread that was asked for all this
                errors.append(error)

    try:
        _work_in_threads(at_once, work, hub)
        for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
            raise error  # what failed, before what it stopped
        return [done[number] or one(job, eye) for number, (job, eye) in enumerate(zip(jobs, eyes, strict=True))]
    finally:
        watcher.end()


def _work_in_threads(number: int, work: Callable[[], None], hub: _Hub) -> None:
    """Let so many threads work to their end; on Ctrl-C they end before it goes on its way."""
    ended = threading.Semaphore(0)

    def work_and_say_so() -> None:
        try:
            work()
        finally:
            ended.release()

    threads = [threading.Thread(target=work_and_say_so, name=f"fedloom-run-{i}") for i in range(number)]
    try:
        for thread in threads:
            thread.start()
        # Not by `join`: interrupted there, Python takes a thread that goes on for one that has ended. And in short
        # pieces: a signal that comes right before a wait is heard only after it.
        for _ in threads:
            while not ended.acquire(timeout=_PATIENCE):
                continue
    except KeyboardInterrupt:
        while _any_lives(threads):
            # Where nothing can be raised (in the callback of a weak reference, say) an interrupt is lost: say it again.
            hub.interrupt()
            again = time.monotonic() + _PATIENCE
            while _any_lives(threads) and time.monotonic() < again:
                time.sleep(0.01)
        raise
    for thread in threads:
        thread.join()


def _any_lives(threads: Sequence[threading.Thread]) -> bool:
    alive = threading.enumerate()
    return any(thread in alive for thread in threads if thread.ident is not None)  # None: interrupted before it began
