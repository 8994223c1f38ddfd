"""File names in place of absolute paths.

A report may be published, and folders name users and machines."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from fedloom.report.records import RunRecord

SETTING = re.compile(r"(?:(?<=[:=,])|^)/[^,:=]+")
"""A path in a setting, such as `table:/data/people.csv,label=income`. It may contain spaces."""
PART = r"[^\s'\"`:;,()<>/]+"
TEXT = re.compile(rf"(?<=['\"`])/[^'\"`/]+(?:/[^'\"`/]+)*(?=['\"`])|(?<![\w./])/{PART}(?:/{PART})+/?")
"""A path in other text, such as the reason of a failure: in quotes, or of two parts or more."""


def hide_record_folders(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Replace absolute paths in the settings and commands of runs.

    Paths that differ stay different: if two files have one name, their folders stay too, as far as needed.
    """
    paths = {path for record in records for text in _texts(record.config) for path in SETTING.findall(text)}
    names = _shortest_names(paths)
    return [replace(record, config=_hide(record.config, names)) for record in records]


def hide_setting_folders(text: str) -> str:
    """Replace absolute paths in a setting, such as `table:/data/people.csv,label=income`, by the names of the files."""
    return SETTING.sub(lambda found: PurePath(found[0]).name, text)


def hide_folders(text: str) -> str:
    """Replace absolute paths in a text by the names of their files."""
    return TEXT.sub(lambda found: PurePath(found[0]).name, text) if "/" in text else text


def _texts(value: object) -> Iterable[str]:
    """Yield all strings in a setting."""
    if isinstance(value, str):
        yield from _words(value)
    elif isinstance(value, Mapping | list):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(one)


def _words(text: str) -> list[str]:
    """Return the words of a command, or the text itself."""
    if not text.startswith("fedloom "):
        return [text]
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def _hide(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        words = [SETTING.sub(lambda found: names[found[0]], word) for word in _words(value)]
        return shlex.join(words) if len(words) > 1 else words[0]
    if isinstance(value, Mapping):
        return {key: _hide(one, names) for key, one in value.items()}
    return [_hide(one, names) for one in value] if isinstance(value, list) else value


def _shortest_names(paths: Iterable[str]) -> dict[str, str]:
    """Return for each path the fewest of its last parts that no other path ends with."""
    parts = {path: [part for part in path.split("/") if part] for path in paths}
    names: dict[str, str] = {}
    for path, own in parts.items():
        others = [other for name, other in parts.items() if name != path and other != own]
        length = next((n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others)), len(own))
        names[path] = "/".join(own[-length:])
    return names
