"""Entries of `fedloom list`, read from `catalog.json`.

Importing the registries would load PyTorch, which takes seconds.

After a change to a method, a data set, a network or a partition, write the file again:

    python -m fedloom.cli.catalog

A test compares it with what the package has. With methods that are not built in, `fedloom list methods` loads all of
them and does without the file.
"""

import json
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedloom.cli.output import show_loading
from fedloom.utils.data_folders import ExpectedFiles, describe_data_state, possible_data_folders

CATALOG_FILE = Path(__file__).with_name("catalog.json")
KINDS = ("methods", "datasets", "models", "partitions")


def read_listing(kind: str, imports: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the entries of one of `KINDS`, and for data sets what is on this machine.

    Args:
        kind: What to list.
        imports: Python files with methods of the user. They are executed, and so need PyTorch.

    Returns:
        One dict per entry, of JSON values.

    Raises:
        InputError: A file of `imports` or an installed method cannot be loaded.
    """
    if imports or (kind == "methods" and entry_points(group="fedloom.methods")):
        with show_loading():
            from fedloom.methods import import_file
        for path in imports:
            import_file(path)
        if kind == "methods":
            return _describe_methods()
    entries: list[dict[str, Any]] = json.loads(CATALOG_FILE.read_text(encoding="utf-8"))[kind]
    return [_locate_dataset(**entry) for entry in entries] if kind == "datasets" else entries


def build_catalog() -> dict[str, list[dict[str, Any]]]:
    """Return the content of the file: all that is built in, without what differs between machines."""
    from fedloom.data.partitions import available_partitions
    from fedloom.methods.registry import BUILT_IN

    return {
        "methods": [entry for entry in _describe_methods() if entry["name"] in BUILT_IN],
        "datasets": _describe_datasets(),
        "models": _describe_models(),
        "partitions": [{"name": info.spec, "summary": info.summary} for info in available_partitions()],
    }


def _locate_dataset(
    state: str | None, get: str, folders: list[str], system_folders: list[str], files: dict[str, Any], **entry: Any
) -> dict[str, Any]:
    """Add what is on this machine to the description of a data set."""
    expected = ExpectedFiles(**files)
    places = possible_data_folders(folders, [Path(folder) for folder in system_folders])
    found = None if state else next((folder for folder in places if expected.is_complete(folder)), None)
    return {
        **entry,
        "state": state or describe_data_state(found, get),
        "found": str(found) if found else None,
        "missing": list(expected.missing_parts(found)) if found else [],
        "get": None if found else get or None,
    }


def _describe_methods() -> list[dict[str, Any]]:
    from fedloom.methods import methods

    return [
        {
            "name": method.name,
            "provides": list(method.parts),
            "year": method.year,
            "summary": method.summary,
            "models a round": method.models_sent,
            "client state": method.client_state,
            "server state": method.server_state,
            "extra compute": method.extra_compute,
            "server data": method.server_data or "no",
            "reference": method.reference,
            "options": [
                {"name": name, "default": field.default, "help": field.description}
                for name, field in method.options.model_fields.items()
            ],
        }
        for method in methods().values()
    ]


def _describe_datasets() -> list[dict[str, Any]]:
    from fedloom.data.registry import available_datasets
    from fedloom.data.sources import DATASET_SOURCES

    entries = []
    for info in available_datasets():
        source = DATASET_SOURCES.get(info.name)
        expected = source.expected_files if source else ExpectedFiles({})
        entries.append(
            {
                "name": info.name,
                "summary": info.summary,
                "classes": info.classes,
                "shape": list(info.shape),
                "training": info.num_train_examples,
                "test": info.num_test_examples,
                "state": None if source else info.state,  # of published data sets it differs between machines
                "get": source.manual_steps if source else "",
                "folders": list(source.folder_names) if source else [],
                "system_folders": [folder.as_posix() for folder in source.system_folders] if source else [],
                "files": {"parts": expected.parts, "enough_parts": expected.enough_parts},
            }
        )
    return entries


def _describe_models() -> list[dict[str, Any]]:
    from fedloom.models import available_models

    return [
        {
            "name": info.name,
            "summary": info.summary,
            "parameters, 1 x 28 x 28": info.parameters_1x28x28,
            "parameters, 3 x 32 x 32": info.parameters_3x32x32,
            "parameters, text": info.parameters_text,
            "options": [
                {"name": option.name, "default": option.default, "help": option.help} for option in info.options
            ],
        }
        for info in available_models()
    ]


if __name__ == "__main__":
    CATALOG_FILE.write_text(json.dumps(build_catalog(), indent=1) + "\n", encoding="utf-8")
