"""RunDirectory: config, metrics, checkpoints, model and summary of a run on disk.

config.toml       all settings, and the versions of the software
metrics.jsonl     one record per round, appended after the round
checkpoints/      the last checkpoints (see checkpoints.py)
partial/          partial results of long server work (see utils/partial_results.py), until the run has finished
partition.json    number of samples per client and class
initial.json      what a run with --init took from its file
initial.safetensors the initial weights that resulted
model.safetensors the global model, as named tensors
synthetic.safetensors the synthetic data set of a run that makes one
summary.json      the totals of a finished run
report.html       the report with figures
"""

import json
import os
import platform
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
from fedloom.methods.variants import variant_folder_name
from fedloom.models.initial_weights import InitialWeights
from fedloom.runs.checkpoints import Checkpoints
from fedloom.utils.settings import read_settings_toml, settings_to_toml
from fedloom.utils.storage import (
    MODEL_FILE,
    read_json,
    read_safetensors,
    write_atomically,
    write_json,
    write_safetensors,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # mypy checks for Unix, where it is a module

FORMAT = 2
REPORT_KEYS = ("server_data_used_by", "client_test_samples", "held_out_client_ids", "new_client")
"""Keys in config.toml that are no settings: what a report needs to know beside them."""
PATIENCE = 30
LOCK = ".lock"
UNCOUNTED = (LOCK, ".config.toml.part", "flower")
"""Files of a run that was killed before it wrote its config, and of sites that run already."""


class RunDirectory:
    """The directory of one run."""

    def __init__(self, path: Path, config: Config, python_objects: tuple[str, ...] = ()) -> None:
        self.path = path
        self.config = config
        self.python_objects = python_objects
        """Which of data, model and loss were Python objects and must be passed again."""
        self.checkpoints = Checkpoints(path / "checkpoints", config.keep_checkpoints)

    @classmethod
    def create(
        cls,
        path: Path,
        config: Config,
        python_objects: tuple[str, ...] = (),
        report_values: Mapping[str, Any] | None = None,
    ) -> "RunDirectory":
        """Write the config of a new run into a folder from `claim_directory`.

        `report_values` are values of `REPORT_KEYS`, for the report.
        """
        directory = cls(path, config, python_objects)
        text = settings_to_toml(
            {
                "format": FORMAT,
                "command": None if python_objects else config_to_command(config),
                "python_objects": list(python_objects),
                **(report_values or {}),
                **config.model_dump(mode="json", exclude={"options"}),
                "options": config.options,
                "versions": {
                    "fedloom": __version__,
                    "torch": torch.__version__,
                    "numpy": np.__version__,
                    "python": platform.python_version(),
                    "platform": f"{platform.system()} {platform.machine()}",
                },
            }
        )
        write_atomically(path / "config.toml", text.encode())
        return directory

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Open an existing run."""
        if not is_run_directory(path):
            raise InputError(f"{path} is not a run: there is no config.toml in it.")
        values = read_settings_toml(path / "config.toml")
        found = values.pop("format", None)
        if found != FORMAT:
            made = values.get("versions", {}).get("fedloom", "unknown")
            raise InputError(
                f"{path} is a run of format {found!r} (made by fedloom {made}); this is fedloom {__version__}, which "
                f"reads format {FORMAT}."
            )
        values.pop("versions", None)
        values.pop("command", None)
        for key in REPORT_KEYS:
            values.pop(key, None)
        python_objects = tuple(values.pop("python_objects", ()))
        try:
            return cls(path, make_config(values), python_objects)
        except InputError as error:
            raise InputError(f"{path / 'config.toml'}: {error}") from error

    def lock(self) -> AbstractContextManager[None]:
        """Lock this run against other processes; the lock ends with this process."""
        return _lock_directory(self.path)

    # metrics

    def append_record(self, record: dict[str, Any]) -> None:
        """Append the record of a round to metrics.jsonl."""
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(record) + "\n")
        except OSError as error:
            raise FedloomError(f"cannot write {self.path / 'metrics.jsonl'}: {error.strerror or error}.") from error

    def history(self) -> list[dict[str, Any]]:
        """Return the records so far, without a truncated last line."""
        try:
            lines = (self.path / "metrics.jsonl").read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(f"cannot read {self.path / 'metrics.jsonl'}: {error.strerror or error}.") from error
        records = []
        for number, line in enumerate(lines[:-1], start=1):  # a complete line ends with a newline
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
        """Flush the records to disk."""
        with (self.path / "metrics.jsonl").open("rb") as handle:
            os.fsync(handle.fileno())

    def rewind(self, round: int, last: dict[str, Any] | None = None) -> None:
        """Delete the records after `round`, because these rounds run again. `last` is the record of `round`."""
        kept = [record for record in self.history() if record["round"] <= round]
        if last is not None and (not kept or kept[-1]["round"] < round):
            kept.append(last)
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_atomically(self.path / "metrics.jsonl", text.encode())

    # other files

    def write_partition(
        self, label_counts: np.ndarray | None, class_names: tuple[str, ...], test_counts: np.ndarray | None
    ) -> None:
        """Write the number of samples per client and class, and the number of test samples per class."""
        if label_counts is None:
            return
        value = {"classes": label_counts.shape[1], "class_names": list(class_names), "counts": label_counts.tolist()}
        if test_counts is not None:
            value["test_counts"] = test_counts.tolist()
        write_atomically(self.path / "partition.json", json.dumps(value).encode())

    def write_initial_weights(self, initial_weights: InitialWeights, state_dict: Mapping[str, Tensor]) -> None:
        """Write the initial weights and what was taken from the file, so that the run no longer needs it."""
        digest = write_safetensors(self.path / "initial.safetensors", state_dict)
        write_json(self.path / "initial.json", {**initial_weights.to_dict(), "start_sha256": digest})

    def load_initial_weights(self) -> dict[str, Tensor] | None:
        """Return the initial weights of a run with --init; None without, or if the run ended before it wrote them."""
        if self.config.init is None or not (self.path / "initial.json").is_file():
            return None
        return read_safetensors(
            self.path / "initial.safetensors", read_json(self.path / "initial.json")["start_sha256"]
        )

    def write_model(self, tensors: dict[str, Tensor]) -> None:
        """Write the global model, a state dict."""
        write_safetensors(self.path / "model.safetensors", tensors)

    def write_artifact(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors that the method made for users to look at."""
        write_safetensors(self.path / f"{name}.safetensors", tensors)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the totals of a finished run."""
        write_atomically(self.path / "summary.json", (json.dumps(summary) + "\n").encode())

    def lacks_model(self) -> bool:
        """Return whether the model file of this finished run is missing. Without a global model there is none."""
        summary = self.summary() or {}
        return bool(summary.get("global_model", True)) and not (self.path / MODEL_FILE).is_file()

    def summary(self) -> dict[str, Any] | None:
        """Return the totals; None if the run has not finished."""
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
def claim_directory(
    path: Path, refuse: Callable[[Path], None] | None = None, *, numbered: bool = False
) -> Iterator[Path]:
    """Create a folder and lock it until the end.

    With `numbered` it is a new folder: `path` followed by the first free number. `refuse` raises an error if the folder
    cannot be used. It is called before anything is written, and again under the lock. A new folder that is still empty
    at the end is removed.
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
                with suppress(OSError):  # the folder may be gone
                    if [entry.name for entry in path.iterdir()] == [LOCK]:
                        (path / LOCK).unlink()
    finally:
        for folder in made:
            with suppress(OSError):  # it is in use
                folder.rmdir()


def refuse_occupied_directory(path: Path) -> None:
    """Raise an InputError if a folder is not empty."""
    with _told(path):
        if path.exists() and any(entry.name not in UNCOUNTED for entry in path.iterdir()):
            advice = f", or continue with: fedloom resume {path}" if is_run_directory(path) else "."
            raise InputError(f"{path} is not empty; choose another --out{advice}")


@contextmanager
def _lock_directory(folder: Path) -> Iterator[None]:
    """Lock `folder` against other processes; the lock ends with this process."""
    with _lock(folder, []):
        yield


@contextmanager
def _lock(folder: Path, made: list[Path]) -> Iterator[None]:
    """Hold the lock of a folder. Create the folder if needed, and add created folders to `made`."""
    for attempt in range(PATIENCE):
        with _told(folder):
            handle = _try_lock(folder, made)
        if handle is not None:
            break
        if attempt < PATIENCE - 1:  # workers of a killed process hold the lock a moment longer
            time.sleep(0.1)
    else:
        raise InputError(f"another process is at work on {folder}; wait for it or stop it.")
    with handle:
        try:
            yield
        finally:
            if fcntl is not None:  # closing is not enough: a forked process has the file too
                fcntl.flock(handle, fcntl.LOCK_UN)


def _try_lock(folder: Path, made: list[Path]) -> IO[bytes] | None:
    """Return the locked file; None if another process holds it, or has just removed it with the folder."""
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
    """Create a folder named `stem` and the first free number. Concurrent processes get different ones."""
    with _told(stem.parent):
        made.extend(place for place in (stem.parent, *stem.parent.parents) if not place.exists())
        for number in range(1, 1_000_000):
            path = stem.with_name(f"{stem.name}-{number:03d}")
            stem.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir()
                made.insert(0, path)
                return path
    raise InputError(f"{stem.parent} has too many folders named {stem.name}; choose one with --out.")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn errors of creating or writing a folder into an InputError."""
    try:
        yield
    except (NotADirectoryError, FileExistsError) as error:
        raise InputError(f"cannot make the folder {path}: it, or a part of its path, is a file.") from error
    except OSError as error:
        raise InputError(f"cannot make the folder {path}, or write to it: {error.strerror}.") from error


def is_run_directory(path: Path) -> bool:
    """Return whether `path` is a run directory."""
    try:
        return (path / "config.toml").is_file()
    except OSError as error:
        raise InputError(f"cannot look into {path}: {error.strerror}.") from error


def parse_run_path(out: Path | str) -> Path:
    """Return the folder `out`. Reject an empty name, as from an unset variable: it would be the current folder."""
    if not str(out) or "\0" in str(out):
        raise InputError(f"--out must be the name of a folder, not {str(out)!r}.")
    return Path(out)


def directory_name(config: Config) -> str:
    """Return the default name of a run directory, without its number."""
    return f"{variant_folder_name(config.label)}-{config.data_name}-seed{config.seed}"
