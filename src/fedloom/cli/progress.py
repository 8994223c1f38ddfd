"""Progress of runs on stderr: a live bar on a terminal, otherwise lines of text.

stdout holds results only. The first Ctrl-C (or SIGTERM) stops the run after the current round, or during long work of
the server. The second one stops it at once. Both ways, the run can be resumed.
"""

import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console, OverflowMethod
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from fedloom.cli.time_left import TimeLeft
from fedloom.runs.callback import RunDescription
from fedloom.utils.formatting import format_bytes, format_plural, format_seconds

PAUSE = 5.0
"""Seconds between two lines without a terminal."""

LEAST_BAR, MOST_BAR = 4, 24
LEAST_NAME = 16
LEAST_STATE = len("accuracy 100.00 %")
USUAL_STATE = len("accuracy 100.00 %  loss   0.123")
MOST_STATE = 60
ELAPSED = len("0:00:00")


class ProgressDisplay:
    """A callback that shows the progress of runs and handles Ctrl-C."""

    def __init__(
        self, quiet: bool = False, methods: Sequence[str] = (), seeds: int = 1, *, unit: str = "round"
    ) -> None:
        """Show the progress of one run, or of a comparison of `methods`, each with `seeds` seeds in a row."""
        self._methods, self._unit = methods, unit
        self._runs, self._run = max(len(methods) * seeds, 1), 0
        self._time_left = TimeLeft(self._runs, seeds)
        self._name_width = 0
        # Paths and names are shown literally: [old] is no markup, and :cat: no emoji.
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self.live = self.console.is_terminal and not quiet
        self.folder: Path | None = None
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._stops = 0
        self._server_progress: dict[str, tuple[int, float]] = {}
        """For each piece of server work: the first step seen, and when. Concurrent runs have one each."""
        self._progress_printed_at = 0.0
        self._handlers: dict[int, Any] = {}

    def on_run_start(self, folder: Path, config: RunDescription, history: list[dict[str, Any]]) -> None:
        self._close_bars()
        self._take_signals()
        if self.folder is None and self._runs > 1:  # a comparison that continues does not start its finished runs
            self._run = len(list(folder.parent.glob("*/summary.json")))
        # a run that ran out of memory starts again in the same directory
        self._run = min(self._run + (folder != self.folder), self._runs)
        self.folder, self._config, self._server_progress = folder, config, {}
        self._printed_at = time.monotonic()
        done = max((record["round"] for record in history), default=0)
        self._time_left.start_run(self._run, config.rounds, done)
        number = f"{self._run:{len(str(self._runs))}}/{self._runs}  " if self._runs > 1 else ""
        place = "" if config.device == "cpu" else f", on {config.device}"
        self._name = f"{number}{config.label} on {config.data}, seed {config.seed}{place}"
        if self.live:
            # a full path would leave no room for the progress
            data = "" if self._runs > 1 else f" on {_brief(config.data)}"  # all runs of a comparison have the same data
            name = self._name.replace(f" on {config.data}", data)
            longest = max(map(len, self._methods), default=0)  # the bars of all runs are aligned
            self._name_width = max(self._name_width, len(name) + max(longest - len(config.label), 0))
            self._bars = Progress(*self._columns(), console=self.console)
            self._task = self._bars.add_task(
                name, total=config.rounds, completed=done, state="", left=self._format_time_left()
            )
            self._bars.start()
        else:
            many = format_plural(config.rounds, self._unit)
            start = f"resumes after {self._unit} {done} of {config.rounds}" if done else many
            self.console.print(f"{self._name}: {start}")

    def _take_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # started with nohup
                continue
            try:
                self._handlers[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not in the main thread, which alone may handle signals
                return

    def on_message(self, text: str) -> None:
        self.console.print(Text.assemble(("note:", "yellow"), f" {text}"))

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        if note := record.get("note"):
            self.on_message(f"round {record['round']}: {note}")
        self._time_left.add_round(record["round"])
        state = self._state(record)
        if self._bars is not None and self._task is not None:
            if state:  # keep the last evaluation on the screen in rounds without one
                self._bars.update(self._task, state=state)
            self._bars.update(self._task, completed=record["round"], left=self._format_time_left())
        elif self._print_is_due(record["round"]):
            done = f"{self._unit} {record['round']}/{self._config.rounds}"
            self.console.print(f"{self._name}: {done}  {state}  {self._format_time_left().strip()}".rstrip())

    def on_download(self, name: str, done: int, total: int) -> None:
        if not self.live:
            if done == 0:
                self.console.print(f"downloading {name} ({format_bytes(total)})")
            return
        if self._bars is None or self._task is None or self._bars.tasks[self._task].description != name:
            self._close_bars()
            columns = (
                TextColumn("downloading {task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:3.0f} %"),
            )
            self._bars = Progress(*columns, console=self.console)
            self._task = self._bars.add_task(name, total=total)
            self._bars.start()
        self._bars.update(self._task, completed=done, total=total or None)

    def on_server_progress(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what not in self._server_progress or not done:
            self._server_progress[what] = done, now
        if now - self._progress_printed_at < (0.2 if self.live else PAUSE) and done < total:
            return
        self._progress_printed_at = now
        state = f"{what} {done}/{total}"
        first, began = self._server_progress[what]
        new = done - first  # the work may continue from a partial result
        if new and done < total:
            state += f", {format_seconds((total - done) * (now - began) / new)} left"
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, state=state)
        else:
            self.console.print(f"{self._name}: {state}")

    def should_stop(self) -> bool:
        return self._stops > 0

    def check(self) -> None:
        return  # a second Ctrl-C raises KeyboardInterrupt

    def on_run_end(self) -> None:
        self._close_bars()
        for number, handler in self._handlers.items():
            # after a stop was requested, another Ctrl-C must not disturb the exit
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
        print(f"\nstopping after this {self._unit}; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    def _state(self, record: Mapping[str, Any]) -> str:
        parts = []
        if record.get("accuracy") is not None:
            parts.append(f"accuracy {100 * record['accuracy']:6.2f} %")
        if record.get("loss") is not None:
            parts.append(f"loss {record['loss']:7.3f}")
        if record.get("epsilon") is not None:
            parts.append(f"epsilon {record['epsilon']:6.2f}")
        if record.get("failed"):
            parts.append(f"{record['failed']} of {record['clients']} clients failed")
        return "  ".join(parts)

    def _format_time_left(self) -> str:
        """Format the time left of all runs, always with the same width."""
        seconds = self._time_left.estimate()
        words = " left in all" if self._runs > 1 else " left"
        if not seconds:
            return " " * (11 + len(words))
        rough = f"{math.ceil(seconds)} s" if seconds < 59 else format_seconds(seconds)
        return f"{rough:>11}{words}"

    def _columns(self) -> list[ProgressColumn]:
        """Return the columns of a progress bar: name, bar, rounds, last evaluation, elapsed time, time left.

        Each has a fixed width, so that nothing moves when numbers grow. A narrow terminal has a shorter bar, no elapsed
        time, no loss, and less of the name, in this order.
        """
        digits = len(str(self._config.rounds))
        rounds, left = len(self._unit) + 2 + 2 * digits, len(self._format_time_left())
        room = self.console.width - rounds - left - LEAST_BAR - 3  # columns are one space apart
        name = max(min(self._name_width, max(room - LEAST_STATE - 1, LEAST_NAME), room), 1)
        room -= name
        state = next((width for width in (USUAL_STATE, LEAST_STATE) if width < room), 0)
        room -= state + 1
        elapsed = ELAPSED if room > ELAPSED else 0
        room -= elapsed + 1
        bar = LEAST_BAR + min(max(room, 0), MOST_BAR - LEAST_BAR)
        state += min(max(room - MOST_BAR + LEAST_BAR, 0), MOST_STATE - USUAL_STATE)
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}", style="bold", markup=False, table_column=_fixed(name)),
            BarColumn(bar, table_column=_fixed(bar)),
            TextColumn(f"{self._unit} {{task.completed:{digits}}}/{{task.total}}", table_column=_fixed(rounds)),
        ]
        if state:
            column = _fixed(state, "crop" if state == LEAST_STATE else "ellipsis")
            columns.append(TextColumn("{task.fields[state]}", markup=False, table_column=column))
        if elapsed:
            columns.append(TimeElapsedColumn(_fixed(elapsed)))
        return [*columns, TextColumn("{task.fields[left]}", table_column=_fixed(left))]

    def _print_is_due(self, round: int) -> bool:
        """Return whether to print another line: after the last round, and every few seconds."""
        now = time.monotonic()
        if round < self._config.rounds and now - self._printed_at < PAUSE:
            return False
        self._printed_at = now
        return True


def _fixed(width: int, overflow: OverflowMethod = "ellipsis") -> Column:
    return Column(width=width, no_wrap=True, overflow=overflow)


def _brief(data: str) -> str:
    """Shorten a data set's name: no options, and of a path only the last part, as in `table:people.csv`."""
    kind, colon, rest = data.partition(",")[0].partition(":")
    return f"{kind}{colon}{Path(rest).name}" if "/" in rest else data
