"""Files from the web: resumed where they broke off, checked, and in place only when whole."""

import contextlib
import hashlib
import http.client
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

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


def fetch(url: str, target: Path, md5: str, progress: Progress | None = None) -> None:
    """Downloads `url` to `target`, unless it is there.

    What has come so far is in `target`.part, and a later call goes on from it. A connection that breaks is
    taken up again at once, as long as each attempt brings something.
    """
    part = target.with_name(target.name + ".part")
    with alone(target.parent):
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
def alone(folder: Path) -> Iterator[None]:
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


def unpack(archive: Path, folder: Path, names: Collection[str], size: int) -> None:
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
