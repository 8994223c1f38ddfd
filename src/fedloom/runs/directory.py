"""A run is a folder: config, metrics as they happen, checkpoints, the deployed model, a report.

config.toml       what the run is, complete, and what it was made with
metrics.jsonl     one record a round, appended as it happens
checkpoints/      the last ones (see checkpoints.py)
draft/            long work of the server, half done (see utils/partial_results.py), until the run has finished
partition.json    who holds how many samples of which class
initial.json      what a run with --init took from its file, and
initial.safetensors the start that came of it
model.safetensors the deployed model, as named tensors
synthetic.safetensors the synthetic data set of a run that makes one
summary.json      the totals, when the run has finished
report.html       pictures of all that
"""

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fedloom._version import __version__
from fedloom.config import Config, config_to_command, make_config
from fedloom.errors import FedloomError, InputError
from fedloom.models.initial_weights import InitialWeights
from fedloom.runs.checkpoints import Checkpoints
from fedloom.utils.settings import read_settings_toml, settings_to_toml
from fedloom.utils.storage import read_json, read_safetensors, write_atomically, write_json, write_safetensors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module to mypy, which looks at Unix

FORMAT = 1
USE = "server_data_used_by"
"""Where config.toml names the methods that use the server's data."""
PATIENCE = 30
LOCK = ".lock"
UNCOUNTED = (LOCK, ".config.toml.part", "flower")
"""Files of a run that died before it wrote its config, and of sites that are up already."""


class RunDirectory:
    """The folder of one run."""

    def __init__(self, path: Path, config: Config, own: tuple[str, ...] = ()) -> None:
        self.path = path
        self.config = config
        self.own = own
        """What was given as a Python object and so must be given again: some of data, model, loss."""
        self.checkpoints = Checkpoints(path / "checkpoints", config.keep_checkpoints)

    @classmethod
    def create(
        cls, path: Path, config: Config, own: tuple[str, ...] = (), use_server_data: tuple[str, ...] = ()
    ) -> "RunDirectory":
        """Write the config of a new run into a folder that `claimed` gave.

        `use_server_data` names the methods that use the server's data, for the report.
        """
        folder = cls(path, config, own)
        text = settings_to_toml(
            {
                "format": FORMAT,
                "command": None if own else config_to_command(config),
                "own": list(own),
                USE: list(use_server_data) or None,
                **config.model_dump(mode="json", exclude={"options"}),
                "options": config.options,
                "made_with": {
                    "fedloom": __version__,
                    "torch": torch.__version__,
                    "numpy": np.__version__,
                    "python": platform.python_version(),
                    "platform": f"{platform.system()} {platform.machine()}",
                },
            }
        )
        write_atomically(path / "config.toml", text.encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """An existing run."""
        if not is_run_directory(path):
            raise InputError(f"{path} is not a run: there is no config.toml in it.")
        values = read_settings_toml(path / "config.toml")
        found = values.pop("format", None)
        if found != FORMAT:
            made = values.get("made_with", {}).get("fedloom", "unknown")
            raise InputError(
                f"{path} is a run of format {found!r} (made by fedloom {made}); this is fedloom {__version__}, which "
                f"reads format {FORMAT}."
            )
        values.pop("made_with", None)
        values.pop("command", None)
        values.pop(USE, None)
        own = tuple(values.pop("own", ()))
        try:
            return cls(path, make_config(values), own)
        except InputError as error:
            raise InputError(f"{path / 'config.toml'}: {error}") from error

    def alone(self) -> AbstractContextManager[None]:
        """Keep other processes from working on this run at the same time; the lock ends with this process."""
        return lock_directory(self.path)

    # metrics

    def append(self, record: dict[str, Any]) -> None:
        """Add one round's record to metrics.jsonl."""
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(record) + "\n")
        except OSError as error:
            raise FedloomError(f"cannot write {self.path / 'metrics.jsonl'}: {error.strerror or error}.") from error

    def history(self) -> list[dict[str, Any]]:
        """The records so far; a last line that was cut off in writing does not count."""
        try:
            lines = (self.path / "metrics.jsonl").read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(f"cannot read {self.path / 'metrics.jsonl'}: {error.strerror or error}.") from error
        records = []
        for number, line in enumerate(lines[:-1], start=1):  # a whole line ends with a newline
            try:
                record = json.loads(line)
                record["round"] + 0
            except (ValueError, TypeError, KeyError) as error:
                raise InputError(
                    f"line {number} of {self.path / 'metrics.jsonl'} is damaged: it is not the record of a round."
                ) from error
            records.append(record)
        return records

    def sync_metrics(self) -> None:
        """Bring the records so far to the disk."""
        with (self.path / "metrics.jsonl").open("rb") as handle:
            os.fsync(handle.fileno())

    def rewind(self, round: int, last: dict[str, Any] | None = None) -> None:
        """Forget the records after `round`: those rounds will be played again. `last` is the record of `round`."""
        kept = [record for record in self.history() if record["round"] <= round]
        if last is not None and (not kept or kept[-1]["round"] < round):
            kept.append(last)
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(self.path / "metrics.jsonl", text.encode())

    # what is written beside them

    def write_partition(self, counts: np.ndarray | None, class_names: tuple[str, ...]) -> None:
        """Who holds how many samples of which class."""
        if counts is None:
            return
        value = {"classes": counts.shape[1], "class_names": list(class_names), "counts": counts.tolist()}
        write_atomically(self.path / "partition.json", json.dumps(value).encode())

    def write_beginning(self, beginning: InitialWeights, start: Mapping[str, Tensor]) -> None:
        """What was taken from a file, and the start that came of it, so that the run no longer needs the file."""
        digest = write_safetensors(self.path / "initial.safetensors", start)
        write_json(self.path / "initial.json", {**beginning.record(), "start_sha256": digest})

    def start(self) -> dict[str, Tensor] | None:
        """The start that was taken from a file; None where none was, or where the run ended before it was written."""
        if self.config.init is None or not (self.path / "initial.json").is_file():
            return None
        return read_safetensors(
            self.path / "initial.safetensors", read_json(self.path / "initial.json")["start_sha256"]
        )

    def write_model(self, tensors: dict[str, Tensor]) -> None:
        """The deployed model under the names of its state dict."""
        write_safetensors(self.path / "model.safetensors", tensors)

    def write_exhibit(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Something that the method has made and a person may want to look at."""
        write_safetensors(self.path / f"{name}.safetensors", tensors)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """The totals of a finished run."""
        write_atomically(self.path / "summary.json", (json.dumps(summary) + "\n").encode())

    def summary(self) -> dict[str, Any] | None:
        """The totals, if the run has finished."""
        path = self.path / "summary.json"
        if not path.is_file():
            return None
        try:
            summary = dict(json.loads(path.read_bytes()))
            summary["digest"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is damaged: it is not the JSON that was written.") from error
        return summary


@contextmanager
def claimed(path: Path, refuse: Callable[[Path], None] | None = None, *, numbered: bool = False) -> Iterator[Path]:
    """Make a folder and keep other processes out of it until the end.

    With `numbered` it is a new one: `path` followed by the first free number. `refuse` raises if the folder cannot be
    used. It is called before anything is written, and again under the lock. A folder that was made here and is still
    empty at the end is removed.
    """
    made: list[Path] = []
    if refuse is not None and not numbered:
        refuse(path)
    try:
        if numbered:
            path = _make_numbered(path, made)
        with _lock(path, made):
            try:
                if refuse is not None:
                    refuse(path)
                yield path
            finally:
                with suppress(OSError):  # it may be gone
                    if [entry.name for entry in path.iterdir()] == [LOCK]:
                        (path / LOCK).unlink()
    finally:
        for folder in made:
            with suppress(OSError):  # it is in use
                folder.rmdir()


def refuse_occupied(path: Path) -> None:
    """Refuse a folder that already holds something."""
    with _told(path):
        if path.exists() and any(entry.name not in UNCOUNTED for entry in path.iterdir()):
            advice = f", or go on with: fedloom resume {path}" if is_run_directory(path) else "."
            raise InputError(f"{path} is not empty; choose another --out{advice}")


@contextmanager
def lock_directory(folder: Path) -> Iterator[None]:
    """Keep other processes from working in `folder` at the same time; the lock ends with this process."""
    with _lock(folder, []):
        yield


@contextmanager
def _lock(folder: Path, made: list[Path]) -> Iterator[None]:
    """Hold the lock of a folder, which is made if need be; `made` receives the folders that were made."""
    for attempt in range(PATIENCE):
        with _told(folder):
            handle = _try_lock(folder, made)
        if handle is not None:
            break
        if attempt < PATIENCE - 1:  # the workers of a process that was just killed hold it a moment longer
            time.sleep(0.1)
    else:
        raise InputError(f"another process is at work on {folder}; wait for it or stop it.")
    with handle:
        try:
            yield
        finally:
            if fcntl is not None:  # not only closed: a process that was forked meanwhile has the file too
                fcntl.flock(handle, fcntl.LOCK_UN)


def _try_lock(folder: Path, made: list[Path]) -> IO[bytes] | None:
    """The locked file; None if another process has it, or has just removed it together with the folder."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    made.extend(missing)
    handle = None
    try:
        handle = (folder / LOCK).open("ab")
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle.fileno()), (folder / LOCK).stat()):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    if handle is not None:
        handle.close()
    return None


def _make_numbered(stem: Path, made: list[Path]) -> Path:
    """Make `stem` with the first free number behind it. Of several processes each makes its own."""
    with _told(stem.parent):
        made.extend(place for place in (stem.parent, *stem.parent.parents) if not place.exists())
        for number in range(1, 1_000_000):
            path = stem.with_name(f"{stem.name}-{number:03d}")
            stem.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir()
                made.insert(0, path)
                return path
    raise InputError(f"{stem.parent} holds too many folders called {stem.name}; name one with --out.")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Say in a sentence why a folder cannot be made or written."""
    try:
        yield
    except (NotADirectoryError, FileExistsError) as error:
        raise InputError(f"cannot make the folder {path}: it, or a part of its path, is a file.") from error
    except OSError as error:
        raise InputError(f"cannot make the folder {path}, or write to it: {error.strerror}.") from error


def is_run_directory(path: Path) -> bool:
    """Whether there is a run in `path`."""
    try:
        return (path / "config.toml").is_file()
    except OSError as error:
        raise InputError(f"cannot look into {path}: {error.strerror}.") from error


def parse_run_path(out: Path | str) -> Path:
    """The folder that somebody named; an empty name, as an unset variable leaves it, would be the folder we are in."""
    if not str(out) or "\0" in str(out):
        raise InputError(f"--out must be the name of a folder, not {str(out)!r}.")
    return Path(out)


def name_of(config: Config) -> str:
    """What a run's folder is called if nobody names it, without the number."""
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", f"{config.method}-{config.data_name}-seed{config.seed}")
