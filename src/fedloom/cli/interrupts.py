"""Ctrl-C, SIGTERM and SIGHUP stop a run after its round, or a second time at once.

Long work of the server stops at its next partial result. Both ways, the run can be resumed.
"""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from fedloom.runs.callback import Callback, RunDescription


class StopOnSignal(Callback):
    """A callback that stops a run at the first of these signals, and raises KeyboardInterrupt at the second."""

    def __init__(self) -> None:
        self._signals = 0
        self._handlers: dict[int, Any] = {}

    def on_run_start(self, folder: Path, config: RunDescription, history: list[dict[str, Any]]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # started with nohup
                continue
            try:
                self._handlers[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not in the main thread, which alone may handle signals
                return

    def should_stop(self) -> bool:
        return self._signals > 0

    def on_run_end(self) -> None:
        for number, handler in self._handlers.items():
            # after a stop was requested, another Ctrl-C must not disturb the exit
            signal.signal(number, signal.SIG_IGN if self._signals else handler)
        self._handlers.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            for other in self._handlers:  # a third one must not disturb the exit
                signal.signal(other, signal.SIG_IGN)
            raise KeyboardInterrupt
        print("\nstopping after this round; Ctrl-C again stops at once", file=sys.stderr, flush=True)
