"""What a person sees while a run goes on: on a terminal a live line, elsewhere now and then a line of text.

Everything goes to stderr, so that stdout holds results alone. Ctrl-C (or SIGTERM) once stops the run after the
round at hand, or within long work of the server, so that it can be resumed; twice stops it at once.
"""

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from fedloom.runs.callback import RunDescription
from fedloom.utils.formatting import format_bytes, format_plural, format_seconds

PAUSE = 5.0
"""Seconds between two lines where there is no terminal."""


class ProgressDisplay:
    """Shows runs as they go on."""

    def __init__(self, quiet: bool = False, runs: int = 1, unit: str = "round") -> None:
        self._runs, self._run, self._unit = runs, 0, unit
        # Paths and names are shown as they are: [old] in one is no markup, and :cat: no picture.
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self.live = self.console.is_terminal and not quiet
        self.folder: Path | None = None
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._stops = 0
        self._works: dict[str, tuple[int, float]] = {}
        """From which step on, and since when, we see each piece of work: runs at once have one each."""
        self._work_told = 0.0
        self._handlers: dict[int, Any] = {}

    def begin(self, folder: Path, config: RunDescription, history: list[dict[str, Any]]) -> None:
        self._close_bars()
        self._take_signals()
        self._run += folder != self.folder  # one that finds no memory begins again
        self.folder, self._config, self._works = folder, config, {}
        self._times: list[float] = []
        self._told = time.monotonic()
        done = max((record["round"] for record in history), default=0)
        number = f"{self._run}/{self._runs}  " if self._runs > 1 else ""
        place = "" if config.device == "cpu" else f", on {config.device}"
        self._name = f"{number}{config.method} on {config.data}, seed {config.seed}{place}"
        if self.live:
            self._bars = Progress(
                TextColumn("{task.description}", style="bold", markup=False),
                BarColumn(bar_width=24),
                TextColumn(f"{self._unit} {{task.completed}}/{{task.total}}"),
                TextColumn("{task.fields[state]}", markup=False),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self.console,
            )
            # A whole path would leave no room for the rounds.
            name = self._name.replace(config.data, _brief(config.data))
            self._task = self._bars.add_task(name, total=config.rounds, completed=done, state="", left="")
            self._bars.start()
        else:
            many = format_plural(config.rounds, self._unit)
            start = f"goes on after {self._unit} {done} of {config.rounds}" if done else many
            self.console.print(f"{self._name}: {start}")

    def _take_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._handlers[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not in the main thread: the thread's owner handles signals
                return

    def note(self, text: str) -> None:
        self.console.print(Text.assemble(("note:", "yellow"), f" {text}"))

    def record(self, record: Mapping[str, Any]) -> None:
        if note := record.get("note"):
            self.note(f"round {record['round']}: {note}")
        self._times.append(time.monotonic())
        state = self._state(record)
        if self._bars is not None and self._task is not None:
            if state:  # rounds that are not evaluated leave the last evaluation on the screen
                self._bars.update(self._task, state=state)
            self._bars.update(self._task, completed=record["round"], left=self._left(record))
        elif self._due(record["round"]):
            self.console.print(
                f"{self._name}: {self._unit} {record['round']}/{self._config.rounds}  {state}  {self._left(record)}"
            )

    def download(self, name: str, done: int, total: int) -> None:
        if not self.live:
            if done == 0:
                self.console.print(f"downloading {name} ({format_bytes(total)})")
            return
        if self._bars is None or self._task is None or self._bars.tasks[self._task].description != name:
            self._close_bars()
            columns = (
                TextColumn("downloading {task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:.0f} %"),
            )
            self._bars = Progress(*columns, console=self.console)
            self._task = self._bars.add_task(name, total=total)
            self._bars.start()
        self._bars.update(self._task, completed=done, total=total or None)

    def work(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what not in self._works or not done:
            self._works[what] = done, now
        if now - self._work_told < (0.2 if self.live else PAUSE) and done < total:
            return
        self._work_told = now
        state = f"{what} {done}/{total}"
        first, began = self._works[what]
        new = done - first  # it may go on from where an earlier run was cut off
        if new and done < total:
            state += f", {format_seconds((total - done) * (now - began) / new)} left"
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, state=state)
        else:
            self.console.print(f"{self._name}: {state}")

    def wants_stop(self) -> bool:
        return self._stops > 0

    def check(self) -> None:
        return  # a second Ctrl-C raises KeyboardInterrupt

    def end(self) -> None:
        self._close_bars()
        for number, handler in self._handlers.items():
            # Whoever asked to stop is being served: one more Ctrl-C must not disturb the leaving.
            signal.signal(number, signal.SIG_IGN if self._stops else handler)
        self._handlers.clear()

    def _close_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars, self._task = None, None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1
        if self._stops > 1:
            raise KeyboardInterrupt
        print(f"\nstopping after this {self._unit}; once more stops at once", file=sys.stderr, flush=True)

    def _state(self, record: Mapping[str, Any]) -> str:
        parts = []
        if record.get("accuracy") is not None:
            parts.append(f"accuracy {100 * record['accuracy']:.2f} %")
        if record.get("loss") is not None:
            parts.append(f"loss {record['loss']:.3f}")
        if record.get("epsilon") is not None:
            parts.append(f"epsilon {record['epsilon']:.2f}")
        if record.get("lost"):
            parts.append(f"{record['lost']} of {record['clients']} clients lost")
        return "  ".join(parts)

    def _left(self, record: Mapping[str, Any]) -> str:
        """An estimate from the pace of the last rounds."""
        left = self._config.rounds - record["round"]
        if left == 0 or len(self._times) < 3:
            return ""
        recent = self._times[-20:]
        return f"{format_seconds(left * (recent[-1] - recent[0]) / (len(recent) - 1))} left"

    def _due(self, round: int) -> bool:
        """Whether it is time for another line of text: at the end, and when some seconds have passed."""
        now = time.monotonic()
        if round < self._config.rounds and now - self._told < PAUSE:
            return False
        self._told = now
        return True


def _brief(data: str) -> str:
    """A data set's name without options, and of a path its last part: `table:people.csv`."""
    kind, colon, rest = data.partition(",")[0].partition(":")
    return f"{kind}{colon}{Path(rest).name}" if "/" in rest else data
