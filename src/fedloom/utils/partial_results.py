"""Partial results of server work that takes much longer than a round.

A stopped run continues from them.
"""

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.errors import InputError, RunStopped
from fedloom.utils.storage import (
    StorageWriteSchedule,
    join_stored_tensors,
    read_json,
    read_safetensors,
    split_stored_tensors,
    write_json,
    write_safetensors,
)

PATIENCE = 5.0
"""Minimum seconds between two partial results. Also how long a stop request waits for the round to end."""


class PartialResults:
    """Store the last partial result of each piece of work. Nothing is stored before `keep_in` names a folder."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._stop_asked_at: float | None = None
        self._offered: dict[str, float] = {}

    def keep_in(
        self,
        folder: Path,
        seconds: float,
        should_stop: Callable[[], bool],
        how_to_go_on: str,
        on_message: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Store partial results in `folder`, at least `seconds` apart.

        `should_stop` says whether the user wants the run to stop, and `how_to_go_on` ends the message if it does.
        `on_message` is told about a damaged partial result.
        """
        self._folder, self._should_stop, self._how_to_go_on = folder, should_stop, how_to_go_on
        self._on_message = on_message
        self._schedule, self._write_seconds = StorageWriteSchedule(max(seconds, PATIENCE)), 0.0

    def load_partial(self, mark: str) -> Mapping[str, Any] | None:
        """Return the last partial result of a piece of work, or None.

        Args:
            mark: A string that identifies the work. It contains all that the result depends on.

        Returns:
            What `make_partial` returned, or None if there is nothing or it is damaged. Tensors may
            be on another device.
        """
        if self._folder is None:
            return None
        path = self._folder / f"{_name(mark)}.json"
        if not path.exists():
            return None
        try:
            kept = read_json(path)
            tensors = read_safetensors(self._folder / kept["tensors"], kept["digest"])
        except InputError as error:
            self._on_message(f"{error} Its work starts again.")
            return None
        found: Mapping[str, Any] | None = (
            join_stored_tensors(kept["partial"], tensors) if kept["mark"] == mark else None
        )
        return found

    def save_partial_if_due(self, mark: str, done: int, make_partial: Callable[[], Mapping[str, Any]]) -> None:
        """Save a partial result if it is time. Cheap enough to call in every step.

        Args:
            mark: A string that identifies the work, as for `load_partial`.
            done: How many steps are done.
            make_partial: Returns tensors, numbers, strings, and lists and dicts of them. Called only if it is time.

        Raises:
            RunStopped: If the user wants the run to stop. The resumed run finds this partial result.
        """
        if self._folder is None:
            return
        stop = self._waited(mark)
        if stop or self._schedule.due(self._write_seconds):
            began = time.monotonic()
            self._write(self._folder, mark, done, make_partial())
            self._write_seconds = time.monotonic() - began
            self._schedule.saved()
        if stop:
            raise RunStopped(f"stopped within a round, with the server's partial results saved; {self._how_to_go_on}")

    def _write(self, folder: Path, mark: str, done: int, partial: Mapping[str, Any]) -> None:
        """Write the tensors, then the JSON that names their file. Until then the previous partial result is valid."""
        tree, tensors = split_stored_tensors(partial)
        name = f"{_name(mark)}-{done:06d}.safetensors"
        digest = write_safetensors(folder / name, tensors)
        write_json(folder / f"{_name(mark)}.json", {"mark": mark, "partial": tree, "tensors": name, "digest": digest})
        for path in folder.glob(f"*{_name(mark)}-*"):  # also of an interrupted write
            if path.name != name:
                path.unlink()

    def _waited(self, mark: str) -> bool:
        """Return whether a stop request has waited for `PATIENCE` seconds, or would until the next call."""
        now = time.monotonic()
        step = now - self._offered.get(mark, now)
        self._offered[mark] = now
        if self._stop_asked_at is None and self._should_stop():
            self._stop_asked_at = now
        return self._stop_asked_at is not None and max(now - self._stop_asked_at, step) >= PATIENCE

    def clear(self) -> None:
        """Delete all partial results: the work is done and its result is stored elsewhere."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _name(mark: str) -> str:
    """Return the stem of the file names for a piece of work."""
    return hashlib.sha256(mark.encode()).hexdigest()[:16]
