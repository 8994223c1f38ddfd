"""A published data set: what it is, which files hold it, and where those come from."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from fedloom.data.content import Dataset
from fedloom.data.download import Progress
from fedloom.data.samples import Prepare
from fedloom.data.spec import Spec
from fedloom.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Source(ABC):
    """A data set that lives in files of one folder."""

    name: str
    summary: str
    shape: tuple[int, ...]
    train: int | None
    """How many training samples were published; None where that depends on how the files were made."""
    test: int | None
    prepare: Prepare
    class_names: tuple[str, ...]
    folders: tuple[str, ...]
    """What the folder may be called; a download makes the first."""
    system: tuple[Path, ...] = ()
    """Where packages of the operating system put it."""
    home: str
    """The address that its files are under."""
    by_hand: str = ""
    """What a person must do to get the files; empty where they can be downloaded."""
    version: int = 1
    """Counts up when `read` gives something else for the same files."""

    @property
    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """The names of the files a person would put in place by hand."""

    @abstractmethod
    def complete(self, folder: Path) -> bool:
        """Whether `folder` holds all files."""

    @abstractmethod
    def read(self, folder: Path) -> Dataset:
        """What the files hold, everything checked."""

    def download(self, folder: Path, progress: Progress | None) -> None:
        """Makes `folder` complete."""
        raise InputError(f"{self.name!r} must be fetched by hand: {self.by_hand}.")

    def missing(self, folder: Path) -> tuple[str, ...]:
        """Parts that `folder` lacks and that can be done without."""
        return ()

    def inputs(self, folder: Path) -> list[Path]:
        """Every file that `read` may look at."""
        return files_under(folder)

    def recipe(self) -> str:
        """What beside the files decides what `read` gives."""
        return f"{self.name} {self.version}"

    def having(self, spec: Spec) -> "Source":
        """This data set, read with the options it takes from `spec`."""
        return self


def files_under(folder: Path) -> list[Path]:
    """All files below `folder`, in order; a link to a folder is followed, but not in a circle."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()

    def walk(place: str | Path) -> None:
        with os.scandir(place) as entries:
            state = os.stat(place)  # noqa: PTH116
            if (state.st_dev, state.st_ino) in seen:
                return
            seen.add((state.st_dev, state.st_ino))
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    walk(entry.path)
                elif entry.is_file():
                    found.append(Path(entry.path))

    try:
        walk(folder)
    except OSError as error:
        raise InputError(f"cannot read {error.filename or folder}: {error.strerror}.") from None
    return found
