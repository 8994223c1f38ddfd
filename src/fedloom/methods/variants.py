"""Variants of a method: its options, and training settings of its run, written behind its name.

    fedcross:alpha=0.9      fedavg:lr=0.03      fedcross:alpha=0.9+fedprox:mu=0.1,run.epochs=5

A key is an option of its method if there is one of that name, otherwise a setting of the run; `run.KEY` is always the
setting. `+` separates methods only in front of a method's name, so `1e+3` and `lenet+projection` are values.
"""

import difflib
import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from fedloom.config import Config, TrainingConfig
from fedloom.errors import InputError, unknown_name_error
from fedloom.methods.registry import methods
from fedloom.utils.settings import format_toml_value, parse_setting_value

VARIANT_SETTINGS = (
    *TrainingConfig.model_fields,
    *("rounds", "clients_per_round", "failure_rate", "model", "init", "new_head"),
    *("clip_update", "noise", "noise_source", "delta", "max_epsilon"),
)
"""Settings that may differ between the runs of a comparison. Data, partition, clients, seeds, evaluation and the
machine may not, because the runs would then have another task."""

RUN = "run."
KEY = re.compile(r"\s*([^\s=,:+]+)\s*=\s*")
_NAME = r"[A-Za-z0-9_-]+"
_VALUE = r"(?:-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|[A-Za-z][\w-]*(?:\+[\w-]+)*)"
_PAIR = rf"(?:run\.)?[A-Za-z_]\w*={_VALUE}"
_PART = rf"{_NAME}(?::{_PAIR}(?:,{_PAIR})*)?"
SIMPLE = re.compile(rf"{_PART}(?:\+{_PART})*", re.ASCII)
"""Variants with numbers and words only. With `.` in place of `:` and `,` they stay different from each other."""
LONGEST = 120


@dataclass(frozen=True)
class MethodVariant:
    """A method, or several joined by `+`, with options and settings of its own."""

    name: str
    """The methods alone: `fedcross+fedprox`."""
    options: Mapping[str, Mapping[str, Any]]
    """Options by method and name."""
    settings: Mapping[str, Any]
    """Settings of the run."""
    label: str
    """The variant in its canonical form: sorted, with the settings behind the last method, and with short values."""

    def merge_options(self, options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return `options` with those of the variant in place of the others."""
        merged = {method: dict(values) for method, values in options.items()}
        for method, values in self.options.items():
            merged[method] = {**merged.get(method, {}), **values}
        return merged

    def merge_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return `settings` with those of the variant in place of the others, and without those that they replace."""
        merged = {**settings, **self.settings}
        replaced = {"steps"} if "epochs" in self.settings else set()
        if "init" in self.settings:
            replaced |= {"init_sha256"} if self.settings["init"] is not None else {"init_sha256", "new_head"}
        return {key: value for key, value in merged.items() if key not in replaced - set(self.settings)}


def parse_method_variant(text: str) -> MethodVariant:
    """Parse a method with options and settings behind its name.

    The values are read like those of `--set`, and `none` is None. They are validated with the config of the run.

    Raises:
        InputError: The form is wrong, a method or a key is unknown, or a key is given twice.
    """
    if ":" not in text:
        return MethodVariant(text, {}, {}, text)
    parts, end = _scan(text, 0)
    if end < len(text):
        _refuse_form(text)
    known = methods()
    options: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {}
    shown: dict[str, str] = {}
    for name, pairs in parts:
        if name not in known:
            raise unknown_name_error("method", name, known)
        fields = known[name].options.model_fields
        for key, value in pairs:
            if key in fields:
                target, field = options.setdefault(name, {}), fields[key]
            else:
                target, key = settings, key.removeprefix(RUN)
                if key not in VARIANT_SETTINGS:
                    _refuse_key(text, name, key, fields)
                field = Config.model_fields[key]
            if key in target:
                raise InputError(f"{text!r}: {key} is given twice.")
            target[key] = _read_value(field, value)
            shown[key if target is settings else f"{name}:{key}"] = _format_value(field, target[key])
    last = parts[-1][0]
    lines = {name: [f"{key}={shown[f'{name}:{key}']}" for key in sorted(options.get(name, ()))] for name, _ in parts}
    clash = {key for name, _ in parts for key in known[name].options.model_fields}
    lines[last] += [f"{RUN if key in clash else ''}{key}={shown[key]}" for key in sorted(settings)]
    label = "+".join(f"{name}:{','.join(lines[name])}" if lines[name] else name for name, _ in parts)
    return MethodVariant("+".join(name for name, _ in parts), options, settings, label)


def split_variant_list(text: str) -> list[str]:
    """Split variants at commas. A comma in front of KEY= belongs to the variant before it."""
    found, at = [], 0
    while True:
        start, at = at, _scan(text, at)[1]
        found.append(text[start:at].strip())
        if at == len(text):
            return found
        at += 1


def variant_folder_name(label: str) -> str:
    """Return a name for the folder of a variant, such as `fedcross.alpha=0.9`; other variants get other names.

    It has letters, digits and `. _ = + -` only. If the values have other characters, it ends in `==` and a hash.
    """
    if SIMPLE.fullmatch(label) and len(label) <= LONGEST:
        return label.replace(":", ".").replace(",", ".")
    start = re.sub(r"[^A-Za-z0-9._=+-]", "_", label.replace(":", ".").replace('"', ""))[:LONGEST]
    return f"{start}=={hashlib.sha256(label.encode()).hexdigest()[:12]}"


Part = tuple[str, list[tuple[str, str]]]
"""The name of a method, and its keys with their values."""


def _scan(text: str, at: int) -> tuple[list[Part], int]:
    """Read one variant from `at`. Return its parts and where it ends: at the end, or at a comma without a key."""
    names = "|".join(map(re.escape, methods()))
    stop = re.compile(rf",|\+(?=(?:{names})(?:[:+,]|$))|$")
    parts: list[Part] = []
    while True:
        name = re.compile(r"[^:+,]*").match(text, at)
        assert name is not None, "an empty name matches everywhere"
        parts.append((name[0].strip(), []))
        at = name.end()
        separators = ":"
        while at < len(text) and text[at] in separators:
            key = KEY.match(text, at + 1)
            if key is None and separators == ",":
                return parts, at
            if key is None:
                _refuse_form(text)
            at = _end_of_value(text, key.end(), stop)
            value = text[key.end() : at].strip()
            if not value:
                _refuse_form(text)
            parts[-1][1].append((key[1], value))
            separators = ","
        if text[at : at + 1] != "+":
            return parts, at
        at += 1


def _end_of_value(text: str, start: int, stop: re.Pattern[str]) -> int:
    """Return where the value ends. A TOML string, list or table may contain what otherwise ends a value."""
    ends = [found.start() for found in stop.finditer(text, start)]
    if text[start : start + 1] in ('"', "'", "[", "{"):
        for end in ends:
            try:
                tomllib.loads(f"value = {text[start:end]}")
            except ValueError:
                continue
            return end
    return ends[0]


def _read_value(field: FieldInfo, text: str) -> Any:
    """Return a value as the field takes it. One that does not fit is returned as read; validation explains it."""
    kind: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    read = parse_setting_value(text)
    for value in (*([None] if text in ("none", "None") else []), read, text):
        try:
            return adapter.validate_python(value)
        except ValidationError:
            continue
    if (tail := re.search(r"\+([A-Za-z][\w-]*)$", text)) and difflib.get_close_matches(tail[1], methods(), cutoff=0.8):
        raise unknown_name_error("method", tail[1], methods())
    return read


def _format_value(field: FieldInfo, value: Any) -> str:
    """Return the shortest text that is read as `value`."""
    short = _short_text(value)
    return short if short is not None and _read_value(field, short) == value else format_toml_value(value)


def _short_text(value: Any) -> str | None:
    """Return a short text for a value, which may be read as another value; None if only TOML will do."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        short = [format_toml_value(each) if isinstance(each, str) else _short_text(each) for each in value]
        return None if None in short else f"[{','.join(map(str, short))}]"
    return value if isinstance(value, str) and _is_bare(value) else None


def _is_bare(text: str) -> bool:
    """Return whether a string needs no quotes: it cannot be taken for the end of its variant."""
    names = "|".join(map(re.escape, methods()))
    return bool(re.fullmatch(r"[^\s,\"'\[\]{}]+", text)) and not re.search(rf"\+(?:{names})(?![\w-])", text)


def _refuse_form(text: str) -> NoReturn:
    raise InputError(
        f"options of a method are written NAME:KEY=VALUE,KEY=VALUE, such as fedprox:mu=0.1,lr=0.05, not {text!r}."
    )


def _refuse_key(text: str, method: str, key: str, options: Iterable[str]) -> NoReturn:
    if key in Config.model_fields and key not in ("method", "options", "variant"):
        raise InputError(
            f"{text!r}: {key} is no setting of a single method, because all runs of a comparison share it; give it as "
            f"--{'import' if key == 'imports' else key.replace('_', '-')}, or {key}=... in Python."
        )
    near = difflib.get_close_matches(key.lower(), [*options, *VARIANT_SETTINGS], n=1, cutoff=0.5)
    if near:
        raise InputError(f"unknown key {key!r} in {text!r}; did you mean {near[0]!r}?")
    own = ", ".join(options) or "none"
    raise InputError(
        f"unknown key {key!r} in {text!r}; options of {method} are: {own}; settings are: {', '.join(VARIANT_SETTINGS)}."
    )
