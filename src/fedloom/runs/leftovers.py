"""Cached rows and temporary folders, and removal of those of killed processes."""

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.config import Config
from fedloom.errors import InputError
from fedloom.runs.directory import LOCK, RunDirectory, hold_directory_lock, try_directory_lock

VERIFY = "fedloom-verify-"


def name_cache_folder(config: Config) -> str | None:
    """Return a new folder in `cache_dir` for the rows of one run; None if rows are kept in memory."""
    return None if config.cache_dir is None else str(Path(config.cache_dir) / f"fedloom-{uuid.uuid4().hex}")


def remove_orphaned_rows(directory: RunDirectory) -> None:
    """Remove files of rows that no checkpoint of a run names: a process was killed before it wrote one."""
    cache_dir = directory.cache_dir
    if cache_dir is None:
        return
    checkpoints = [path.read_bytes() for path in directory.checkpoints.folder.glob("round-*.json")]
    for path in Path(cache_dir).glob("rows-*.bin"):
        token = path.stem.removeprefix("rows-").encode()
        if not any(token in checkpoint for checkpoint in checkpoints):
            path.unlink(missing_ok=True)


@contextmanager
def verification_folder() -> Iterator[Path]:
    """Yield the path of a run in a temporary folder, and remove folders of killed verifications."""
    for place in Path(tempfile.gettempdir()).glob(f"{VERIFY}*"):
        _remove_if_dead(place)
    with tempfile.TemporaryDirectory(prefix=VERIFY) as name, hold_directory_lock(Path(name)):
        try:
            yield Path(name) / "run"
        finally:
            _remove_cache(Path(name) / "run")


def _remove_if_dead(place: Path) -> None:
    """Remove the folder of a verification whose process has ended. A living one holds its lock."""
    if place.is_symlink() or not (place / LOCK).is_file():  # without a lock it was created a moment ago
        return
    try:
        with try_directory_lock(place) as free:
            if free:
                _remove_cache(place / "run")
                shutil.rmtree(place, ignore_errors=True)
    except InputError:  # it belongs to another user
        return


def _remove_cache(path: Path) -> None:
    try:
        cache_dir = RunDirectory.open(path).cache_dir
    except InputError:  # the run did not begin
        return
    if cache_dir is not None:
        shutil.rmtree(cache_dir, ignore_errors=True)
