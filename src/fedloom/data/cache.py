"""Data sets decoded once: arrays in files that every process maps into memory instead of reading them.

An entry is `decoded/NAME-PLACE/STAMP/` in the cache folder. The stamp is made of the version of the decoder and the
name, size and time of every source file; where one of them changes, the entry is made anew and the old one removed.
A folder appears under its stamp only when it is whole, and one process at a time makes it, so processes that start
together neither disturb each other nor do the work twice. Removing what another process has mapped does it no harm.
"""

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.content import Dataset
from fedloom.data.download import alone
from fedloom.data.samples import Samples
from fedloom.errors import InputError

LAYOUT = 2
"""Version of the cache itself."""
LARGE = 1 << 28
"""Bytes above which an array that is being decoded lies in a file."""
NAMES = "names.json"
MARKS = ("owners", "domains", "test_owners", "test_domains")
"""What a data set says of its samples, where it is known."""
WORDS = ("class_names", "owner_names", "domain_names", "notes")


def cache_folder() -> Path:
    """Where downloads and decoded data are kept: $FEDLOOM_CACHE, $XDG_CACHE_HOME/fedloom or ~/.cache/fedloom."""
    if own := os.environ.get("FEDLOOM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"


def cached(name: str, place: Path, recipe: str, files: Iterable[Path], make: Callable[[], Dataset]) -> Dataset:
    """What `make()` reads from `files`, mapped from the cache where it was read before.

    `recipe` names the decoder, its version and its options; `place` is the folder that the files are in. Where the
    cache cannot be written, the content stays in memory, and a warning says why.
    """
    stamp = _stamp(recipe, place, files)
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-")[-40:]
    entry = cache_folder() / "decoded" / f"{plain}-{_digest(str(place.resolve()), recipe)[:12]}"
    found = _open(entry / stamp)
    if found is not None:
        return found
    try:
        entry.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _keep(make(), error.strerror or str(error))
    with alone(entry):
        found = _open(entry / stamp)
        if found is not None:
            return found
        content = make()
        try:
            _publish(content, entry, stamp)
        except OSError as error:
            return _keep(content, error.strerror or str(error))
    # From the file just written: the pages of the decoded arrays are freed, and all runs see the same thing.
    return _open(entry / stamp) or content


def scratch(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Room for images that are being decoded: in a file without a name where they may be larger than memory."""
    if int(np.prod(shape, dtype=np.int64)) > LARGE:
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                return np.memmap(file, dtype=np.uint8, mode="w+", shape=shape)
        except OSError:
            pass
    return np.empty(shape, dtype=np.uint8)


def _keep(content: Dataset, reason: str) -> Dataset:
    warnings.warn(f"decoded data could not be kept in {cache_folder()}: {reason}", stacklevel=2)
    return content


def _digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _stamp(recipe: str, place: Path, files: Iterable[Path]) -> str:
    lines, start = [f"{LAYOUT}", recipe], f"{place}{os.sep}"
    for name in map(str, files):  # text, and not paths: there may be hundreds of thousands
        try:
            state = os.stat(name)  # noqa: PTH116
        except OSError as error:
            raise InputError(f"cannot read {name}: {error.strerror}.") from None
        lines.append(f"{name.removeprefix(start)}\t{state.st_size}\t{state.st_mtime_ns}")
    return _digest(*lines)[:32]


def _arrays(content: Dataset) -> dict[str, NDArray[np.generic]]:
    parts = {"train": content.train, "test": content.test}
    arrays = {f"{part}.{key}": getattr(samples, key).numpy() for part, samples in parts.items() for key in "xy"}
    return arrays | {key: values for key in MARKS if (values := getattr(content, key)) is not None}


def _publish(content: Dataset, entry: Path, stamp: str) -> None:
    for leftover in entry.glob(".new-*"):  # of a process that was killed: we hold the lock, so nobody writes it
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=".new-", dir=entry))
    try:
        arrays = _arrays(content)
        for key, values in arrays.items():
            with (folder / f"{key}.npy").open("wb") as file:
                np.save(file, values, allow_pickle=False)
                os.fsync(file.fileno())  # or a failing machine might leave the right name with the wrong bytes
        names = {key: list(getattr(content, key)) for key in WORDS}
        known = {**names, "tokens": content.tokens, "arrays": list(arrays)}
        (folder / NAMES).write_text(json.dumps(known), encoding="utf-8")
        shutil.rmtree(entry / stamp, ignore_errors=True)  # what could not be opened
        folder.replace(entry / stamp)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for old in entry.iterdir():
        if old.name != stamp:
            shutil.rmtree(old, ignore_errors=True)


def _open(folder: Path) -> Dataset | None:
    """The entry in `folder`, or None where there is none that is whole."""
    try:
        names = json.loads((folder / NAMES).read_text(encoding="utf-8"))
        # Copy on write: torch wants writable memory, and nobody's writes may reach the file.
        arrays = {key: _map(folder / f"{key}.npy") for key in names["arrays"]}
        samples = [
            Samples(torch.from_numpy(arrays[f"{part}.x"]), torch.from_numpy(arrays[f"{part}.y"]))
            for part in ("train", "test")
        ]
        known: dict[str, Any] = {key: tuple(names[key]) for key in WORDS} | {"tokens": names["tokens"]}
        known |= {key: arrays[key] for key in MARKS if key in arrays}
        return Dataset(samples[0], samples[1], **known)
    except (OSError, EOFError, ValueError, KeyError, TypeError, InputError):
        return None


def _map(path: Path) -> NDArray[np.int64]:
    """An array of the cache; an empty one cannot be mapped, and is read."""
    values: NDArray[np.int64] = np.load(path, mmap_mode="c" if path.stat().st_size > 4096 else None, allow_pickle=False)
    return values
