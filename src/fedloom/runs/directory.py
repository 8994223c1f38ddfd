"""RunDirectory: config, metrics, checkpoints, model and summary of a run on disk.

config.toml       all settings, and the versions of the software
inputs.json       what the run started from: its config again, the hash of its data, and the machine
metrics.jsonl     one record per round, appended after the round; each line has a checksum that covers all before it
checkpoints/      the last checkpoints (see checkpoints.py)
partial/          partial results of long server work (see utils/partial_results.py), until the run has finished
partition.json    number of samples per client and class
initial.json      what a run with --init took from its file
initial.safetensors the initial weights that resulted
model.safetensors the global model, as named tensors
synthetic.safetensors the synthetic data set of a run that makes one
summary.json      the totals of a finished run
report.html       the report with figures

Every file but report.html holds a checksum, or its checksum is in the JSON file that names it.
"""

import hashlib
import os
import platform
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fedloom._version import __version__
from fedloom.config import Config, config_to_command, make_config, replace_config
from fedloom.errors import FedloomError, InputError
from fedloom.methods.variants import variant_folder_name
from fedloom.models.initial_weights import InitialWeights
from fedloom.runs.checkpoints import Checkpoints
from fedloom.runs.metrics import RESULT_KEYS
from fedloom.utils.run_files import (
    CONFIG_FILE,
    FORMAT,
    INPUTS_FILE,
    METRICS_CHECKSUM,
    METRICS_FILE,
    PARTITION_FILE,
    ROUNDS_READ,
    SUMMARY_FILE,
    read_metrics_log,
    read_run_config,
    read_run_history,
    read_run_summary,
)
from fedloom.utils.settings import settings_to_toml
from fedloom.utils.storage import (
    MODEL_FILE,
    add_json_checksum,
    read_json,
    read_safetensors,
    write_atomically,
    write_checked_safetensors,
    write_json,
    write_safetensors,
)

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # mypy checks for Unix, where it is a module

REPORT_KEYS = ("server_data_used_by", "client_test_samples", "held_out_client_ids", "new_client")
"""Keys in config.toml that are no settings: what a report needs to know beside them."""
PATIENCE = 30
LOCK = ".lock"
UNCOUNTED = (LOCK, ".config.toml.part", INPUTS_FILE, f".{INPUTS_FILE}.part", "flower")
"""Files of a run that was killed before it wrote its config, and of sites that run already."""


class RunDirectory:
    """The directory of one run."""

    def __init__(self, path: Path, config: Config, python_objects: tuple[str, ...] = ()) -> None:
        self.path = path
        self.config = config
        self.python_objects = python_objects
        """Which of data, model and loss were Python objects and must be passed again."""
        self.checkpoints = Checkpoints(path / "checkpoints", config.keep_checkpoints)
        self._checksum: str | None = None

    @classmethod
    def create(
        cls,
        path: Path,
        config: Config,
        python_objects: tuple[str, ...] = (),
        report_values: Mapping[str, Any] | None = None,
        *,
        data_hashes: Mapping[str, str] | None = None,
        cache_dir: str | None = None,
        machine: Mapping[str, str] | None = None,
    ) -> "RunDirectory":
        """Write the config of a new run into a folder from `claim_directory`.

        `report_values` are values of `REPORT_KEYS`, for the report. `data_hashes` and `machine` come from
        `runs.inputs`. `cache_dir` is the folder of this run in the `cache_dir` of the config.
        """
        directory = cls(path, config, python_objects)
        directory._write_config(
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
            },
            {
                "config_sha256": [],
                "data": dict(data_hashes or {}),
                "machines": [dict(machine or {})],
                "cache_dir": cache_dir,
            },
        )
        return directory

    def _write_config(self, values: Mapping[str, Any], inputs: dict[str, Any]) -> None:
        """Write config.toml, and before it inputs.json with its checksum, so that no crash makes them differ."""
        content = settings_to_toml(values).encode()
        checksums = [hashlib.sha256(content).hexdigest(), *inputs["config_sha256"][:1]]
        config = tomllib.loads(content.decode())
        write_json(self.path / INPUTS_FILE, {**inputs, "config_sha256": checksums, "config": config})
        write_atomically(self.path / CONFIG_FILE, content)

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Open an existing run. Raise an InputError if its config was changed or is invalid."""
        if not is_run_directory(path):
            raise InputError(f"{path} is not a run: there is no config.toml in it.")

        def validate(values: dict[str, Any]) -> None:
            try:
                make_config(select_run_settings(values))
            except InputError as error:
                raise InputError(f"{path / CONFIG_FILE}: {error}") from error

        values = read_run_config(path, validate)
        return cls(path, make_config(select_run_settings(values)), tuple(values.get("python_objects", ())))

    def extend(self, rounds: int) -> "RunDirectory":
        """Change the number of rounds, and return the run, which is then unfinished.

        After a crash in between, the run has the old number of rounds, and writes its summary again.
        """
        try:
            (self.path / SUMMARY_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"cannot change {self.path}: {error.strerror or error}.") from error
        values = read_run_config(self.path)
        config = replace_config(self.config, rounds=rounds)
        command = {} if "command" not in values else {"command": config_to_command(config)}
        self._write_config({**values, **command, "rounds": rounds}, self.inputs())
        return RunDirectory(self.path, config, self.python_objects)

    def inputs(self) -> dict[str, Any]:
        """Return what the run started from: the hash of its data, and the machines that computed it."""
        return read_json(self.path / INPUTS_FILE)

    @property
    def cache_dir(self) -> str | None:
        """Return the folder for cached rows of this run alone; None if rows are kept in memory."""
        found = self.inputs()["cache_dir"]
        return None if found is None else str(found)

    def add_machine(self, machine: Mapping[str, str]) -> None:
        """Record that another machine continues the run."""
        inputs = self.inputs()
        write_json(self.path / INPUTS_FILE, {**inputs, "machines": [*inputs["machines"], dict(machine)]})

    def lock(self) -> AbstractContextManager[None]:
        """Lock this run against other processes; the lock ends with this process."""
        return hold_directory_lock(self.path)

    # metrics

    @property
    def metrics_checksum(self) -> str:
        """Return the checksum of the last line of metrics.jsonl, which covers all lines."""
        if self._checksum is None:
            self._checksum = read_metrics_log(self.path).checksum
        return self._checksum

    def append_record(self, record: Mapping[str, Any]) -> None:
        """Append the record of a round to metrics.jsonl."""
        line, checksum = add_json_checksum(record, self.metrics_checksum)
        try:
            with (self.path / METRICS_FILE).open("ab") as handle:
                handle.write(line + b"\n")
        except OSError as error:
            raise FedloomError(f"cannot write {self.path / METRICS_FILE}: {error.strerror or error}.") from error
        self._checksum = checksum

    def history(self) -> list[dict[str, Any]]:
        """Return the records so far, without a truncated last line. Raise an InputError if a line was changed."""
        return read_run_history(self.path, read_run_summary(self.path))

    def sync_metrics(self) -> None:
        """Flush the records to disk."""
        try:
            with (self.path / METRICS_FILE).open("rb") as handle:
                os.fsync(handle.fileno())
        except OSError as error:
            raise FedloomError(f"cannot write {self.path / METRICS_FILE}: {error.strerror or error}.") from error

    def rewind(self, round: int, last: Mapping[str, Any] | None = None, checksum: str = "") -> str | None:
        """Delete the records after `round`, because these rounds run again.

        Args:
            round: The number of finished rounds; -1 deletes all records.
            last: The record of `round`, which is added if it is missing: a checkpoint is written before it.
            checksum: That of the line before it, when the checkpoint was written.

        Returns:
            What was wrong with a deleted line that was damaged, not only cut off.

        Raises:
            InputError: A record up to `round` is missing or was changed.
        """
        log = read_metrics_log(self.path)
        kept = [record for record in log.records if record["round"] <= round]
        if last is not None:
            before = len([record for record in kept if record["round"] < round])
            if (log.checksums[before - 1] if before else "") != checksum:
                raise InputError(
                    log.fault or f"{self.path / METRICS_FILE} is damaged: lines before round {round} are missing."
                )
            if len(kept) == before:
                kept.append(dict(last))
        self._write_records(kept)
        return None if log.is_cut else log.fault

    def remove_evaluation(self, round: int) -> None:
        """Remove the evaluation of `round`, which was the last round until the run was extended."""
        evaluation = {*RESULT_KEYS, "personal_clients"}
        self._write_records(
            [
                {key: value for key, value in record.items() if record["round"] != round or key not in evaluation}
                for record in self.history()
            ]
        )

    def _write_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        lines, checksum = [], ""
        for record in records:
            line, checksum = add_json_checksum(record, checksum)
            lines.append(line + b"\n")
        write_atomically(self.path / METRICS_FILE, b"".join(lines))
        self._checksum = checksum

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
        write_json(self.path / PARTITION_FILE, value)

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
        write_checked_safetensors(self.path / MODEL_FILE, tensors)

    def write_artifact(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors that the method made for users to look at."""
        write_checked_safetensors(self.path / f"{name}.safetensors", tensors)

    def write_summary(self, summary: Mapping[str, Any], *, rounds_read: bool = False) -> None:
        """Write the totals of a finished run, after its last record."""
        checks = {ROUNDS_READ: rounds_read, METRICS_CHECKSUM: self.metrics_checksum}
        write_json(self.path / SUMMARY_FILE, {**summary, **checks})

    def lacks_model(self) -> bool:
        """Return whether the model file of this finished run is missing. Without a global model there is none."""
        summary = self.summary() or {}
        return bool(summary.get("global_model", True)) and not (self.path / MODEL_FILE).is_file()

    def summary(self) -> dict[str, Any] | None:
        """Return the totals; None if the run has not finished."""
        summary = read_run_summary(self.path)
        if summary is not None:
            del summary[METRICS_CHECKSUM], summary[ROUNDS_READ]
        return summary

    def depends_on_rounds(self) -> bool:
        """Return whether the method of a finished run has read the number of rounds."""
        return bool((read_run_summary(self.path) or {})[ROUNDS_READ])


NOT_SETTINGS = ("format", "versions", "command", "python_objects", *REPORT_KEYS)
"""Keys of config.toml that are no settings."""


def select_run_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among the values of a config.toml."""
    return {key: value for key, value in values.items() if key not in NOT_SETTINGS}


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
                    if {entry.name for entry in path.iterdir()} <= {LOCK, INPUTS_FILE}:
                        for name in (INPUTS_FILE, LOCK):
                            (path / name).unlink(missing_ok=True)
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
def hold_directory_lock(folder: Path) -> Iterator[None]:
    """Lock `folder` against other processes; the lock ends with this process."""
    with _lock(folder, []):
        yield


@contextmanager
def try_directory_lock(folder: Path) -> Iterator[bool]:
    """Lock `folder` and yield True; yield False if another process holds the lock."""
    with _told(folder):
        handle = _try_lock(folder, [])
    if handle is None:
        yield False
        return
    with handle:
        try:
            yield True
        finally:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_UN)


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
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise InputError(f"--out must be text in UTF-8, not {str(out)!r}.") from None
    return Path(out)


def directory_name(config: Config) -> str:
    """Return the default name of a run directory, without its number."""
    return f"{variant_folder_name(config.label)}-{config.data_name}-seed{config.seed}"
