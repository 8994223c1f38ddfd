"""Settings and files of a Flower app, as `fedloom flower new` writes it.

An app is a folder with `pyproject.toml`, `server_app.py`, `client_app.py` and `site_data.py`. The settings of the run
are Flower's run config, `[tool.flwr.app.config]`: the fields of `Config` by name, options of methods as
`options.METHOD.OPTION`, and the server's own settings (`ServerAppSettings`).
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from fedloom.config import Config, config_to_command, make_config, replace_config
from fedloom.errors import InputError
from fedloom.flower.site_data import SiteDataSpec, make_empty_site_dataset
from fedloom.methods.composition import ComposedMethod
from fedloom.runs.resolve import (
    UserObjects,
    record_partition_hash,
    resolve_config,
    resolve_method,
    resolve_server_data,
)
from fedloom.utils.settings import Settings, settings_to_toml, validate_settings
from fedloom.utils.storage import write_atomically

SERVERS_DEVICE = "cpu"
"""Default device of the server, also on a machine with a GPU."""


class ServerAppSettings(Settings):
    """Settings of the server that are not settings of the run."""

    folder: str = ""
    """the run directory on the server; an existing run is resumed"""
    join: float = Field(600.0, gt=0)
    """seconds to wait for all sites before the first round, which then starts with the connected ones"""
    bridge: str = ""
    """socket of the process that runs the rounds, set by `fedloom run --engine flower`"""


def read_app_run_config(run_config: Mapping[str, Any], app_folder: Path) -> tuple[Config, ServerAppSettings]:
    """Return the config and the server's settings from Flower's run config; imports are relative to `app_folder`."""
    values: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in run_config.items():
        first, _, rest = key.partition(".")
        if first == "options":
            method, _, option = rest.partition(".")
            options.setdefault(method, {})[option] = value
        else:
            values[key] = value
    server_settings = {name: values.pop(name) for name in list(values) if name in ServerAppSettings.model_fields}
    imports = [name for name in str(values.pop("imports", "")).split(",") if name]
    values |= {"imports": [str(app_folder / name) for name in imports], "options": options}
    return resolve_config({"device": SERVERS_DEVICE, **values}), validate_settings(ServerAppSettings, server_settings)


def make_app_run_config(config: Config, imports: list[str]) -> dict[str, Any]:
    """Return a run as Flower's run config; of the settings with default values it has only those in `asked`."""
    asked = (
        "method",
        "data",
        "partition",
        "clients",
        "clients_per_round",
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
        if name in ("options", "variant", "imports", "engine", "nodes") or value is None:
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
                raise InputError(
                    f"{method}.{option} is {value!r}; Flower's run config takes only numbers, strings, true and false."
                )
    return values | ({"options": {method: pairs for method, pairs in options.items() if pairs}} if options else {})


def set_app_site_data(config: Config, spec: SiteDataSpec | None) -> Config:
    """Return the config for the sites' own data if there is a `spec`: no data set is loaded or partitioned by name."""
    if spec is None:
        return config
    overrides = {
        "data": spec.name,
        "partition": "own",
        "partition_sha256": None,
        "classes": None,
        "normalize": "default",
    }
    return make_config({**config.model_dump(), **overrides})


SERVER_APP = '''"""The ServerApp: fedloom runs the rounds, and Flower connects it to the sites."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom.flower.server.serve import serve_app

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    serve_app(grid, context, Path(__file__).parent)
'''

CLIENT_APP = '''"""The ClientApp: it forwards messages to the site's own process, which has the data and trains."""

from fedloom.flower.site.client_app import client_app

app = client_app(__file__)
'''

SITE_DATA_TEMPLATE = '''"""The sites' own data. This is the only file of the app to edit.

As written, TASK is None, and client N has part N of the data set in pyproject.toml, which is for tests. For the sites'
own data, describe in TASK what all sites have in common, and let `load` return the samples of one site. They never
leave the site.

    from fedloom.flower.site_data import SiteData, SiteDataSpec

    TASK = SiteDataSpec(classes=10, shape=(1, 28, 28), name="xray")

    def load(node, client):
        file = np.load(node["data"])            # fedloom flower supernode ... --data /path/at/this/site.npz
        return SiteData(train=(file["x"], file["y"]), test=(file["test_x"], file["test_y"]))

x: uint8 of shape n x height x width x channels are images, other integers are tokens, everything else becomes float32.
y: integers from 0 are classes. `node` is the configuration of the site's SuperNode, `client` the number of the client.
"""

TASK = None


def load(node, client):
    """Return the samples of one site: (x, y), or a SiteData that also has test samples."""
    raise NotImplementedError("TASK is None, so nothing is loaded here")
'''


def write_app(folder: Path, config: Config, server_settings: dict[str, Any] | None = None) -> None:
    """Write an app to `folder`, which must be new or empty; `server_settings` are fields of `ServerAppSettings`."""
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
        raise InputError(
            f"imported files need different names, which no other file of the app has, not {', '.join(names)}."
        )
    settings = {**(server_settings or {}), **make_app_run_config(config, names)}
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
    """Return pyproject.toml, with the settings of the run."""
    name = "".join(letter if letter.isalnum() else "-" for letter in f"fedloom-{config.method}").lower()
    about = {
        "project": {
            "name": name,
            "version": "1.0.0",
            "description": f"fedloom: {config.method}",
            "license": "Apache-2.0",
            # Server and sites must have fedloom installed already: Flower would try to fetch what is listed here.
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
    """Return the README's part on the roster, if clients exchange layers."""
    if not config.options.get("fedmr", {}).get("secure"):
        return ""
    return """ \\
        --roster roster.pub

`roster.pub` has the public keys of all sites, for the exchange of layers. Get it from the operators of the other sites,
not from the operator of the server."""


def _app_readme(folder: Path, config: Config) -> str:
    """Return README.md, which says how to run the app."""
    name, clients = folder.absolute().name, config.clients
    return f"""# {config.method} over Flower

This app runs `{config_to_command(config)}`. Install `fedloom[flower]` on the server and at all
sites, the same version everywhere. `pyproject.toml` has the settings of the run in `[tool.flwr.app.config]`.
`site_data.py` loads the data of a site. As written, client N has part N of the data set in the settings.

## On one machine

Run Flower's simulation, with this in `~/.flwr/config.toml`:

    [superlink.sim]
    address = ":local:"

    flwr run {name} sim --stream --federation-config "num-supernodes={clients} client-resources-num-cpus=1"

## Real sites

Create keys and certificates, here for a test, all in one place:

    fedloom flower certificates certificates --nodes {clients} --host SERVER

On the server, with this in its `~/.flwr/config.toml`:

    [superlink.deployment]
    address = "127.0.0.1:9093"
    root-certificates = "/path/to/certificates/ca.crt"

    fedloom flower superlink --certificates certificates --host 0.0.0.0 --database superlink.db
    flwr supernode register certificates/nodes/site-0.pub deployment             # once for each site

At each site:

    fedloom flower supernode SERVER:8000 --ca ca.crt --key site-0 --client 0 --folder ~/fedloom-site{_exchange(config)}

The server chooses the settings of a run. The operator of a site can read them first:

    fedloom flower agreement {name} --out agreed.json

A site that is started with `--agreed agreed.json` accepts these settings and no others. Write the file again after
every change of `pyproject.toml` or `site_data.py`.

Then, on the server:

    flwr run {name} deployment --stream

A ServerApp that was killed resumes from its last checkpoint when the app is run again with the same `folder`.
"""


def resolve_app_config(
    run_config: Mapping[str, Any],
    app_folder: Path,
    spec: SiteDataSpec | None,
    node_config: Mapping[str, Any] | None = None,
) -> Config:
    """Return the complete config that Flower's run config describes. No data are read for it.

    `node_config` is given at a site. Its `init` replaces the path of the initial weights, which may differ there.
    """
    config = set_app_site_data(read_app_run_config(run_config, app_folder)[0], spec)
    if config.clients is None:
        raise InputError("a run over sites must say how many clients there are; give --clients.")
    if config.init is not None and node_config is not None and "init" in node_config:
        config = replace_config(config, init=str(node_config["init"]))
    if config.partition_sha256 is None:  # else it is checked when used, and the file may not be here
        config = record_partition_hash(config)
    return add_app_server_data(config, resolve_method(config), spec)


def add_app_server_data(config: Config, composed_method: ComposedMethod, spec: SiteDataSpec | None) -> Config:
    """Add server data to the config if the method needs it: those of the `spec`, if it has any."""
    user_objects = UserObjects() if spec is None else UserObjects(data=make_empty_site_dataset(spec))
    return resolve_server_data(config, user_objects, composed_method)
