"""Translate old results into today's words, and list differences."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.golden.runner import Result, parse, unparse

MISSING = "nothing"
WHERE = ("command", "config", "metrics", "summary")
KEYS = {
    "renamed": {"where", "old", "new", "why"},
    "value": {"where", "key", "old", "new", "why"},
    "removed": {"where", "key", "why"},
    "added": {"where", "key", "why"},
    "changed": {"cases", "what", "why"},
}
"""What an entry of each kind must say."""
MAY = {"added": {"value", "beside"}, "removed": {"old"}}
"""What it may say beside that."""


@dataclass(frozen=True)
class Difference:
    """One thing that is not as it should be."""

    what: str
    """The kind of thing, and its key: `digest`, `metrics.loss`."""
    place: str
    """The run, and the round."""
    expected: Any
    found: Any

    def __str__(self) -> str:
        name = f"{self.place}: {self.what}" if self.place else self.what
        return f"{name} is {_brief(self.found)}, not {_brief(self.expected)}"


@dataclass
class Entry:
    """One line of the table, and whether anything needed it."""

    kind: str
    values: Mapping[str, Any]
    used: bool = False

    def __str__(self) -> str:
        said = ", ".join(f"{key} = {value!r}" for key, value in self.values.items() if key != "why")
        return f"[[{self.kind}]] {said}"


@dataclass
class Changes:
    """The table of what is meant to differ."""

    entries: list[Entry] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Changes":
        tables = tomllib.loads(path.read_text())
        tables.pop("streams", None)
        entries = [Entry(kind, values) for kind, many in tables.items() for values in many]
        for entry in entries:
            if entry.kind not in KEYS:
                raise ValueError(f"{path}: there are no entries [[{entry.kind}]], only {', '.join(KEYS)}")
            missing = KEYS[entry.kind] - entry.values.keys()
            surplus = entry.values.keys() - KEYS[entry.kind] - MAY.get(entry.kind, set())
            if missing or surplus or entry.values.get("where", WHERE[0]) not in WHERE:
                raise ValueError(f"{path}: {entry} must say {', '.join(sorted(KEYS[entry.kind]))}")
        return cls(entries)

    def unused(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.used]

    def command(self, words: Sequence[str]) -> list[str]:
        """A command of the old commit as the working tree wants it."""
        return unparse(self._translated("command", parse(words)))

    def table(self, where: str, old: Mapping[str, Any]) -> dict[str, Any]:
        """A table of the old commit as it is now to be."""
        now = dict(self._translated(where, old.items()))
        for entry in self._of("added", where):
            if now and entry.values["key"] not in now and entry.values.get("beside", next(iter(now))) in now:
                now[entry.values["key"]] = entry.values.get("value", _Anything(entry))
                entry.used |= "value" in entry.values
        return now

    def _translated(self, where: str, pairs: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        found = []
        for key, value in pairs:
            if any(
                self._take(entry, entry.values["key"] == key and entry.values.get("old", value) == value)
                for entry in self._of("removed", where)
            ):
                continue
            for entry in self._of("value", where):
                if self._take(entry, entry.values["key"] == key and entry.values["old"] == value):
                    value = entry.values["new"]
                    break
            for entry in self._of("renamed", where):
                if (new := _renamed(key, entry.values["old"], entry.values["new"])) is not None:
                    key, entry.used = new, True
                    break
            found.append((key, value))
        return found

    def _of(self, kind: str, where: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind and entry.values["where"] == where]

    @staticmethod
    def _take(entry: Entry, fits: bool) -> bool:
        entry.used |= fits
        return fits

    def excused(self, case: str, difference: Difference) -> bool:
        """Whether the table says that this is to differ."""
        whats = (difference.what, difference.what.partition(".")[0])
        return any(
            self._take(
                entry,
                any(fnmatchcase(case, pattern) for pattern in entry.values["cases"])
                and any(fnmatchcase(what, pattern) for what in whats for pattern in entry.values["what"]),
            )
            for entry in self.entries
            if entry.kind == "changed"
        )


class _Anything:
    """Equals every value, and notes that it was asked."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def __eq__(self, other: object) -> bool:
        self._entry.used = True
        return True

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "some value"


def _renamed(key: str, old: str, new: str) -> str | None:
    if old.endswith("*") and key.startswith(old[:-1]):
        return new.removesuffix("*") + key.removeprefix(old[:-1])
    return new if key == old else None


def compare(case: str, old: Result, new: Result, changes: Changes) -> list[Difference]:
    """What is not as the old result and the table say."""
    found = [
        *_lists("exit", "", old["exit"], new["exit"]),
        *_lists("message", "", old["message"], new["message"]),
    ]
    for place in sorted(old["runs"].keys() | new["runs"].keys()):
        before, now = old["runs"].get(place), new["runs"].get(place)
        if before is None or now is None:
            found.append(Difference("runs", place, *("a run" if run else MISSING for run in (before, now))))
            continue
        for what in ("digest", "weights", "files"):
            if before[what] != now[what]:
                found.append(Difference(what, place, before[what], now[what]))
        for what in ("command", "config", "summary"):
            found += _tables(what, place, changes.table(what, before[what]), now[what])
        if len(before["metrics"]) != len(now["metrics"]):
            counts = (f"{len(records)} records" for records in (before["metrics"], now["metrics"]))
            found.append(Difference("metrics", place, *counts))
        for n, (then, record) in enumerate(zip(before["metrics"], now["metrics"], strict=False)):
            found += _tables("metrics", f"{place}, record {n}", changes.table("metrics", then), record)
    for what in ("written", "draws"):
        found += _tables(what, "", old[what], new[what])
    return [difference for difference in found if not changes.excused(case, difference)]


def _tables(what: str, place: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(f"{what}.{key}", place, expected.get(key, MISSING), found.get(key, MISSING))
        for key in sorted(expected.keys() | found.keys())
        if key not in expected or key not in found or not _same(expected[key], found[key])
    ]


def _same(expected: Any, found: Any) -> bool:
    """Whether two values are one: 1, 1.0 and true are three. NaN, which JSON has, is itself."""
    return expected == found if isinstance(expected, _Anything) else repr(expected) == repr(found)


def _lists(what: str, place: str, expected: Sequence[Any], found: Sequence[Any]) -> list[Difference]:
    return _tables(what, place, *({f"{n}": value for n, value in enumerate(values)} for values in (expected, found)))


def _brief(value: Any) -> str:
    text = value if value == MISSING else repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
