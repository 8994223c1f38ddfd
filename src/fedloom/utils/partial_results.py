"""Work on the server that takes much longer than a round, kept half done, so that a run goes on from there."""

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.errors import InputError, RunStopped
from fedloom.utils.storage import (
    Rhythm,
    join_state_tensors,
    read_json,
    read_safetensors,
    split_state_tensors,
    write_json,
    write_safetensors,
)

PATIENCE = 5.0
"""Seconds between two drafts at least, and for which someone who wants the run to stop waits for its round to end."""


class PartialResults:
    """The last draft of each piece of work. Nothing is kept before `keep_in` says where."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._asked: float | None = None
        self._offered: dict[str, float] = {}

    def keep_in(self, folder: Path, seconds: float, wants_stop: Callable[[], bool], how_to_go_on: str) -> None:
        """Keep drafts in a folder of the run, `seconds` apart."""
        self._folder, self._wants_stop, self._how_to_go_on = folder, wants_stop, how_to_go_on
        self._rhythm, self._took = Rhythm(max(seconds, PATIENCE)), 0.0

    def find(self, mark: str) -> Mapping[str, Any] | None:
        """The last draft of the work that `mark` stands for, a text that tells it from all other work; None: no draft.

        Its tensors may lie on another device.
        """
        if self._folder is None:
            return None
        try:
            kept = read_json(self._folder / f"{_name(mark)}.json")
            tensors = read_safetensors(self._folder / kept["tensors"], kept["digest"])
        except InputError:  # there is none, or a damaged one: the work begins again
            return None
        found: Mapping[str, Any] | None = join_state_tensors(kept["draft"], tensors) if kept["mark"] == mark else None
        return found

    def offer(self, mark: str, done: int, draft: Callable[[], Mapping[str, Any]]) -> None:
        """After `done` steps; `draft` gives tensors, numbers, strings, and lists and dicts of them, if it is asked for.

        Costs nothing to call often. May end the run, whose next start finds this draft.
        """
        if self._folder is None:
            return
        stop = self._waited(mark)
        if stop or self._rhythm.due(self._took):
            began = time.monotonic()
            self._write(self._folder, mark, done, draft())
            self._took = time.monotonic() - began
            self._rhythm.saved()
        if stop:
            raise RunStopped(
                f"stopped within a round, in work of the server that goes on from here; {self._how_to_go_on}"
            )

    def _write(self, folder: Path, mark: str, done: int, draft: Mapping[str, Any]) -> None:
        """The tensors, then the JSON that names their file: until that is written the draft before counts."""
        tree, tensors = split_state_tensors(draft)
        name = f"{_name(mark)}-{done:06d}.safetensors"
        digest = write_safetensors(folder / name, tensors)
        write_json(folder / f"{_name(mark)}.json", {"mark": mark, "draft": tree, "tensors": name, "digest": digest})
        for path in folder.glob(f"*{_name(mark)}-*"):  # also of a write that was cut off
            if path.name != name:
                path.unlink()

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
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _name(mark: str) -> str:
    """What the files of a piece of work are called."""
    return hashlib.sha256(mark.encode()).hexdigest()[:16]
