"""Work on the server that takes much longer than a round, kept half done, so that a run goes on from there."""

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedloom.checkpoints import Checkpoints, Rhythm
from fedloom.engines.base import Homes
from fedloom.errors import InputError
from fedloom.watching import Stopped

PATIENCE = 5.0
"""Seconds between two drafts at least, and for which someone who wants the run to stop waits for its round to end."""


class KeptDrafts:
    """Drafts in a folder of the run: the last of each piece of work."""

    def __init__(self, folder: Path, seconds: float, wants_stop: Callable[[], bool], how_to_go_on: str) -> None:
        self._folder, self._wants_stop, self._how_to_go_on = folder, wants_stop, how_to_go_on
        self._rhythm = Rhythm(max(seconds, PATIENCE))
        self._kept: dict[str, Checkpoints] = {}
        self._nobody = Homes({}, torch.float32)
        self._asked: float | None = None
        self._offered: dict[str, float] = {}

    def _of(self, mark: str) -> Checkpoints:
        """Where the drafts of one piece of work lie."""
        name = hashlib.sha256(mark.encode()).hexdigest()[:16]
        return self._kept.setdefault(mark, Checkpoints(self._folder / name, keep=1))

    def find(self, mark: str) -> Mapping[str, Any] | None:
        """How far the work called `mark` had come; None where it has not begun."""
        try:
            latest = self._of(mark).load_latest(self._nobody)
        except InputError:  # damaged: it begins again
            return None
        if latest is None or latest[1]["mark"] != mark:
            return None
        found: Mapping[str, Any] = latest[1]["draft"]
        return found

    def offer(self, mark: str, done: int, draft: Callable[[], Mapping[str, Any]]) -> None:
        """Keep what `draft` gives, if it is time to. Ends the run, if somebody has wanted that for a while."""
        stop, kept = self._waited(mark), self._of(mark)
        if stop or self._rhythm.due(kept.seconds):
            kept.save(done, {"mark": mark, "draft": draft()}, self._nobody)
            self._rhythm.saved()
        if stop:
            raise Stopped(f"stopped within a round, in work of the server that goes on from here; {self._how_to_go_on}")

    def _waited(self, mark: str) -> bool:
        """Whether somebody wants the run to stop, and has waited for long enough, or would until the next draft."""
        now = time.monotonic()
        step = now - self._offered.get(mark, now)
        self._offered[mark] = now
        if self._asked is None and self._wants_stop():
            self._asked = now
        return self._asked is not None and max(now - self._asked, step) >= PATIENCE

    def clear(self) -> None:
        """The work is done, and what came of it is kept elsewhere."""
        shutil.rmtree(self._folder, ignore_errors=True)
