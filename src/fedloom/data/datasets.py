"""The data sets that are known by name: found on this machine, or downloaded once."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fedloom.data.cache import cache_folder, cached
from fedloom.data.content import Dataset
from fedloom.data.digit5 import DIGIT5
from fedloom.data.digits import read_digits
from fedloom.data.download import Progress
from fedloom.data.femnist import FEMNIST
from fedloom.data.folder_sources import CINIC10, DOMAINNET, PACS
from fedloom.data.folders import read_own_images
from fedloom.data.huggingface import read_hf
from fedloom.data.samples import Prepare
from fedloom.data.source import Source
from fedloom.data.sources import SOURCES, TEN_DIGITS
from fedloom.data.spec import Spec, home_path, parse
from fedloom.data.tables import read_table
from fedloom.errors import InputError, unknown

SOURCES.update({source.name: source for source in (CINIC10, FEMNIST, DIGIT5, DOMAINNET, PACS)})

State = Literal["embedded", "at hand", "can be downloaded", "must be fetched by hand", "your own"]


@dataclass(frozen=True)
class DatasetInfo:
    """What is known about a data set without loading it."""

    name: str
    summary: str
    classes: int | None
    """None where the files decide, as they do on the rest."""
    shape: tuple[int, ...]
    """Empty where the files decide."""
    samples: int | None
    """For training; `test_samples` come on top. None where it depends on how the files were made."""
    test_samples: int | None
    state: State
    found: Path | None = None
    """The folder it was found in, where it is at hand."""
    missing: tuple[str, ...] = ()
    """Parts that were not found and that can be done without."""
    get: str = ""
    """What a person must do to get it, where it must be fetched by hand."""


OWN: dict[str, tuple[str, Callable[[Spec], Dataset]]] = {
    "folder": ("images of your own, one folder a class", read_own_images),
    "domains": ("images of your own, one folder a domain, then one a class", read_own_images),
    "table": ("a CSV or Parquet table of your own", read_table),
    "hf": ("a Hugging Face data set on disk, saved or as Parquet files", read_hf),
}
"""What a path may stand for, and what reads it."""

DIGITS = DatasetInfo("digits", "handwritten digits, grey, 8 x 8", 10, (1, 8, 8), 1438, 359, "embedded")


def catalogue() -> list[DatasetInfo]:
    """All data sets by name, and whether they are on this machine; nothing is read or downloaded."""
    own = [DatasetInfo(f"{kind}:PATH", what, None, (), None, None, "your own") for kind, (what, _) in OWN.items()]
    return [DIGITS, *(_describe(source) for source in SOURCES.values()), *own]


def load(name: str, *, download: bool = True, progress: Progress | None = None) -> Dataset:
    """The data set `name`, downloaded into the user's cache folder where it is nowhere on this machine.

    Files are looked for in the folder that the environment variable FEDLOOM_DATA names, where packages of
    the operating system put them, and in the cache. `progress(file, done, total)` follows a download. What was
    decoded once is mapped into memory from the cache.
    """
    if name == DIGITS.name:
        return _load_digits()
    kind = name.partition(":")[0]
    if kind in OWN:
        return replace(OWN[kind][1](parse(name, takes_path=True)), name=name)
    if kind == DIGITS.name:
        parse(name, takes_path=False).done()
        return _load_digits()
    if kind not in SOURCES:
        if kind == name and (advice := _read_as(name)):
            raise InputError(f"{name!r} is {advice}.")
        raise unknown("data set", kind, [DIGITS.name, *SOURCES, *OWN])
    spec = parse(name, takes_path=False)
    source = SOURCES[spec.name].having(spec)
    spec.done()
    folder = _find(source) or _download(source, download, progress)
    content = cached(source.name, folder, source.recipe(), source.inputs(folder), lambda: source.read(folder))
    if lacking := source.missing(folder):
        note = f"{name!r} is read without {', '.join(lacking)}, not found in {folder}."
        content = replace(content, notes=(*content.notes, note))
    return replace(content, name=name, prepare=source.prepare)


def _load_digits() -> Dataset:
    train, test = read_digits()
    grey = train.x.double() / 255
    prepare = Prepare((float(grey.mean()),), (float(grey.std()),))
    return Dataset(train, test, TEN_DIGITS, name=DIGITS.name, prepare=prepare)


def _describe(source: Source) -> DatasetInfo:
    found = _find(source)
    state: State = "at hand" if found else "must be fetched by hand" if source.by_hand else "can be downloaded"
    return DatasetInfo(
        source.name,
        source.summary,
        len(source.class_names),
        source.shape,
        source.train,
        source.test,
        state,
        found,
        source.missing(found) if found else (),
        "" if found else source.by_hand,
    )


def _read_as(name: str) -> str:
    """How a file or folder is named as data, where somebody gave its path alone; empty where there is none."""
    path = home_path(name)
    try:
        if path.is_file():
            return f"a file; name it as table:{name},label=COLUMN or hf:{name}"
        if name and path.is_dir():
            return f"a folder; name it as folder:{name} (of classes of images), domains:{name} or hf:{name}"
    except (OSError, ValueError):  # nothing that a path can be
        pass
    return ""


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
    if (own := os.environ.get("FEDLOOM_DATA")) and not Path(own).is_dir():
        raise InputError(f"FEDLOOM_DATA names {own!r}, which is no folder, so {source.name!r} was not found there.")
    folder = cache_folder() / source.folders[0]
    by_hand = (
        f"put {', '.join(source.files)} into {folder}, or into {source.folders[0]}/ of a folder that the "
        "environment variable FEDLOOM_DATA names"
    )
    if source.by_hand:
        raise InputError(f"data set {source.name!r} must be fetched by hand: {source.by_hand}; then {by_hand}.")
    if not allowed:
        raise InputError(f"data set {source.name!r} is not on this machine; allow its download or {by_hand}.")
    try:
        source.download(folder, progress)
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}; try again later or {by_hand}.") from None
    return folder
