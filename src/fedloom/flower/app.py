"""The app that Flower carries to server and sites: its settings, and what the sites' own file says.

An app is a folder with `pyproject.toml`, `server_app.py`, `client_app.py` and `site_data.py`. The settings of the run
are Flower's run config, `[tool.flwr.app.config]`: the fields of `Config` by name, options of methods as
`options.METHOD.OPTION`, and what only the server needs (`ServerSettings`).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import Field

from fedloom.config import Config, make_config
from fedloom.errors import FedloomError, InputError
from fedloom.flower.data import SiteData, Task
from fedloom.own_files import run_file
from fedloom.settings import Settings, validated

SERVERS_DEVICE = "cpu"
"""What the server of sites computes on, unless it is told otherwise, also where there is a GPU."""
SITE_DATA = "site_data.py"


class ServerSettings(Settings):
    """What the server's side of an app is told beside the run itself."""

    folder: str = ""
    """the folder of the run on the server; a run that is there already goes on"""
    join: float = Field(600.0, gt=0)
    """seconds to wait for all sites before the first round; it then begins with those that are there"""
    bridge: str = ""
    """the socket of a server process that does the work, as `fedloom run --engine flower` has one"""


def read_settings(given: Mapping[str, Any], folder: Path) -> tuple[Config, ServerSettings]:
    """The run and the server's settings from Flower's run config; files are named relative to the app's `folder`."""
    values: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        first, _, rest = key.partition(".")
        if first == "options":
            method, _, option = rest.partition(".")
            options.setdefault(method, {})[option] = value
        else:
            values[key] = value
    own = {name: values.pop(name) for name in list(values) if name in ServerSettings.model_fields}
    imports = [name for name in str(values.pop("imports", "")).split(",") if name]
    values |= {"imports": [str(folder / name) for name in imports], "options": options}
    return make_config({"device": SERVERS_DEVICE, **values}), validated(ServerSettings, own)


def write_settings(config: Config, imports: list[str]) -> dict[str, Any]:
    """A run as Flower's run config, which `read_settings` reads; defaults are left out, except the usual questions."""
    asked = (
        "method",
        "data",
        "partition",
        "clients",
        "per_round",
        "model",
        "rounds",
        "seed",
        "lr",
        "epochs",
        "deadline",
    )
    values: dict[str, Any] = {}
    for name, field in Config.model_fields.items():
        value = getattr(config, name)
        if name in ("options", "imports", "engine", "nodes") or value is None:
            continue
        if name in asked or value != (SERVERS_DEVICE if name == "device" else field.default):
            values[name] = value
    if imports:
        values["imports"] = ",".join(imports)
    options = {
        method: {option: value for option, value in pairs.items() if value is not None}
        for method, pairs in config.options.items()
    }
    for method, pairs in options.items():
        for option, value in pairs.items():
            if not isinstance(value, bool | int | float | str):
                raise InputError(f"{method}.{option} is {value!r}; Flower carries numbers, texts, true and false.")
    return values | ({"options": {method: pairs for method, pairs in options.items() if pairs}} if options else {})


def load_site_data(folder: Path) -> ModuleType | None:
    """The sites' own file, run; None where the app has none."""
    path = folder / SITE_DATA
    if not path.is_file():
        return None
    return run_file(path, f"fedloom_site_data_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}")


def task_of(module: ModuleType | None) -> Task | None:
    """What the sites' file says of data that the server never sees; None: the data set that the settings name."""
    task = getattr(module, "TASK", None)
    if task is not None and not isinstance(task, Task):
        raise InputError(f"TASK in {SITE_DATA} must be a fedloom.flower.data.Task or None, not {task!r}.")
    return task


def brought_by(module: ModuleType | None, node: Mapping[str, Any], client: int) -> SiteData:
    """What a site's file loads."""
    load = getattr(module, "load", None)
    if not callable(load):
        raise InputError(f"{SITE_DATA} must have a function `load(node, client)`.")
    try:
        brought = load(dict(node), client)
    except FedloomError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"load in {SITE_DATA} failed: {type(error).__name__}: {error}.") from error
    if isinstance(brought, tuple) and len(brought) == 2:
        brought = SiteData(brought)
    if not isinstance(brought, SiteData):
        raise InputError(f"load in {SITE_DATA} must return (x, y) or a SiteData, not {type(brought).__name__}.")
    return brought


def with_task(config: Config, task: Task | None) -> Config:
    """The run with data of the sites' own, where there are such: nothing is read or divided by name."""
    if task is None:
        return config
    own = {"data": task.name, "partition": "own", "partition_sha256": None, "classes": None, "normalize": "default"}
    return make_config({**config.model_dump(), **own})
