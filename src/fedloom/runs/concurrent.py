"""Several runs at once in one process, watched as one piece of work.

One run of a small network leaves most of a GPU idle, and kernels of different processes take turns instead of running
side by side. So runs that are to share a GPU share a process: a thread each, whose work for the GPU overlaps with that
of the others. Each run is what it would be alone.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.config import Config
from fedloom.devices.cuda_runtime import free_unused_memory, use_exclusive_stream
from fedloom.devices.selection import select_device
from fedloom.errors import InsufficientMemoryError, RunStopped
from fedloom.runs.callback import Callback, SilentCallback
from fedloom.runs.result import RunResult

THREADS = "fedloom-run"
"""What the names of the threads begin with."""

Job = tuple[Path, Config, Callable[[Callback], RunResult]]
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

    def __init__(self, watcher: Callback, jobs: Sequence[Job]) -> None:
        self.watcher = watcher
        self.lock = threading.RLock()
        self.failed = False
        self.interrupted = threading.Event()
        self._rounds = 0
        self._total = sum(config.rounds for _, config, _ in jobs)

    def count(self, rounds: int, record: Mapping[str, Any] | None = None) -> None:
        """So many rounds have been played, the last with this record."""
        with self.lock:
            self._rounds += rounds
            if record is not None:
                self.watcher.record({"round": min(self._rounds, self._total), "note": record.get("note")})


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
        self.check()
        with self._hub.lock:
            self._hub.watcher.work(f"{self._name}: {what}", done, total)

    def wants_stop(self) -> bool:
        return self._hub.failed or self._hub.interrupted.is_set() or self._hub.watcher.wants_stop()

    def check(self) -> None:
        if self._hub.interrupted.is_set():
            raise RunStopped("stopped within a round")

    def end(self) -> None:
        return


def run_concurrently(jobs: Sequence[Job], at_once: int, watcher: Callback | None, path: Path) -> list[RunResult]:
    """Carry out all jobs, `at_once` at a time; results in the order of the jobs. One that fails stops the others.

    One that finds no memory beside the others goes on alone after them.
    """
    watcher = watcher or SilentCallback()
    hub = _Hub(watcher, jobs)
    eyes = [_OneOf(hub, folder.name) for folder, _, _ in jobs]
    first = jobs[0][1]
    whole = _Whole(f"{len(jobs)} runs, {at_once} at once,", first.data, first.seed, hub._total, first.device)
    watcher.begin(path, whole, [])  # type: ignore[arg-type]  # a display needs no more of a config than this

    def one(job: Job, eye: _OneOf) -> RunResult:
        _, config, run = job
        if eye.wants_stop():
            raise RunStopped("stopped between two runs")
        with use_exclusive_stream(select_device(config.device)):
            return run(eye)

    def beside(job: Job, eye: _OneOf) -> RunResult | None:
        """Beside others; None: it found no memory."""
        try:
            return one(job, eye)
        except InsufficientMemoryError as shortage:
            eye.note(f"{shortage} Once the others are done there may be enough, so it goes on after them, alone.")
        except BaseException:
            hub.failed = True
            raise
        free_unused_memory()
        return None

    numbers = iter(range(len(jobs)))
    done: dict[int, RunResult | None] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while (number := next(numbers, None)) is not None:
            try:
                done[number] = beside(jobs[number], eyes[number])
            except BaseException as error:  # raised below, by the thread that was asked for all this
                errors.append(error)

    try:
        _work_in_threads(at_once, work, hub)
        for error in sorted(errors, key=lambda error: isinstance(error, RunStopped)):
            raise error  # what failed, before what it stopped
        return [done[number] or one(job, eye) for number, (job, eye) in enumerate(zip(jobs, eyes, strict=True))]
    finally:
        watcher.end()


def _work_in_threads(number: int, work: Callable[[], None], hub: _Hub) -> None:
    """Let so many threads work to their end.

    Python tells Ctrl-C to the main thread alone. It tells the others, and waits until their runs have ended, unless
    somebody wanted a stop before or presses Ctrl-C again: then the process ends without them.
    """
    threads = [threading.Thread(target=work, name=f"{THREADS}-{i}", daemon=True) for i in range(number)]
    try:
        for thread in threads:
            thread.start()
        _wait(threads)
    except KeyboardInterrupt:
        hub.interrupted.set()
        if not hub.watcher.wants_stop():
            _wait(threads)
        raise


def _wait(threads: Sequence[threading.Thread]) -> None:
    """Wait until all have ended. `join`, once interrupted, may take a thread that goes on for one that has ended."""
    while any(thread.ident is not None and thread in threading.enumerate() for thread in threads):
        time.sleep(0.02)
