"""Callback: watch a run and stop it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedloom.config import Config


class RunDescription(Protocol):
    """What a progress display needs to know of a run, a pretraining or several runs."""

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


class Callback(Protocol):
    """Watch a run, for example to show its progress, and stop it.

    An object needs all of these methods; `run`, `resume`, `verify` and `compare` call them. `SilentCallback` has
    all of them, and they do nothing.

    Example:
        class StopAtAccuracy(SilentCallback):
            accuracy = 0.0

            def on_round_end(self, record: Mapping[str, Any]) -> None:
                self.accuracy = record.get("accuracy") or self.accuracy

            def should_stop(self) -> bool:
                return self.accuracy >= 0.9

        fedloom.run("fedavg", callback=StopAtAccuracy())
    """

    def on_run_start(self, folder: Path, config: Config, history: list[dict[str, Any]]) -> None:
        """Called when a run starts, resumes, or continues with fewer clients at once after running out of memory.

        Args:
            folder: The run directory.
            config: The settings; for concurrent runs of `compare` only those of `RunDescription`, for all together.
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
        """Called after each round, and within a round during long work of the server.

        Returns:
            Whether to stop the run. It then saves a checkpoint and raises `RunStopped`.
        """
        ...

    def check(self) -> None:
        """Called after each client's answer.

        Raises:
            Exception: Any error, to end the run at once, before the round is complete.
        """

    def on_run_end(self) -> None:
        """Called when the run ends: finished, stopped or failed."""


class SilentCallback:
    """A callback that does nothing. Base class for callbacks that need only some of the methods."""

    def on_run_start(self, folder: Path, config: RunDescription, history: list[dict[str, Any]]) -> None:
        return

    def on_message(self, text: str) -> None:
        return

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        return

    def on_download(self, name: str, done: int, total: int) -> None:
        return

    def on_server_progress(self, what: str, done: int, total: int) -> None:
        return

    def should_stop(self) -> bool:
        return False

    def check(self) -> None:
        return

    def on_run_end(self) -> None:
        return
