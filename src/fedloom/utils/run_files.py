"""Readers of the files in a run directory, which check that nothing was changed.

`inputs.json` holds what the run started from: the values of `config.toml`, the hash of its data, and the machine.
"""

import hashlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom._version import __version__
from fedloom.errors import InputError
from fedloom.utils.formatting import short_repr
from fedloom.utils.settings import flatten_settings
from fedloom.utils.storage import check_json_checksum, read_json

FORMAT = 3
"""The format of a run directory. It changes with every file that older versions could not read."""
CONFIG_FILE = "config.toml"
INPUTS_FILE = "inputs.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
PARTITION_FILE = "partition.json"
INITIAL_FILE = "initial.json"
ROUNDS_READ = "rounds_read"
"""Key of a summary and of a checkpoint: whether the method has read the number of rounds."""
METRICS_CHECKSUM = "metrics_sha256"
"""Key of a summary and of a checkpoint: the checksum of the last line of metrics.jsonl."""


def read_run_config(folder: Path, validate: Callable[[dict[str, Any]], object] = lambda values: None) -> dict[str, Any]:
    """Return the values of config.toml. Raise an InputError for another format, or if the file was changed.

    `validate` raises an InputError for invalid values. It comes first, because its messages explain a typing error.
    """
    path = folder / CONFIG_FILE
    try:
        content = path.read_bytes()
        values = tomllib.loads(content.decode())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:  # also of a wrong encoding
        raise InputError(f"{path} is not TOML: {error}.") from error
    found, versions = values.get("format"), values.get("versions")
    if found != FORMAT:
        made = versions.get("fedloom", "unknown") if isinstance(versions, dict) else "unknown"
        raise InputError(
            f"{folder} is a run of format {found!r} (made by fedloom {made}); this is fedloom {__version__}, which "
            f"reads format {FORMAT}. Repeat it with: fedloom run --config {path}"
        )
    validate(values)
    _refuse_changed_config(path, content, values, read_json(folder / INPUTS_FILE))
    return values


def _refuse_changed_config(path: Path, content: bytes, values: dict[str, Any], inputs: dict[str, Any]) -> None:
    if hashlib.sha256(content).hexdigest() in inputs["config_sha256"]:
        return
    before, now = flatten_settings(inputs["config"]), flatten_settings(values)
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key) or (key in before) != (key in now):
            was = f"the run started with {short_repr(before[key])}" if key in before else "the run started without it"
            found = f"{key} is now {short_repr(now[key])}" if key in now else f"{key} is gone"
            raise InputError(
                f"{path} was changed: {found}, but {was}. Undo the change, or start a new run from the file with: "
                f"fedloom run --config {path}"
            )
    raise InputError(
        f"{path} was changed, though no value differs. Undo the change, or start a new run from the file with: "
        f"fedloom run --config {path}"
    )


@dataclass(frozen=True)
class MetricsLog:
    """The lines of metrics.jsonl."""

    records: tuple[dict[str, Any], ...] = ()
    checksums: tuple[str, ...] = ()
    """The checksum of each line, which covers all lines before it."""
    fault: str | None = None
    """What is wrong with the next line, or None at the end of the file."""
    is_cut: bool = False
    """Whether this is only that the line is not complete, as after a SIGKILL."""

    @property
    def checksum(self) -> str:
        """The checksum of the last line; empty without lines."""
        return self.checksums[-1] if self.checksums else ""


def read_metrics_log(folder: Path) -> MetricsLog:
    """Read metrics.jsonl up to the first line that is damaged or not complete."""
    path = folder / METRICS_FILE
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return MetricsLog()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    records: list[dict[str, Any]] = []
    checksums = [""]
    for number, line in enumerate(lines, start=1):
        try:
            record, checksum = check_json_checksum(line, checksums[-1])
            record["round"] + 0
        except (ValueError, TypeError, KeyError, RecursionError):
            fault = f"line {number} of {path} is damaged, or lines before it are missing: its checksum is wrong."
            return MetricsLog(tuple(records), tuple(checksums[1:]), fault)
        records.append(record)
        checksums.append(checksum)
    cut = f"the last line of {path} is not complete." if rest else None
    return MetricsLog(tuple(records), tuple(checksums[1:]), cut, is_cut=bool(rest))


def read_run_history(folder: Path, summary: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the records of all rounds. Raise an InputError if a line was changed, or of a finished run is missing.

    In an unfinished run, a last line that is not complete does not count.
    """
    log = read_metrics_log(folder)
    if log.fault is not None and (summary is not None or not log.is_cut):
        raise InputError(log.fault)
    if summary is not None and log.checksum != summary[METRICS_CHECKSUM]:
        raise InputError(f"{folder / METRICS_FILE} is damaged: lines are missing at its end.")
    return list(log.records)


def read_run_summary(folder: Path) -> dict[str, Any] | None:
    """Return the content of summary.json; None if the run has not finished."""
    path = folder / SUMMARY_FILE
    if not path.exists():
        return None
    summary = read_json(path)
    if not {"digest", METRICS_CHECKSUM, ROUNDS_READ} <= summary.keys():
        raise InputError(f"{path} is damaged: it is not the JSON that was written.")
    return summary
