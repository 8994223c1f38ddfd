"""The base of all settings, with TOML files and messages about invalid values."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from fedloom.errors import InputError, unknown_name_error

MAX_COUNT = 1_000_000_000
"""Upper limit of every count. A larger value is a typing error, and the run would never end."""
MAX_CONCURRENCY = 1024
"""Upper limit of what one machine does at once: each worker or slot takes memory before it computes."""


class Settings(BaseModel):
    """Base of all settings: frozen, without unknown names, with help texts in docstrings below the fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


S = TypeVar("S", bound=Settings)


def validate_settings(settings_class: type[S], values: Mapping[str, Any]) -> S:
    """Create settings from `values`, or raise an InputError of one sentence about the first mistake."""
    for key in values:
        if key not in settings_class.model_fields:
            raise unknown_name_error("setting", key, settings_class.model_fields)
    try:
        return settings_class(**values)
    except ValidationError as error:
        raise InputError(explain_settings_error(error)) from error


def explain_settings_error(error: ValidationError) -> str:
    """Return pydantic's first error as one sentence: the setting, what was expected, what was given."""
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
    """Return plain values as TOML, without those that are None, which TOML does not have."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): clean(item) for key, item in value.items() if item is not None}
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        return value

    return tomli_w.dumps(clean(values))


def parse_setting_value(text: str) -> Any:
    """Return the value that `text` has in TOML. Text that is no TOML value is a string."""
    try:
        values = tomllib.loads(f"value = {text}")
    except ValueError:  # an integer of thousands of digits is one too
        return text.strip()
    return values["value"] if values.keys() == {"value"} else text.strip()


def format_toml_value(value: Any) -> str:
    """Return a value as TOML on one line."""
    if isinstance(value, list):  # the TOML writer would use one line per element
        return f"[{', '.join(map(format_toml_value, value))}]"
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {format_toml_value(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    return settings_to_toml({"value": value}).removeprefix("value = ").rstrip("\n")


def read_settings_toml(path: Path) -> dict[str, Any]:
    """Read the values of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}.") from error


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names, as Flower passes them to an app."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flatten_settings(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
