"""Progress of the demo on stderr: one bar for all scenes, and the time left."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from fedloom.cli.demo.scene import DemoScene
from fedloom.cli.progress import PAUSE
from fedloom.runs.callback import Callback, RunDescription
from fedloom.utils.formatting import format_seconds

ENOUGH_WORK = 5.0
"""Seconds of planned work after which the speed of this machine is known."""


class DemoProgress(Callback):
    """A callback that shows the progress of all runs of the demo."""

    def __init__(self, scenes: Sequence[DemoScene], quiet: bool = False) -> None:
        self._scenes = list(scenes)
        self._console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._live = self._console.is_terminal and not quiet
        self._began = self._printed_at = time.monotonic()
        self._worked = 0.0
        """Seconds of planned work that were done here, and not found on the disk."""
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._messages: set[str] = set()
        """Those shown so far: the runs of a scene say the same about its start model."""

    def start_scene(self, number: int) -> None:
        """Begin a scene, counted from 0."""
        self._number, self._scene = number, self._scenes[number]
        self._before = sum(scene.seconds for scene in self._scenes[:number])

    def end_scene(self) -> None:
        """Remove the bar, so that results can be printed."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def time_left(self) -> float:
        """Estimate the seconds until the end of the last scene."""
        planned = sum(scene.seconds for scene in self._scenes) - self._done
        elapsed = time.monotonic() - self._began
        return planned * (elapsed / self._worked if self._worked > ENOUGH_WORK else 1.0)

    def on_run_start(self, folder: Path, config: RunDescription, history: list[dict[str, Any]]) -> None:
        self._name = f"scene {self._number + 1} of {len(self._scenes)}  {config.label}, seed {config.seed}"
        width = max(len(row) for scene in self._scenes for row in scene.rows)
        self._padded_name = self._name.ljust(len(self._name) - len(config.label) + width)  # the bar stays where it is
        self._rounds = config.rounds
        # the start model is not in the plan: it takes a second
        self._seconds, earlier = self._scene.plan().get((config.label, config.seed), (0.0, 0.0))
        self._start = self._before + earlier
        self._round = max((record["round"] for record in history), default=0)
        self._show(f"round {self._round}/{self._rounds}", due=True)

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        self._worked += self._seconds * max(record["round"] - self._round, 0) / self._rounds
        self._round = record["round"]
        self._show(f"round {self._round}/{self._rounds}")

    def on_server_progress(self, what: str, done: int, total: int) -> None:
        self._show(f"{what} {done}/{total}")

    def on_message(self, text: str) -> None:
        if text in self._messages:
            return
        self._messages.add(text)
        self._console.print(Text.assemble(("note:", "yellow"), f" {text}"))

    @property
    def _done(self) -> float:
        return self._start + self._seconds * self._round / self._rounds

    def _show(self, state: str, due: bool = False) -> None:
        left = f"{format_seconds(self.time_left())} left in all"
        if self._live:
            if self._bar is None:
                columns = ("{task.description}", "{task.fields[state]}", "{task.fields[left]}")
                name, at, remaining = (TextColumn(column, markup=False) for column in columns)
                self._bar = Progress(name, BarColumn(24), at, remaining, console=self._console, transient=True)
                self._task = self._bar.add_task("", total=sum(one.seconds for one in self._scenes), state="", left="")
                self._bar.start()
            self._bar.update(
                self._task, description=self._padded_name, completed=self._done, state=f"{state:18}", left=left
            )
        elif due or time.monotonic() - self._printed_at >= PAUSE:
            self._printed_at = time.monotonic()
            self._console.print(f"{self._name}, {state}: {left}")
