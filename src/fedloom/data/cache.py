"""Data sets decoded once: arrays in files that every process maps into memory instead of reading them.

An entry is `decoded/NAME-PLACE/STAMP/` in the cache folder. The stamp is made of the version of the decoder and the
name, size and time of every source file; where one of them changes, the entry is made anew and the old one removed.
A folder appears under its stamp only when it is whole, and one process at a time makes it, so processes that start
together neither disturb each other nor do the work twice. Removing what another process has mapped does it no harm.

Files from the web: resumed where they broke off, checked, and in place only when whole.
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

try:
    import fcntl
except ImportError:  # not a Unix: two processes that download at once may then disturb each other
    fcntl = None  # type: ignore[assignment]  # a module to mypy, which looks at Unix

Progress = Callable[[str, int, int], None]
"""Called as (file name, bytes done, bytes in all or 0 where the server does not say)."""

CHUNK = 1 << 18
TIMEOUT = 30.0
ATTEMPTS = 5


def download_to_cache(url: str, target: Path, md5: str, progress: Progress | None = None) -> None:
    """Downloads `url` to `target`, unless it is there.

    What has come so far is in `target`.part, and a later call goes on from it. A connection that breaks is
    taken up again at once, as long as each attempt brings something.
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
    """Appends to `part` what is missing from it; whether it is then whole."""
    done = _size(part)
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # nothing lies beyond what we have; the checksum will tell if it is right
                return True
            raise
    with response, part.open("ab") as file:
        if response.status != 206:  # a server that knows no ranges starts from the beginning
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
    """Lets one process at a time write to `folder`; the next one then finds what the first has fetched."""
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


def extract_to_cache(archive: Path, folder: Path, names: Collection[str], size: int) -> None:
    """Writes the files `names`, of `size` bytes each, from a .tar.gz into `folder`, and nothing else.

    Paths in the archive are ignored except for their last part, so that none can lead out of `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = set(names)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                source = tar.extractfile(member) if name in missing and member.isreg() else None
                if source is None or member.size != size:
                    continue
                _write(source.read(size), folder / name)
                missing.remove(name)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InputError(f"cannot unpack {archive}: {error}.") from None
    if missing:
        raise InputError(f"{archive} lacks {', '.join(sorted(missing))} of {size} bytes.")


def _write(content: bytes, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    part.write_bytes(content)
    part.replace(target)


LAYOUT = 2
"""Version of the cache itself."""
NAMES = "names.json"
MARKS = ("owners", "domains", "test_owners", "test_domains")
"""What a data set says of its samples, where it is known."""
WORDS = ("class_names", "owner_names", "domain_names", "notes")


def cache_folder() -> Path:
    """Where downloads and decoded data are kept: $FEDLOOM_CACHE, $XDG_CACHE_HOME/fedloom or ~/.cache/fedloom."""
    if own := os.environ.get("FEDLOOM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"


def load_through_cache(
    name: str, place: Path, recipe: str, files: Iterable[Path], make: Callable[[], Dataset]
) -> Dataset:
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
    with _lock_folder(entry):
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
