"""The app that Flower carries to server and sites: its settings, and what the sites' own file says.

An app is a folder with `pyproject.toml`, `server_app.py`, `client_app.py` and `site_data.py`. The settings of the run
are Flower's run config, `[tool.flwr.app.config]`: the fields of `Config` by name, options of methods as
`options.METHOD.OPTION`, and what only the server needs (`ServerSettings`).

`fedloom flower new`: a small app for Flower that plays a run of fedloom.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from fedloom.config import Config, config_to_command, make_config, replace_config
from fedloom.errors import InputError
from fedloom.flower.site_data import SiteDataSpec, make_empty_site_dataset
from fedloom.runs.resolve import UserObjects, add_server_data, record_partition_hash, resolve_method
from fedloom.utils.settings import Settings, settings_to_toml, validate_settings
from fedloom.utils.storage import write_atomically

SERVERS_DEVICE = "cpu"
"""What the server of sites computes on, unless it is told otherwise, also where there is a GPU."""


class ServerAppSettings(Settings):
    """What the server's side of an app is told beside the run itself."""

    folder: str = ""
    """the folder of the run on the server; a run that is there already goes on"""
    join: float = Field(600.0, gt=0)
    """seconds to wait for all sites before the first round; it then begins with those that are there"""
    bridge: str = ""
    """the socket of a server process that does the work, as `fedloom run --engine flower` has one"""


def read_app_run_config(given: Mapping[str, Any], folder: Path) -> tuple[Config, ServerAppSettings]:
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
    own = {name: values.pop(name) for name in list(values) if name in ServerAppSettings.model_fields}
    imports = [name for name in str(values.pop("imports", "")).split(",") if name]
    values |= {"imports": [str(folder / name) for name in imports], "options": options}
    return make_config({"device": SERVERS_DEVICE, **values}), validate_settings(ServerAppSettings, own)


def make_app_run_config(config: Config, imports: list[str]) -> dict[str, Any]:
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


def with_site_data_spec(config: Config, task: SiteDataSpec | None) -> Config:
    """The run with data of the sites' own, where there are such: nothing is read or divided by name."""
    if task is None:
        return config
    own = {"data": task.name, "partition": "own", "partition_sha256": None, "classes": None, "normalize": "default"}
    return make_config({**config.model_dump(), **own})


SERVER_APP = '''"""The server: fedloom plays the rounds, and Flower reaches the sites."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom.flower.server.serve import serve_app

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    serve_app(grid, context, Path(__file__).parent)
'''

CLIENT_APP = '''"""A site: messages go to the site's own process, which has the data and trains."""

from fedloom.flower.site.client_app import client_app

app = client_app(__file__)
'''

SITE_DATA_TEMPLATE = '''"""The sites' own data: the one file to fill in.

As it is, TASK is None, and client N has part N of the data set that pyproject.toml names, for trying out. For data of
the sites' own, say what they have in common in TASK, and let `load` return those of one site. Samples never leave it.

    from fedloom.flower.site_data import SiteData, SiteDataSpec

    TASK = SiteDataSpec(classes=10, shape=(1, 28, 28), name="xray")

    def load(node, client):
        file = np.load(node["data"])            # fedloom flower supernode ... --data /path/at/this/site.npz
        return SiteData(train=(file["x"], file["y"]), test=(file["test_x"], file["test_y"]))

x: uint8 n x height x width x channels are images, other whole numbers are tokens, the rest is taken as float32.
y: whole numbers from 0 are classes. `node` is the configuration of the site's SuperNode; `client` is its number.
"""

TASK = None


def load(node, client):
    """The samples of one site: (x, y), or a SiteData with test samples too."""
    raise NotImplementedError("TASK is None, so nothing is loaded here")
'''


def write_app(folder: Path, config: Config, server: dict[str, Any] | None = None) -> None:
    """Write an app into `folder`, which must be new or empty; `server` are settings of `ServerSettings`."""
    if config.clients is None:
        raise InputError("a run over sites must say how many clients there are; give --clients.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"{folder} is not empty; choose another folder for the app.")
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror or error}.") from error
    names = [Path(path).name for path in config.imports]
    if len(set(names)) < len(names) or {"server_app.py", "client_app.py", "site_data.py"} & set(names):
        raise InputError(f"files to import must have names of their own in the app, not {', '.join(names)}.")
    settings = {**(server or {}), **make_app_run_config(config, names)}
    for name, text in (
        ("pyproject.toml", _app_pyproject(config, settings)),
        ("server_app.py", SERVER_APP),
        ("client_app.py", CLIENT_APP),
        ("site_data.py", SITE_DATA_TEMPLATE),
        ("README.md", _app_readme(folder, config)),
    ):
        write_atomically(folder / name, text.encode())
    for path, name in zip(config.imports, names, strict=True):
        shutil.copyfile(path, folder / name)


def _app_pyproject(config: Config, settings: dict[str, Any]) -> str:
    """pyproject.toml: what Flower must know, and the run."""
    name = "".join(letter if letter.isalnum() else "-" for letter in f"fedloom-{config.method}").lower()
    about = {
        "project": {
            "name": name,
            "version": "1.0.0",
            "description": f"fedloom: {config.method}",
            "license": "Apache-2.0",
            # fedloom itself must be installed at server and sites; what is listed here Flower would try to fetch.
            "dependencies": ["flwr"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "fedloom",
                    "components": {"serverapp": "server_app:app", "clientapp": "client_app:app"},
                    "config": settings,
                }
            }
        },
    }
    return settings_to_toml(about)


def _exchange(config: Config) -> str:
    """What else a site is started with where clients exchange layers."""
    if not config.options.get("fedmr", {}).get("secure"):
        return ""
    return """ \\
        --roster roster.pub

`roster.pub` is for the exchange of layers: the public keys of all sites. Take it from the other sites' operators, not
from the server's."""


def _app_readme(folder: Path, config: Config) -> str:
    """How to run the app."""
    name, clients = folder.absolute().name, config.clients
    return f"""# {config.method} over Flower

Made from `{config_to_command(config)}`. Server and sites need `fedloom[flower]` installed, the same version everywhere.
`pyproject.toml` has the run's settings in `[tool.flwr.app.config]`. `site_data.py` is where sites bring their own data;
as it is, client N has part N of the data set that the settings name.

## On this machine alone

Flower's simulation, with this in `~/.flwr/config.toml`:

    [superlink.sim]
    address = ":local:"

    flwr run {name} sim --stream --federation-config "num-supernodes={clients} client-resources-num-cpus=1"

## Real sites

Keys and certificates, here all made at one place, for trying out:

    fedloom flower certificates certificates --nodes {clients} --host SERVER

At the server, with this in its `~/.flwr/config.toml`:

    [superlink.deployment]
    address = "127.0.0.1:9093"
    root-certificates = "/path/to/certificates/ca.crt"

    fedloom flower superlink --certificates certificates --host 0.0.0.0 --database superlink.db
    flwr supernode register certificates/nodes/site-0.pub deployment             # once for each site

At each site:

    fedloom flower supernode SERVER:8000 --ca ca.crt --key site-0 --client 0 --folder ~/fedloom-site{_exchange(config)}

The server chooses the settings of a run. An operator of a site who wants to know them beforehand reads what

    fedloom flower agreement {name} --out agreed.json

writes, and starts the site with `--agreed agreed.json`: it then serves these settings and no others. The file is made
anew after every change of `pyproject.toml` or `site_data.py`.

And at the server:

    flwr run {name} deployment --stream

A ServerApp that was killed goes on from its last checkpoint when the app is run again with the same `folder`.
"""


def resolve_app_config(
    given: Mapping[str, Any], app: Path, task: SiteDataSpec | None, node: Mapping[str, Any] | None = None
) -> Config:
    """The run that Flower's run config tells, with nothing left open. No data are read for it.

    `node` is the configuration of a site's node, where this is one: a file to begin with may lie elsewhere there.
    """
    config = with_site_data_spec(read_app_run_config(given, app)[0], task)
    if config.clients is None:
        raise InputError("a run over sites must say how many clients there are; give --clients.")
    if config.init is not None and node is not None and "init" in node:
        config = replace_config(config, init=str(node["init"]))
    if config.partition_sha256 is None:  # else it is looked at when it is used, and may not be here
        config = record_partition_hash(config)
    return add_app_server_data(config, task)


def add_app_server_data(config: Config, task: SiteDataSpec | None) -> Config:
    """The config with data for the server where the method needs some: the task's own, if it has any."""
    return add_server_data(
        config,
        UserObjects() if task is None else UserObjects(data=make_empty_site_dataset(task)),
        [resolve_method(config)],
    )
