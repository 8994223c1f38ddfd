"""`fedloom flower new`: a small app for Flower that plays a run of fedloom."""

import shutil
from pathlib import Path
from typing import Any

from fedloom.config import Config, command_of, to_toml
from fedloom.errors import InputError
from fedloom.flower.app import write_settings
from fedloom.storage import write_atomically

SERVER_APP = '''"""The server: fedloom plays the rounds, and Flower reaches the sites."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom.flower.server import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    serve(grid, context, Path(__file__).parent)
'''

CLIENT_APP = '''"""A site: messages go to the site's own process, which has the data and trains."""

from fedloom.flower.door import client_app

app = client_app(__file__)
'''

SITE_DATA = '''"""The sites' own data: the one file to fill in.

As it is, TASK is None, and client N has part N of the data set that pyproject.toml names, for trying out. For data of
the sites' own, say what they have in common in TASK, and let `load` return those of one site. Samples never leave it.

    from fedloom.flower.data import SiteData, Task

    TASK = Task(classes=10, shape=(1, 28, 28), name="xray")

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
    settings = {**(server or {}), **write_settings(config, names)}
    for name, text in (
        ("pyproject.toml", project(config, settings)),
        ("server_app.py", SERVER_APP),
        ("client_app.py", CLIENT_APP),
        ("site_data.py", SITE_DATA),
        ("README.md", readme(folder, config)),
    ):
        write_atomically(folder / name, text.encode())
    for path, name in zip(config.imports, names, strict=True):
        shutil.copyfile(path, folder / name)


def project(config: Config, settings: dict[str, Any]) -> str:
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
    return to_toml(about)


def _exchange(config: Config) -> str:
    """What else a site is started with where clients exchange layers."""
    if not config.options.get("fedmr", {}).get("secure"):
        return ""
    return """ \\
        --roster roster.pub

`roster.pub` is for the exchange of layers: the public keys of all sites. Take it from the other sites' operators, not
from the server's."""


def readme(folder: Path, config: Config) -> str:
    """How to run the app."""
    name, clients = folder.absolute().name, config.clients
    return f"""# {config.method} over Flower

Made from `{command_of(config)}`. Server and sites need `fedloom[flower]` installed, the same version everywhere.
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
