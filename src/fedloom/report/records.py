"""A run's folder, read back: what was asked, what was measured, and who held which data."""

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Record:
    """One run. `history` has one entry a round, in order; round 0 is the model before training."""

    folder: Path
    config: dict[str, Any]
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    """What the run wrote when it ended; None while it goes on, or if it was stopped."""
    counts: Counts | None = None
    """Examples of each class (columns) at each client (rows)."""
    class_names: tuple[str, ...] = ()
    beginning: dict[str, Any] | None = None
    """What the run took from the file it started from; None where it started from none."""

    @property
    def method(self) -> str:
        return str(self.config.get("method", "unknown method"))

    @property
    def seed(self) -> str:
        """The seed as text, for it is a name here and never a number."""
        return str(self.config.get("seed", "?"))

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def last_round(self) -> int:
        return int(self.history[-1]["round"]) if self.history else 0

    def series(self, key: str) -> tuple[NDArray[np.int64], Floats]:
        """The rounds at which `key` was measured, and what it was then.

        A dot in `key` looks inside: `seconds.train`. Missing, null, NaN and infinite are all "not measured".
        """
        found = [(int(row["round"]), value) for row in self.history if (value := look(row, key)) is not None]
        rounds = np.array([at for at, _ in found], dtype=np.int64)
        return rounds, np.array([value for _, value in found], dtype=np.float64)

    def running(self, *keys: str) -> dict[int, float]:
        """The sum of all `keys` from the start up to each round, by round."""
        total, sums = 0.0, {}
        for row in self.history:
            total += sum(look(row, key) or 0.0 for key in keys)
            sums[int(row["round"])] = total
        return sums

    def total(self, key: str) -> float | None:
        """The sum of `key` over all rounds; None if no round has it."""
        values = self.series(key)[1]
        return float(values.sum()) if len(values) else None


def look(row: dict[str, Any], key: str) -> float | None:
    """The finite number at a dotted `key` of `row`, if there is one."""
    value: Any = row
    for part in key.split(".", 1):  # once: the name of a diagnostic may have dots of its own
        value = value.get(part) if isinstance(value, dict) else None
    return number(value)


def number(value: object) -> float | None:
    """`value` as a float if it is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of more than 308 digits
        return None


def read_run(folder: Path) -> Record:
    """Read the run in `folder`; one that has not finished is read as far as it got."""
    folder = Path(folder)
    if not (folder / "config.toml").is_file():
        raise InputError(f"{str(folder)!r} is not a run: it has no config.toml.")
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"config.toml of {str(folder)!r} cannot be read: {error}.") from None
    counts, names = _partition(folder / "partition.json")
    summary = _table(folder / "summary.json")
    beginning = _table(folder / "initial.json")
    return Record(folder, config, _history(folder / "metrics.jsonl"), summary, counts, names, beginning)


def _history(path: Path) -> list[dict[str, Any]]:
    """The rounds in order. A resumed run may write a round again; then the later line holds."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error}.") from None
    rows: dict[int, dict[str, Any]] = {}
    for at, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if at == len(lines):  # the run was stopped, or is writing, in the middle of it
                break
            raise InputError(f"line {at} of {str(path)!r} is not JSON.") from None
        this = row.get("round") if isinstance(row, dict) else None
        if not isinstance(this, int) or isinstance(this, bool) or not 0 <= this < 2**53:
            raise InputError(f"line {at} of {str(path)!r} is not a round: it has no whole number 'round'.")
        rows[this] = row
    return [rows[this] for this in sorted(rows)]


def _table(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None where there is no such file."""
    if not path.exists():
        return None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{str(path)!r} cannot be read: {error}.") from None
    if not isinstance(table, dict):
        raise InputError(f"{str(path)!r} must hold a JSON object, not {type(table).__name__}.")
    return table


def _partition(path: Path) -> tuple[Counts | None, tuple[str, ...]]:
    """Who holds which classes, and what the classes are called."""
    table = _table(path) or {}
    if table.get("counts") is None:  # no file, or data without classes
        return None, ()
    try:
        exact = np.array(table["counts"], dtype=np.float64)
        whole = bool(np.all((exact >= 0) & (exact < 2**53) & (exact == np.floor(exact))))
    except (ValueError, TypeError, OverflowError):
        whole = False
    if not whole or exact.ndim != 2:
        raise InputError(f"'counts' of {str(path)!r} must be a table of whole numbers, clients x classes.")
    counts = exact.astype(np.int64)
    names = table.get("class_names")
    names = [str(name) for name in names] if isinstance(names, list) else []
    names += [str(at) for at in range(len(names), counts.shape[1])]
    return counts, tuple(names[: counts.shape[1]])
