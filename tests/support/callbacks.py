"""Callbacks that store what they get."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.runs.callback import Callback


class Eye(Callback):
    """Notes what it is shown."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.plan: Any = None
        self.rounds: list[int] = []
        self.notes: list[str] = []
        self.ended = False
        self._stop_after = stop_after

    def on_run_start(self, folder: Path, config: Any, history: list[dict[str, Any]]) -> None:
        self.plan = config

    def on_message(self, text: str) -> None:
        self.notes.append(text)

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        self.rounds.append(record["round"])
        if record.get("note"):
            self.notes.append(record["note"])

    def should_stop(self) -> bool:
        return self._stop_after is not None and len(self.rounds) >= self._stop_after

    def on_run_end(self) -> None:
        self.ended = True
