"""Callback: watch a run and stop it. Several callbacks are called as one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fedloom.errors import FedloomError, InputError, RunStopped, describe_error


class RunDescription(Protocol):
    """What a progress display needs to know of a run or of several runs."""

    @property
    def label(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def device(self) -> str: ...


class Callback:
    """Watches a run and may stop it; a subclass overrides the methods that it needs.

    Several callbacks are called in the order of the list, method by method.

    If a method raises an error, the run continues to the end of its round, saves a checkpoint and ends with a
    `FedloomError` that names the class and the method. `fedloom.errors.RunStopped` ends the run at once instead;
    `resume` then repeats the rounds since the last checkpoint.

    Example:
        class StopAtAccuracy(fedloom.Callback):
            accuracy = 0.0

            def on_round_end(self, record: Mapping[str, Any]) -> None:
                self.accuracy = record.get("accuracy") or self.accuracy

            def should_stop(self) -> bool:
                return self.accuracy >= 0.9

        fedloom.run("fedavg", callbacks=[StopAtAccuracy()])
    """

    def on_run_start(self, folder: Path, config: RunDescription, history: list[dict[str, Any]]) -> None:
        """Called when a run starts, resumes, or continues with fewer clients at once after running out of memory.

        Args:
            folder: The run directory.
            config: The settings; of a single run its `Config`.
            history: The records of the rounds so far; empty in a new run.
        """

    def on_message(self, text: str) -> None:
        """Called with something that the user should know.

        Args:
            text: One or two sentences.
        """

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        """Called after each round, and before the first one with the record of the initial model.

        Args:
            record: The record of the round as in `metrics.jsonl`; for concurrent runs only `round` and `note`.
        """

    def on_download(self, name: str, done: int, total: int) -> None:
        """Called while a data set is downloaded.

        Args:
            name: The name of the file.
            done: Bytes so far.
            total: Bytes in all; 0 if the server does not say.
        """

    def on_server_progress(self, what: str, done: int, total: int) -> None:
        """Called during long work of the method on the server.

        Args:
            what: The work.
            done: Steps so far.
            total: Steps in all.
        """

    def should_stop(self) -> bool:
        """Called after `on_round_end`, and within a round during long work of the server.

        Returns:
            Whether to stop the run; one callback is enough. The run then saves a checkpoint and raises `RunStopped`.
        """
        return False

    def check(self) -> None:
        """Called after each client's answer. Raise `RunStopped` to end the run before the round is complete."""

    def on_run_end(self) -> None:
        """Called when the run ends: finished, stopped or failed."""


class CallbackList(Callback):
    """Several callbacks as one. After the first error of a callback, it asks the run to stop."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self.failure: FedloomError | None = None
        """What to report about the first error, which is the `__cause__`."""

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each callback, in order."""
        results = []
        for callback in self._callbacks:
            try:
                results.append(getattr(callback, method)(*arguments))
            except RunStopped:
                raise
            except Exception as error:
                if self.failure is None:
                    where = f"callback {type(callback).__name__} failed in {method}"
                    self.failure = FedloomError(f"{where}: {describe_error(error)}")
                    self.failure.__cause__ = error
        return results

    def on_run_start(self, folder: Path, config: RunDescription, history: list[dict[str, Any]]) -> None:
        self._call("on_run_start", folder, config, history)

    def on_message(self, text: str) -> None:
        self._call("on_message", text)

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        self._call("on_round_end", record)

    def on_download(self, name: str, done: int, total: int) -> None:
        self._call("on_download", name, done, total)

    def on_server_progress(self, what: str, done: int, total: int) -> None:
        self._call("on_server_progress", what, done, total)

    def should_stop(self) -> bool:
        return any(self._call("should_stop")) or self.failure is not None

    def check(self) -> None:
        self._call("check")

    def on_run_end(self) -> None:
        self._call("on_run_end")


@contextmanager
def combine_callbacks(callbacks: Sequence[Callback]) -> Iterator[CallbackList]:
    """Yield all callbacks as one. At the end of the block, raise the failure of a callback, if there was one.

    A list that was combined before is yielded as it is, because the outer block reports its failure.
    """
    if not isinstance(callbacks, Sequence) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise InputError(f"callbacks must be a list of fedloom.Callback objects, not {callbacks!r}.")
    if len(callbacks) == 1 and isinstance(callbacks[0], CallbackList):
        yield callbacks[0]
        return
    combined = CallbackList(callbacks)
    try:
        yield combined
    except RunStopped as stopped:
        if combined.failure is None:
            raise
        raise FedloomError(f"{combined.failure}; {stopped}") from combined.failure.__cause__
    if combined.failure is not None:
        raise combined.failure
