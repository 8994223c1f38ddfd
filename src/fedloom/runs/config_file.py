"""Read the settings of a new run from a TOML file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.config import make_config
from fedloom.errors import InputError
from fedloom.methods import compose, import_method_file
from fedloom.methods.variants import parse_method_variant
from fedloom.runs.directory import select_run_settings
from fedloom.utils.settings import read_settings_toml


def _read_config_file(path: Path | str) -> dict[str, Any]:
    """Return the settings in a TOML file. Raise an InputError for unknown keys and invalid values.

    A key is a field of `Config`; options of methods are tables such as `[options.fedprox]`. What else a run writes into
    its config.toml is ignored. `variant` is too: its options and settings are in the other keys.
    """
    path = Path(path)
    found = read_settings_toml(path)
    values = select_run_settings(found) if "format" in found else found
    values.pop("variant", None)
    try:
        make_config(values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if objects := [name for name in found.get("python_objects", ()) if name in ("data", "model")]:
        followed = {*objects, *(("partition", "clients") if "data" in objects else ())}
        values = {key: value for key, value in values.items() if key not in followed}
        values["python_objects"] = objects
    return values


def merge_config_file(path: Path | str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a TOML file, replaced by those that are given.

    Options are merged one by one. With another method, options of methods that take no part in it are left out.
    """
    values = _read_config_file(path)
    given = {key: value for key, value in given.items() if value is not None}
    missing = [name for name in values.pop("python_objects", ()) if name not in given]
    if missing:
        raise InputError(
            f"{path} is of a run with {' and '.join(missing)} as Python objects; pass them to fedloom.run(config=..., "
            f"{', '.join(f'{name}=...' for name in missing)})."
        )
    options = {method: dict(table) for method, table in values.pop("options", {}).items()}
    if "method" in given:
        for file in [*values.get("imports", ()), *given.get("imports", ())]:
            import_method_file(file)
        parts = compose(parse_method_variant(given["method"]).name).resolved_options()
        options = {method: table for method, table in options.items() if method in parts}
    for method, table in given.get("options", {}).items():
        options[method] = {**options.get(method, {}), **table}
    return {**values, **given, "options": options}
