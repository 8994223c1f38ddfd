"""What a person may set, and how mistakes in it are explained."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from fedloom.errors import InputError, unknown_name_error

MAX_COUNT = 1_000_000_000
"""Of anything that is counted: more is a slip of the hand, and would be begun and never come to an end."""
MAX_CONCURRENCY = 1024
"""Of what one machine does at once: each of them takes memory before anything is computed."""


class Settings(BaseModel):
    """Base of everything a person may set: frozen, no unknown names, documented where it is defined."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


S = TypeVar("S", bound=Settings)


def validate_settings(kind: type[S], values: Mapping[str, Any]) -> S:
    """Settings of this kind; what is wrong with the values is said in one sentence."""
    for key in values:
        if key not in kind.model_fields:
            raise unknown_name_error("setting", key, kind.model_fields)
    try:
        return kind(**values)
    except ValidationError as error:
        raise InputError(explain_settings_error(error)) from error


def explain_settings_error(error: ValidationError) -> str:
    """The first of pydantic's complaints as one sentence: what, what was expected, what was given."""
    first = error.errors()[0]
    places = (str(place) for place in first["loc"])
    key = ".".join(place if place.isprintable() else repr(place) for place in places)
    if first["type"] == "value_error" and not key:
        return first["msg"].removeprefix("Value error, ")
    expected = {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(first["type"].split("_")[0])
    if first["type"] == "int_parsing_size":
        expected = "a whole number of ordinary size"
    if expected is None or "_" not in first["type"]:
        expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    given = repr(first["input"])
    return f"{key} must be {expected}, not {given if len(given) <= 160 else f'{given[:157]}...'}."


def settings_to_toml(values: Mapping[str, Any]) -> str:
    """Plain values as TOML, without those that are None (TOML has no such value)."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): clean(item) for key, item in value.items() if item is not None}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        return value

    return tomli_w.dumps(clean(values))


def read_settings_toml(path: Path) -> dict[str, Any]:
    """A TOML file's values."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}.") from error


def flatten_settings(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings by one name each, as Flower hands them to an app."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flatten_settings(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found
