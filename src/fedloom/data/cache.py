"""Cache of downloaded files and decoded data sets in the user's cache folder.

A decoded data set is a folder `decoded/NAME-DIGEST/STAMP/` of arrays that every process maps into memory. The stamp is
a hash of the decoder's version and of the name, size and time of every source file. If one of them changes, the entry
is made again and the old one removed. A folder gets its final name only when it is complete, and a lock lets one
process at a time write it. Removing an entry that another process has mapped does no harm.

An interrupted download is resumed, and a file gets its final name only after its checksum is verified.
"""

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset
from fedloom.data.samples import Samples
from fedloom.errors import InputError
from fedloom.utils.data_folders import cache_folder

try:
    import fcntl
except ImportError:  # not a Unix: without the lock, two processes that download at once may disturb each other
    fcntl = None  # type: ignore[assignment]  # mypy checks for Unix, so it expects a module

Progress = Callable[[str, int, int], None]
"""Called with the file name, the bytes so far and the total bytes (0 if the server does not say)."""

CHUNK = 1 << 18
TIMEOUT = 30.0
ATTEMPTS = 5


def download_to_cache(url: str, target: Path, md5: str, progress: Progress | None = None) -> None:
    """Download `url` to `target` unless it exists.

    The bytes so far are in `target`.part, and a later call continues from there. A broken connection is retried at
    once as long as each attempt brings more bytes.
    """
    part = target.with_name(target.name + ".part")
    with _lock_folder(target.parent):
        if target.exists():
            return
        for attempt in range(1, ATTEMPTS + 1):
            before = _size(part)
            try:
                if _receive(url, part, target.name, progress):
                    break
            except (OSError, http.client.HTTPException) as error:
                refused = isinstance(error, urllib.error.HTTPError)
                if refused or _size(part) == before or attempt == ATTEMPTS:
                    raise InputError(f"cannot download {url}: {_reason(error)}.") from None
        else:
            raise InputError(f"cannot download {url}: the connection broke {ATTEMPTS} times.")
        with part.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != md5:
            part.unlink()
            raise InputError(f"{url} gave a file with the MD5 {found}; expected {md5}; it was discarded.")
        part.replace(target)


def _receive(url: str, part: Path, name: str, progress: Progress | None) -> bool:
    """Append the missing bytes to `part`, and return whether it is complete."""
    done = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # no bytes beyond ours: the download is complete, and the checksum verifies it
                return True
            raise
    with response, part.open("ab") as file:
        if response.status != 206:  # a server without range support starts from the beginning
            file.truncate(0)
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else 0
        while chunk := response.read(CHUNK):
            file.write(chunk)
            done += len(chunk)
            if progress:
                progress(name, done, total)
    return done >= total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(getattr(cause, "strerror", None) or cause or type(cause).__name__)


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Let one process at a time write to `folder`; the next one finds the files of the first."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}.") from None
    if fcntl is None:
        yield
        return
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def extract_to_cache(archive: Path, folder: Path, file_names: Collection[str], file_size: int) -> None:
    """Extract only `file_names`, each of `file_size` bytes, from a .tar.gz into `folder`.

    Of a path in the archive only the last part counts, so no path can lead out of `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = set(file_names)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                source = tar.extractfile(member) if name in missing and member.isreg() else None
                if source is None or member.size != file_size:
                    continue
                _write(source.read(file_size), folder / name)
                missing.remove(name)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InputError(f"cannot unpack {archive}: {error}.") from None
    if missing:
        raise InputError(f"{archive} lacks {', '.join(sorted(missing))} of {file_size} bytes.")


def _write(content: bytes, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    part.write_bytes(content)
    part.replace(target)


LAYOUT = 2
"""Version of the cache format."""
NAMES = "names.json"
MARKS = ("owners", "domains", "test_owners", "test_domains")
"""Optional arrays of a `Dataset`."""
WORDS = ("class_names", "owner_names", "domain_names", "notes")


def load_through_cache(
    name: str, source_folder: Path, cache_key: str, files: Iterable[Path], decode: Callable[[], Dataset]
) -> Dataset:
    """Return the data set that `decode()` reads from `files`, mapped from the cache if it was decoded before.

    `cache_key` identifies the decoder, its version and its options; `source_folder` contains the files. If the cache
    cannot be written, the data stay in memory, and a warning says why.
    """
    stamp = _stamp(cache_key, source_folder, files)
    plain = re.sub(r"[^\w.-]+", "-", name).strip("-")[-40:]
    entry = cache_folder() / "decoded" / f"{plain}-{_digest(str(source_folder.resolve()), cache_key)[:12]}"
    found = _open(entry / stamp)
    if found is not None:
        return found
    try:
        entry.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _keep(decode(), error.strerror or str(error))
    with _lock_folder(entry):
        found = _open(entry / stamp)
        if found is not None:
            return found
        content = decode()
        try:
            _publish(content, entry, stamp)
        except OSError as error:
            return _keep(content, error.strerror or str(error))
    # Open the new entry: this frees the decoded arrays, and all runs use the same mapped files.
    return _open(entry / stamp) or content


def _keep(content: Dataset, reason: str) -> Dataset:
    warnings.warn(f"decoded data could not be kept in {cache_folder()}: {reason}", stacklevel=2)
    return content


def _digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _stamp(cache_key: str, source_folder: Path, files: Iterable[Path]) -> str:
    lines, start = [f"{LAYOUT}", cache_key], f"{source_folder}{os.sep}"
    for name in map(str, files):  # strings are faster than paths, and there may be hundreds of thousands
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
    for leftover in entry.glob(".new-*"):  # of a killed process: this one holds the lock, so no other one writes
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=".new-", dir=entry))
    try:
        arrays = _arrays(content)
        for key, values in arrays.items():
            with (folder / f"{key}.npy").open("wb") as file:
                np.save(file, values, allow_pickle=False)
                os.fsync(file.fileno())  # else a crash of the machine might leave the final name with wrong bytes
        names = {key: list(getattr(content, key)) for key in WORDS}
        known = {**names, "tokens": content.vocabulary_size, "arrays": list(arrays)}
        (folder / NAMES).write_text(json.dumps(known), encoding="utf-8")
        shutil.rmtree(entry / stamp, ignore_errors=True)  # a damaged entry that `_open` rejected
        folder.replace(entry / stamp)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for old in entry.iterdir():
        if old.name != stamp:
            shutil.rmtree(old, ignore_errors=True)


def _open(folder: Path) -> Dataset | None:
    """Return the entry in `folder`, or None if it is missing or damaged."""
    try:
        names = json.loads((folder / NAMES).read_text(encoding="utf-8"))
        # Copy on write: torch needs writable memory, and no write may reach the file.
        arrays = {key: _map(folder / f"{key}.npy") for key in names["arrays"]}
        samples = [
            Samples(torch.from_numpy(arrays[f"{part}.x"]), torch.from_numpy(arrays[f"{part}.y"]))
            for part in ("train", "test")
        ]
        known: dict[str, Any] = {key: tuple(names[key]) for key in WORDS} | {"vocabulary_size": names["tokens"]}
        known |= {key: arrays[key] for key in MARKS if key in arrays}
        return Dataset(samples[0], samples[1], **known)
    except (OSError, EOFError, ValueError, KeyError, TypeError, InputError):
        return None


def _map(path: Path) -> NDArray[np.int64]:
    """Map an array of the cache; read a small one, because an empty one cannot be mapped."""
    values: NDArray[np.int64] = np.load(path, mmap_mode="c" if path.stat().st_size > 4096 else None, allow_pickle=False)
    return values
