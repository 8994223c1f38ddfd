"""Read run directories back, and group the runs that differ only in the seed."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError
from fedloom.utils.formatting import format_value
from fedloom.utils.result_window import (
    DEFAULT_WINDOW,
    count_evaluations,
    limit_window,
    parse_window_value,
    select_evaluations,
)
from fedloom.utils.run_files import (
    CONFIG_FILE,
    INITIAL_FILE,
    METRICS_FILE,
    PARTITION_FILE,
    read_run_config,
    read_run_history,
    read_run_summary,
)
from fedloom.utils.storage import read_json

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run. `history` has one entry for each round, in order; round 0 is the model before training."""

    folder: Path
    config: dict[str, Any]
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    """The summary that the run wrote at its end; None if it is running or was stopped."""
    counts: Counts | None = None
    """Number of samples of each class (columns) at each client (rows)."""
    class_names: tuple[str, ...] = ()
    chance: float | None = None
    """Accuracy of always guessing the most frequent class of the test data; 1 / classes if their counts are unknown."""
    initial_weights: dict[str, Any] | None = None
    """What the run loaded from the file of its initial weights; None without such a file."""

    @property
    def method(self) -> str:
        return str(self.config.get("method", "unknown method"))

    @property
    def label(self) -> str:
        """The name of the run: its variant, such as `fedavg:lr=0.03`, or its method."""
        return str(self.config.get("variant", self.method))

    @property
    def seed(self) -> str:
        """The seed as text, because here it is only a name."""
        return str(self.config.get("seed", "?"))

    @property
    def own_settings(self) -> set[str]:
        """Settings that the variant sets, and those that they replace. They differ from other runs on purpose."""
        plain = re.sub(r'"(?:[^"\\]|\\.)*"|\[.*?\]', "", self.label)  # quoted text may look like a key
        options = {key.partition(".")[2] for key in flatten_record_config(self.config)}  # `fedprox.mu` is an option
        found = {key for run, key in re.findall(r"[:,](run\.)?(\w+)=", plain) if run or key not in options}
        return found | {other for key, other in (("epochs", "steps"), ("init", "new_head")) if key in found}

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def diverged(self) -> str | None:
        """Why the run ended before its last round, if its training diverged."""
        value = (self.summary or {}).get("diverged")
        return None if value is None else str(value)

    @property
    def last_round(self) -> int:
        return int(self.history[-1]["round"]) if self.history else 0

    def window(self, asked: int | None = None) -> int:
        """Return how many of the last evaluations are averaged: `asked`, or else the setting, within its limits."""
        rounds, every, setting = (self._count(key) for key in ("rounds", "eval_every", "window"))
        planned = count_evaluations(rounds, every or 1) if rounds else len(select_evaluations(self.history))
        return limit_window(asked or setting or DEFAULT_WINDOW, planned)

    def _count(self, key: str) -> int | None:
        """Return a setting that is a positive integer, or None."""
        value = self.config.get(key)
        return value if isinstance(value, int) and value > 0 else None

    def series(self, key: str) -> tuple[NDArray[np.int64], Floats]:
        """Return the rounds at which `key` was measured, and its values.

        A dotted `key` reads nested values: `seconds.train`. Missing, null, NaN and infinite mean "not measured".
        """
        found = [
            (int(row["round"]), value) for row in self.history if (value := get_record_number(row, key)) is not None
        ]
        rounds = np.array([at for at, _ in found], dtype=np.int64)
        return rounds, np.array([value for _, value in found], dtype=np.float64)

    def running(self, *keys: str) -> dict[int, float]:
        """Return the cumulative sum of all `keys`, by round."""
        total, sums = 0.0, {}
        for row in self.history:
            total += sum(get_record_number(row, key) or 0.0 for key in keys)
            sums[int(row["round"])] = total
        return sums

    def total(self, key: str) -> float | None:
        """Return the sum of `key` over all rounds; None if no round has it."""
        values = self.series(key)[1]
        return float(values.sum()) if len(values) else None


def get_record_number(round_entry: dict[str, Any], key: str) -> float | None:
    """Return the finite number at a dotted `key` of `round_entry`, or None."""
    value: Any = round_entry
    for part in key.split(".", 1):  # only once, because names of diagnostics may contain dots
        value = value.get(part) if isinstance(value, dict) else None
    return parse_window_value(value)


def read_run_record(folder: Path) -> RunRecord:
    """Read the run in `folder`, which may be unfinished."""
    folder = Path(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise InputError(f"{str(folder)!r} is not a run: it has no config.toml.")
    config = read_run_config(folder)
    counts, names, chance = _partition(folder / PARTITION_FILE)
    summary = read_run_summary(folder)
    initial_weights = _table(folder / INITIAL_FILE)
    return RunRecord(folder, config, _history(folder, summary), summary, counts, names, chance, initial_weights)


def _history(folder: Path, summary: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Read the rounds in order."""
    rows = read_run_history(folder, summary)
    for at, row in enumerate(rows, start=1):
        this = row["round"]
        if not isinstance(this, int) or isinstance(this, bool) or not 0 <= this < 2**53:
            raise InputError(f"line {at} of {folder / METRICS_FILE} is not a round: it has no integer 'round'.")
    return sorted(rows, key=lambda row: int(row["round"]))


def _table(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in `path`; None if there is no such file."""
    return read_json(path) if path.exists() else None


def _partition(path: Path) -> tuple[Counts | None, tuple[str, ...], float | None]:
    """Read the class counts of the clients, the class names, and the accuracy of guessing."""
    table = _table(path) or {}
    if table.get("counts") is None:  # no file, or data without classes
        return None, (), None
    counts = _whole_numbers(table["counts"])
    if counts is None or counts.ndim != 2:
        raise InputError(f"'counts' of {str(path)!r} must be a table of non-negative integers, clients x classes.")
    tested = _whole_numbers(table.get("test_counts", []))
    if tested is None or tested.ndim != 1:
        raise InputError(f"'test_counts' of {str(path)!r} must be a list of non-negative integers.")
    chance = 1 / counts.shape[1] if counts.shape[1] else None
    if tested.sum():
        chance = float(tested.max() / tested.sum())
    names = table.get("class_names")
    names = [str(name) for name in names] if isinstance(names, list) else []
    names += [str(at) for at in range(len(names), counts.shape[1])]
    return counts, tuple(names[: counts.shape[1]]), chance


def _whole_numbers(values: object) -> Counts | None:
    """Return `values` as an array, or None if one of them is not a non-negative integer."""
    try:
        exact = np.array(values, dtype=np.float64)
        whole = bool(np.all((exact >= 0) & (exact < 2**53) & (exact == np.floor(exact))))
    except (ValueError, TypeError, OverflowError):
        return None
    return exact.astype(np.int64) if whole else None


NOT_SETTINGS = frozenset(
    {"seed", "command", "variant", "server_data_used_by", "name", "out", "folder", "workers", "versions", "format"}
    | {"client_test_samples", "held_out_client_ids", "new_client"}
    | {"checkpoint_seconds", "keep_checkpoints", "cache_dir", "window"}
)
"""Keys of a config that cannot change the result, and the seed, over which results are averaged."""

TASK = ("data", "classes", "partition", "clients", "held_out_clients")
"""Keys that define a task. Only results of the same task are compared."""


def flatten_record_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Flatten a config into text values. An option gets the name of its method: `fedprox.mu`."""
    flat: dict[str, str] = {}

    def walk(prefix: str, table: Mapping[str, Any]) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping):
                walk("" if prefix == "" and key == "options" else f"{prefix}{key}.", value)
            elif value not in ("", []):
                flat[f"{prefix}{key}"] = format_value(value)

    walk("", {key: value for key, value in config.items() if key not in NOT_SETTINGS})
    if "init" in flat:  # the content identifies the file; its folder differs between machines
        start, checksum = PurePath(flat["init"]), flat.pop("init_sha256", "")
        flat["init"] = f"{start.name} {checksum[:8]}".rstrip()
    if "partition_sha256" in flat:  # the same for a partition from a file
        path, checksum = PurePath(flat.get("partition", "").removeprefix("file:")), flat.pop("partition_sha256")
        flat["partition"] = f"{path.name} {checksum[:8]}"
    return flat


def find_record_differences(flat_configs: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the keys whose values differ, in order of first appearance."""
    flat_configs = list(flat_configs)
    keys = dict.fromkeys(key for table in flat_configs for key in table)
    return [key for key in keys if len({table.get(key) for table in flat_configs}) > 1]


@dataclass(frozen=True)
class RecordGroup:
    """Runs that differ only in the seed, and the names of the group."""

    short: str
    """The method or variant, with the settings that distinguish it from other groups of this name on this task."""
    task: str
    """The settings that distinguish this task from the others; all settings of a single task."""
    label: str
    """A unique name."""
    kind: int
    """The index of `short` among all distinct names. It selects the color, the same on every task."""
    records: tuple[RunRecord, ...]


def group_records(records: Iterable[RunRecord]) -> list[RecordGroup]:
    """Group records that differ only in the seed, by task, then in order of first appearance."""
    found: dict[tuple[tuple[str, str], ...], list[RunRecord]] = defaultdict(list)
    for record in records:
        found[tuple(sorted({**flatten_record_config(record.config), "method": record.method}.items()))].append(record)
    groups = list(found.values())
    tables = [flatten_record_config(group[0].config) for group in groups]
    odd = [key for key in TASK if key in find_record_differences(tables)]
    tasks = [_said(table, odd or TASK) or "unnamed task" for table in tables]
    shorts = _shorts([group[0] for group in groups], tables, tasks)
    kinds = list(dict.fromkeys(shorts))
    named = [
        RecordGroup(short, task, f"{short} · {task}" if odd else short, kinds.index(short), tuple(group))
        for short, task, group in zip(shorts, tasks, groups, strict=True)
    ]
    return sorted(named, key=lambda one: tasks.index(one.task))


def _said(table: Mapping[str, str], keys: Sequence[str]) -> str:
    """Describe the task for a reader."""
    told = {**table, "clients": f"{table['clients']} clients"} if "clients" in table else dict(table)
    if "classes" in told:
        told["classes"] = f"classes {told['classes']}"
    if "held_out_clients" in told:
        told["held_out_clients"] = f"{told['held_out_clients']} of the clients held out"
    elif keys != TASK and "held_out_clients" in keys:
        told["held_out_clients"] = "no client held out"
    return ", ".join(told[key] for key in keys if key in told)


def _shorts(records: Sequence[RunRecord], tables: Sequence[Mapping[str, str]], tasks: Sequence[str]) -> list[str]:
    made: list[str] = []
    for at, (record, table) in enumerate(zip(records, tables, strict=True)):
        # Settings that differ only between tasks distinguish nothing within one.
        same = [
            other
            for one, other, task in zip(records, tables, tasks, strict=True)
            if (one.label, task) == (record.label, tasks[at])
        ]
        parts = [record.label]
        for key in find_record_differences(same):
            if key in table and key not in TASK:
                name = key.removeprefix(f"{record.method}.")
                parts.append(table[key] if key == "model" else f"{name}={table[key]}")
        short = " · ".join(parts)
        # Two settings may look the same once shortened, so a number distinguishes them.
        taken = {made[other] for other in range(at) if tasks[other] == tasks[at]}
        names = chain([short], (f"{short} #{number}" for number in count(2)))
        made.append(next(name for name in names if name not in taken))
    return made


def select_record_per_seed(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Keep one record for each seed, the one with most rounds: a repeated run is no new evidence."""
    best: dict[str, RunRecord] = {}
    for record in records:
        held = best.get(record.seed)
        if held is None or (record.finished, record.last_round) > (held.finished, held.last_round):
            best[record.seed] = record
    return list(best.values())
