"""The data sets that are known by name: found on this machine, or downloaded once."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedloom.data.digits import read_digits
from fedloom.data.download import Progress
from fedloom.data.samples import Prepare, Samples
from fedloom.data.sources import SOURCES, TEN_DIGITS, Source
from fedloom.errors import InputError, unknown

State = Literal["embedded", "at hand", "can be downloaded"]


@dataclass(frozen=True)
class Dataset:
    """A data set in memory; `prepare` makes network input of shape `shape` from its stored images."""

    name: str
    train: Samples
    test: Samples
    classes: int
    shape: tuple[int, ...]
    prepare: Prepare
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class DatasetInfo:
    """What is known about a data set without loading it."""

    name: str
    summary: str
    classes: int
    shape: tuple[int, ...]
    samples: int
    """For training; `test_samples` come on top."""
    test_samples: int
    state: State
    found: Path | None = None
    """The folder it was found in, where it is at hand."""


DIGITS = DatasetInfo("digits", "handwritten digits, grey, 8 x 8", 10, (1, 8, 8), 1438, 359, "embedded")


def catalogue() -> list[DatasetInfo]:
    """All data sets by name, and whether they are on this machine; nothing is read or downloaded."""
    return [DIGITS, *(_describe(source) for source in SOURCES.values())]


def load(name: str, *, download: bool = True, progress: Progress | None = None) -> Dataset:
    """The data set `name`, downloaded into the user's cache folder where it is nowhere on this machine.

    Files are looked for in the folder that the environment variable FEDLOOM_DATA names, where packages of
    the operating system put them, and in the cache. `progress(file, done, total)` follows a download.
    """
    if name == DIGITS.name:
        return _load_digits()
    if name not in SOURCES:
        raise unknown("data set", name, [DIGITS.name, *SOURCES])
    source = SOURCES[name]
    train, test = source.read(_find(source) or _download(source, download, progress))
    classes = len(source.class_names)
    return Dataset(name, train, test, classes, source.shape, source.prepare, source.class_names)


def cache_folder() -> Path:
    """Where downloads are kept: $XDG_CACHE_HOME/fedloom, or ~/.cache/fedloom."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"


def _load_digits() -> Dataset:
    train, test = read_digits()
    grey = train.x.double() / 255
    prepare = Prepare((float(grey.mean()),), (float(grey.std()),))
    return Dataset(DIGITS.name, train, test, DIGITS.classes, DIGITS.shape, prepare, TEN_DIGITS)


def _describe(source: Source) -> DatasetInfo:
    found = _find(source)
    state: State = "can be downloaded" if found is None else "at hand"
    classes = len(source.class_names)
    return DatasetInfo(source.name, source.summary, classes, source.shape, source.train, source.test, state, found)


def _find(source: Source) -> Path | None:
    return next((folder for folder in _places(source) if source.complete(folder)), None)


def _places(source: Source) -> Iterator[Path]:
    if own := os.environ.get("FEDLOOM_DATA"):
        root = Path(own).resolve()
        yield from (root / name for name in source.folders)
        # mnist and fashion-mnist name their files alike, so a folder is taken for one by its own name only.
        if root.name.lower() in source.folders:
            yield root
    yield from source.system
    yield from (cache_folder() / name for name in source.folders)


def _download(source: Source, allowed: bool, progress: Progress | None) -> Path:
    folder = cache_folder() / source.folders[0]
    by_hand = (
        f"put {', '.join(source.files)} into {folder}, or into {source.folders[0]}/ of a folder that the "
        "environment variable FEDLOOM_DATA names"
    )
    if not allowed:
        raise InputError(f"data set {source.name!r} is not on this machine; allow its download or {by_hand}.")
    try:
        source.download(folder, progress)
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}; try again later or {by_hand}.") from None
    return folder
