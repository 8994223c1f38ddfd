"""What a person may set, and how mistakes in it are explained."""

from pydantic import BaseModel, ConfigDict, ValidationError


class Settings(BaseModel):
    """Base of everything a person may set: frozen, no unknown names, documented where it is defined."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )


def explain(error: ValidationError) -> str:
    """The first of pydantic's complaints as one sentence: what, what was expected, what was given."""
    first = error.errors()[0]
    key = ".".join(str(place) for place in first["loc"])
    if first["type"] == "value_error" and not key:
        return first["msg"].removeprefix("Value error, ")
    expected = {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(first["type"].split("_")[0])
    if expected is None or "_" not in first["type"]:
        expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{key} must be {expected}, not {first['input']!r}."
