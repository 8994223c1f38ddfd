"""Entries of `fedloom list`, read from `catalog.json`.

Importing the registries would load PyTorch, which takes seconds.

After a change to a method, a data set, a network or a partition, write the file again:

    python -m fedloom.cli.catalog

A test compares it with what the package has. `fedloom list methods` adds methods that are not built in. What a method
sends and keeps is counted on a small network.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.cli.output import show_loading
from fedloom.utils.data_folders import ExpectedFiles, describe_data_state, possible_data_folders

if TYPE_CHECKING:
    from fedloom.methods import Method

CATALOG_FILE = Path(__file__).with_name("catalog.json")
KINDS = ("methods", "datasets", "models", "partitions")


def read_catalog_entries(kind: str, imports: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the entries of one of `KINDS`, and for data sets what is on this machine.

    Args:
        kind: What to list.
        imports: Python files with methods of the user. They are executed, and so need PyTorch.

    Returns:
        One dict per entry, of JSON values.

    Raises:
        InputError: A file of `imports` or an installed method cannot be loaded.
    """
    entries: list[dict[str, Any]] = json.loads(CATALOG_FILE.read_text(encoding="utf-8"))[kind]
    if imports or (kind == "methods" and entry_points(group="fedloom.methods")):
        with show_loading():
            from fedloom.methods import import_method_file
        for path in imports:
            import_method_file(path)
        if kind == "methods":
            entries = sorted([*entries, *_describe_own_methods()], key=itemgetter("name"))
    return [_locate_dataset(**entry) for entry in entries] if kind == "datasets" else entries


def _describe_own_methods() -> list[dict[str, Any]]:
    from fedloom.methods import methods
    from fedloom.methods.registry import BUILT_IN

    return [_describe_method(method) for name, method in methods().items() if name not in BUILT_IN]


def build_catalog() -> dict[str, list[dict[str, Any]]]:
    """Return the content of the file: all that is built in, without what differs between machines."""
    from fedloom.data.partitions import available_partitions
    from fedloom.methods import methods
    from fedloom.methods.registry import BUILT_IN

    return {
        "methods": [_describe_method(methods()[name]) for name in sorted(BUILT_IN)],
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


def _describe_method(method: "Method") -> dict[str, Any]:
    costs = _count_costs(method.name)
    return {
        "name": method.name,
        "provides": list(method.parts),
        "year": method.year,
        "summary": method.summary,
        "models a round": method.models_sent or costs["models a round"],
        "client state": costs["client state"],
        "server state": method.server_state or costs["server state"],
        "extra compute": method.extra_compute,
        "server data": method.server_data or "no",
        "reference": method.reference,
        "options": [
            {"name": name, "default": field.default, "help": field.description}
            for name, field in method.options.model_fields.items()
        ],
    }


def _count_costs(name: str) -> dict[str, str]:
    """Count in models what a method sends and keeps. No client trains; "?" stands for a method that cannot start."""
    from fedloom.testing.fixtures import build_small_run

    kept: list[float] = []
    try:
        for clients_per_round in (2, 4):
            with build_small_run(name, {}, clients_per_round=clients_per_round).engine_closed() as built_run:
                parts, layout = built_run.rounds.parts, built_run.layout
                kept.append(sum(_count_numbers(part.state_dict()) for _, part in parts.items()) / layout.size)
                tasks = list(parts.server.dispatch(0, parts.server.sample_clients(0)))
                personal = sum(columns.stop - columns.start for columns in parts.client.personal_columns(layout))
                uploads = sum(prod(shape) for shape in parts.client.upload_shapes(layout).values())
                extras = [dict(task.extras) for task in tasks]
                if parts.extras is not None:
                    extras = [{**extra, **parts.extras.send_to_client(0, 0)} for extra in extras]
                sent = sum(2 * (layout.size - personal) + uploads + _count_numbers(extra) for extra in extras)
                state = sum(prod(shape) for shape in parts.client.state_shapes(layout).values()) / layout.size
    except Exception:
        return dict.fromkeys(("models a round", "client state", "server state"), "?")
    per_client = (kept[1] - kept[0]) / 2
    return {
        "models a round": f"{_whole(sent / layout.size / len(tasks))}K",
        "client state": "own layers" if 0 < personal < layout.size else _models(state + personal / layout.size),
        "server state": _models(kept[1] - 4 * per_client, per_client),
    }


def _count_numbers(state: Any) -> int:
    """Return how many numbers the tensors of a state have."""
    if isinstance(state, Mapping):
        return sum(_count_numbers(value) for value in state.values())
    if isinstance(state, list):
        return sum(_count_numbers(value) for value in state)
    count = getattr(state, "numel", None)
    return int(count()) if count else 0


def _whole(number: float) -> str:
    """Return a whole number without decimals; a vector of weights counts as a model."""
    return str(round(number)) if abs(number - round(number)) < 0.1 else f"{number:.1f}"


def _models(count: float, per_client: float = 0.0) -> str:
    """Return so many models, and so many for each of the K clients, as text."""
    if not count and not per_client:
        return "nothing"
    each = {"0": "", "1": "K"}.get(_whole(per_client), f"{_whole(per_client)}K")
    if not each:
        return "1 model" if _whole(count) == "1" else f"{_whole(count)} models"
    return f"{each} models" if _whole(count) == "0" else f"{each}+{_whole(count)} models"


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
