"""What a person may set, and how mistakes in it are explained."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedloom.errors import InputError, unknown

MOST = 1_000_000_000
"""Of anything that is counted: more is a slip of the hand, and would be begun and never come to an end."""
MOST_AT_ONCE = 1024
"""Of what one machine does at once: each of them takes memory before anything is computed."""


class Settings(BaseModel):
    """Base of everything a person may set: frozen, no unknown names, documented where it is defined."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


class Plan(Protocol):
    """What a display must know of a piece of work."""

    @property
    def method(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def rounds(self) -> int: ...
    @property
    def device(self) -> str: ...


def found_device(name: str, engine: str = "auto") -> str:
    """The device called `name`; for `auto` a GPU, where there is one and the engine may use it, or else the CPU."""
    if name != "auto":
        return name
    if engine == "auto":
        import torch  # not before it is needed: it takes seconds

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cuda" if engine == "cuda" else "cpu"


S = TypeVar("S", bound=Settings)


def validated(kind: type[S], values: Mapping[str, Any]) -> S:
    """Settings of this kind; what is wrong with the values is said in one sentence."""
    for key in values:
        if key not in kind.model_fields:
            raise unknown("setting", key, kind.model_fields)
    try:
        return kind(**values)
    except ValidationError as error:
        raise InputError(explain(error)) from error


def explain(error: ValidationError) -> str:
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
