"""Several concurrent runs on one GPU, in threads of one process.

One run of a small network leaves most of a GPU idle. Kernels of different processes take turns, but kernels of threads
in one process overlap. Each run gives the same result as alone. One callback watches all runs together.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.config import Config
from fedloom.devices.cuda_runtime import free_cuda_memory, use_exclusive_stream
from fedloom.devices.selection import select_device
from fedloom.errors import InsufficientMemoryError, RunStopped
from fedloom.runs.callback import Callback
from fedloom.runs.result import RunResult

THREADS = "fedloom-run"
"""Prefix of the thread names."""

PlannedRun = tuple[Path, Config, Callable[[Callback], RunResult]]
"""A run's folder, its config, and the function that runs or resumes it with a callback."""


class _Hub:
    """Pass the events of all runs to one callback."""

    def __init__(self, callback: Callback, planned_runs: Sequence[PlannedRun]) -> None:
        self.callback = callback
        self.lock = threading.RLock()
        self.failed = False
        self.interrupted = threading.Event()
        self._rounds = 0
        self._total = sum(config.rounds for _, config, _ in planned_runs)

    def add_rounds(self, rounds: int, record: Mapping[str, Any] | None = None) -> None:
        """Count finished rounds, the last with this record."""
        with self.lock:
            self._rounds += rounds
            if record is not None:
                self.callback.on_round_end({"round": min(self._rounds, self._total), "note": record.get("note")})


class _OneOf(Callback):
    """The callback of a single run."""

    def __init__(self, hub: _Hub, name: str) -> None:
        self._hub, self._name = hub, name
        self._rounds = 0

    def on_run_start(self, folder: Path, config: Any, history: list[dict[str, Any]]) -> None:
        done = max((record["round"] for record in history), default=0)
        self._hub.add_rounds(done - self._rounds)  # a restarted run repeats rounds that were counted
        self._rounds = done

    def on_message(self, text: str) -> None:
        with self._hub.lock:
            self._hub.callback.on_message(f"{self._name}: {text}")

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        if not record["round"]:  # the evaluation before the first round
            return
        self._rounds += 1
        self._hub.add_rounds(1, {**record, "note": f"{self._name}: {record['note']}"} if record.get("note") else record)

    def on_download(self, name: str, done: int, total: int) -> None:
        with self._hub.lock:
            self._hub.callback.on_download(name, done, total)

    def on_server_progress(self, what: str, done: int, total: int) -> None:
        self.check()
        with self._hub.lock:
            self._hub.callback.on_server_progress(f"{self._name}: {what}", done, total)

    def should_stop(self) -> bool:
        return self._hub.failed or self._hub.interrupted.is_set() or self._hub.callback.should_stop()

    def check(self) -> None:
        if self._hub.interrupted.is_set():
            raise RunStopped("stopped within a round")


def run_concurrently(
    planned_runs: Sequence[PlannedRun], concurrent_runs: int, callback: Callback, path: Path
) -> list[RunResult]:
    """Run all runs, `concurrent_runs` at a time, and return their results in order. A failed run stops the others.

    A run that is out of memory continues alone after the others.
    """
    hub = _Hub(callback, planned_runs)
    callbacks = [_OneOf(hub, folder.name) for folder, _, _ in planned_runs]
    label = f"{len(planned_runs)} runs, {concurrent_runs} at once,"
    whole = planned_runs[0][1].model_copy(update={"variant": label, "rounds": hub._total})
    callback.on_run_start(path, whole, [])

    def one(planned_run: PlannedRun, callback: _OneOf) -> RunResult:
        _, config, run = planned_run
        if callback.should_stop():
            raise RunStopped("stopped between two runs")
        with use_exclusive_stream(select_device(config.device)):
            return run(callback)

    def beside(planned_run: PlannedRun, callback: _OneOf) -> RunResult | None:
        """Run beside others; None if it is out of memory."""
        try:
            return one(planned_run, callback)
        except InsufficientMemoryError as shortage:
            callback.on_message(f"{shortage} This run continues alone after the others, when there may be enough.")
        except BaseException:
            hub.failed = True
            raise
        free_cuda_memory()
        return None

    numbers = iter(range(len(planned_runs)))
    done: dict[int, RunResult | None] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while (number := next(numbers, None)) is not None:
            try:
                done[number] = beside(planned_runs[number], callbacks[number])
            except BaseException as error:  # raised below, in the calling thread
                errors.append(error)

    try:
        _work_in_threads(concurrent_runs, work, hub)
        for error in sorted(errors, key=lambda error: isinstance(error, RunStopped)):
            raise error  # the failed run first, then those that it stopped
        return [
            done[number] or one(planned_run, callback_of_run)
            for number, (planned_run, callback_of_run) in enumerate(zip(planned_runs, callbacks, strict=True))
        ]
    finally:
        callback.on_run_end()


def _work_in_threads(num_threads: int, work: Callable[[], None], hub: _Hub) -> None:
    """Run `work` in `num_threads` threads until all end.

    Python raises Ctrl-C only in the main thread. It tells the others and waits for their runs to end. After an earlier
    stop request, or at a second Ctrl-C, the process ends without waiting.
    """
    threads = [threading.Thread(target=work, name=f"{THREADS}-{i}", daemon=True) for i in range(num_threads)]
    try:
        for thread in threads:
            thread.start()
        _wait(threads)
    except KeyboardInterrupt:
        hub.interrupted.set()
        if not hub.callback.should_stop():
            _wait(threads)
        raise


def _wait(threads: Sequence[threading.Thread]) -> None:
    """Wait for all threads. After an interrupt, `join` may report a running thread as ended."""
    while any(thread.ident is not None and thread in threading.enumerate() for thread in threads):
        time.sleep(0.02)
