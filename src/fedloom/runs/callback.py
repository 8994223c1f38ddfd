"""Who watches a run, and how a run is stopped."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedloom.config import Config


class RunDescription(Protocol):
    """What a display must know of a piece of work."""

    @property
    def method(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def device(self) -> str: ...


class Callback(Protocol):
    """Someone who watches a run: a progress display, a test."""

    def begin(self, folder: Path, config: Config, history: list[dict[str, Any]]) -> None:
        """The run starts, or goes on after the rounds in `history`."""

    def note(self, text: str) -> None:
        """Something a person should know."""

    def record(self, record: Mapping[str, Any]) -> None:
        """A round has been played."""

    def download(self, name: str, done: int, total: int) -> None:
        """A data set is on its way: bytes so far, bytes in all."""

    def work(self, what: str, done: int, total: int) -> None:
        """The server is at something that takes long: steps so far, steps in all."""

    def wants_stop(self) -> bool:
        """Whether to stop after this round; asked within it too, while the server is at something that takes long."""
        ...

    def check(self) -> None:
        """Called after each client's answer. It may raise an error to end the run without the end of its round."""

    def end(self) -> None:
        """The run is over, one way or the other."""


class SilentCallback:
    """Nobody watches."""

    def begin(self, folder: Path, config: RunDescription, history: list[dict[str, Any]]) -> None:
        return

    def note(self, text: str) -> None:
        return

    def record(self, record: Mapping[str, Any]) -> None:
        return

    def download(self, name: str, done: int, total: int) -> None:
        return

    def work(self, what: str, done: int, total: int) -> None:
        return

    def wants_stop(self) -> bool:
        return False

    def check(self) -> None:
        return

    def end(self) -> None:
        return
