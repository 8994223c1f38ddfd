"""Find the files of data sets on this machine.

Imports nothing heavy, because `fedloom list` must answer at once."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class ExpectedFiles:
    """Which files a folder must hold to be the folder of a data set.

    A pattern is a path below the folder. It may have `*`, ends with `/` for a folder, and `a|b` means a or b.
    """

    parts: Mapping[str, Sequence[Sequence[str]]]
    """For each part of the data set the alternatives. An alternative is there if each of its patterns is."""
    enough_parts: int | None = None
    """How many parts are enough; None: all."""

    def is_complete(self, folder: Path) -> bool:
        """Return whether `folder` holds enough parts."""
        enough = len(self.parts) if self.enough_parts is None else self.enough_parts
        return len(self.parts) - len(self.missing_parts(folder)) >= enough

    def missing_parts(self, folder: Path) -> tuple[str, ...]:
        """Return the parts that `folder` does not hold."""
        return tuple(
            part
            for part, alternatives in self.parts.items()
            if not any(all(_is_there(folder, pattern) for pattern in patterns) for patterns in alternatives)
        )


def _is_there(folder: Path, pattern: str) -> bool:
    for path in pattern.split("|"):
        if "*" in path:
            found = next(folder.glob(path), None) is not None
        else:
            found = (folder / path).is_dir() if path.endswith("/") else (folder / path).is_file()
        if found:
            return True
    return False


def cache_folder() -> Path:
    """Return the cache folder: $FEDLOOM_CACHE, $XDG_CACHE_HOME/fedloom or ~/.cache/fedloom."""
    if own := os.environ.get("FEDLOOM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"


def possible_data_folders(names: Sequence[str], system_folders: Sequence[Path]) -> Iterator[Path]:
    """Yield where a data set may lie: $FEDLOOM_DATA, the folders of system packages, and the cache.

    Args:
        names: Names that the folder may have.
        system_folders: Folders where packages of the operating system put the data set.

    Yields:
        Folders that may not exist, in the order in which they are searched.
    """
    if own := os.environ.get("FEDLOOM_DATA"):
        root = Path(own).resolve()
        yield from (root / name for name in names)
        # mnist and fashion-mnist have files of the same names, so only the folder's name tells them apart.
        if root.name.lower() in names:
            yield root
    yield from system_folders
    yield from (cache_folder() / name for name in names)


def describe_data_state(
    found: Path | None, manual_steps: str
) -> Literal["on this machine", "can be downloaded", "must be downloaded by hand"]:
    """Return what `fedloom list datasets` says about the files of a published data set."""
    return "on this machine" if found else "must be downloaded by hand" if manual_steps else "can be downloaded"
