"""Which runs belong together: those that differ in nothing but the seed. And a short name for each group."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import PurePath
from typing import Any

from fedloom.report.records import Record

NOT_SETTINGS = frozenset(
    {"seed", "command", "server_data_used_by", "name", "out", "folder", "workers", "made_with", "format"}
    | {"checkpoint_seconds", "keep_checkpoints", "cache_dir"}
)
"""Keys of a config that cannot change what is learned, but for the seed, which is what we average over."""

TASK = ("data", "classes", "partition", "clients")
"""What makes results comparable at all: differences between methods are taken within one task."""


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The config as flat text. An option is named after its method: `fedprox.mu`."""
    flat: dict[str, str] = {}

    def walk(prefix: str, table: Mapping[str, Any]) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping):
                walk("" if prefix == "" and key == "options" else f"{prefix}{key}.", value)
            elif value not in ("", []):
                flat[f"{prefix}{key}"] = text(value)

    walk("", {key: value for key, value in config.items() if key not in NOT_SETTINGS})
    if "init" in flat:  # a start is its content: its folder differs from machine to machine
        start, checksum = PurePath(flat["init"]), flat.pop("init_sha256", "")
        flat["init"] = f"{start.name} {checksum[:8]}".rstrip()
    if "partition_sha256" in flat:  # and so is a partition in a file
        path, checksum = PurePath(flat.get("partition", "").removeprefix("file:")), flat.pop("partition_sha256")
        flat["partition"] = f"{path.name} {checksum[:8]}"
    return flat


def text(value: object) -> str:
    """A TOML value as a reader would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list):
        return ", ".join(text(one) for one in value)
    return str(value)


def differing(tables: Iterable[Mapping[str, str]]) -> list[str]:
    """The keys on which `tables` do not agree, in order of first appearance."""
    tables = list(tables)
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if len({table.get(key) for table in tables}) > 1]


@dataclass(frozen=True)
class Named:
    """Runs that differ in nothing but the seed, and what to call them."""

    short: str
    """The method, with those of its settings that tell it from others of the same method on the same task."""
    task: str
    """What tells this task from the others; all of it if there is but one."""
    label: str
    """A name that no other group has."""
    kind: int
    """The place of `short` among all that differ: one kind has one colour, whatever the task."""
    records: tuple[Record, ...]


def grouped(records: Iterable[Record]) -> list[Named]:
    """Records by what they are: task by task, and within a task in order of first appearance."""
    found: dict[tuple[tuple[str, str], ...], list[Record]] = defaultdict(list)
    for record in records:
        found[tuple(sorted({**settings(record.config), "method": record.method}.items()))].append(record)
    groups = list(found.values())
    tables = [settings(group[0].config) for group in groups]
    odd = [key for key in TASK if key in differing(tables)]
    tasks = [_said(table, odd or TASK) or "unnamed task" for table in tables]
    shorts = _shorts([group[0].method for group in groups], tables, tasks)
    kinds = list(dict.fromkeys(shorts))
    named = [
        Named(short, task, f"{short} · {task}" if odd else short, kinds.index(short), tuple(group))
        for short, task, group in zip(shorts, tasks, groups, strict=True)
    ]
    return sorted(named, key=lambda one: tasks.index(one.task))


def _said(table: Mapping[str, str], keys: Sequence[str]) -> str:
    """The task as a reader would say it."""
    told = {**table, "clients": f"{table['clients']} clients"} if "clients" in table else dict(table)
    if "classes" in told:
        told["classes"] = f"classes {told['classes']}"
    return ", ".join(told[key] for key in keys if key in told)


def _shorts(methods: Sequence[str], tables: Sequence[Mapping[str, str]], tasks: Sequence[str]) -> list[str]:
    made: list[str] = []
    for at, (method, table) in enumerate(zip(methods, tables, strict=True)):
        same = [other for name, other in zip(methods, tables, strict=True) if name == method]
        parts = [method]
        for key in differing(same):
            if key in table and key not in TASK:
                name = key.removeprefix(f"{method}.")
                parts.append(table[key] if key == "model" else f"{name}={table[key]}")
        short = " · ".join(parts)
        # Two settings may read the same once shortened; a number then tells them apart.
        taken = {made[other] for other in range(at) if tasks[other] == tasks[at]}
        names = chain([short], (f"{short} #{number}" for number in count(2)))
        made.append(next(name for name in names if name not in taken))
    return made


def once(records: Sequence[Record]) -> list[Record]:
    """One record a seed: of runs made twice the one that got furthest, for a repeat is no new evidence."""
    best: dict[str, Record] = {}
    for record in records:
        held = best.get(record.seed)
        if held is None or (record.finished, record.last_round) > (held.finished, held.last_round):
            best[record.seed] = record
    return list(best.values())
