"""`fedloom flower`: runs over real sites, with Flower between them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli_options import settable
from fedloom.config import make_config, parse_settings
from fedloom.errors import InputError
from fedloom.flower import commands
from fedloom.flower.agreement_command import agreement
from fedloom.flower.certificates_command import certificates
from fedloom.flower.flwr_patches import require_flower

flower = typer.Typer(
    name="flower",
    help=r"Run over real sites, which Flower connects (install fedloom\[flower]).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Certificates = Annotated[
    Path | None,
    typer.Option(help="the folder with ca.crt, server.pem and server.key; without it only on this machine itself"),
]


@flower.command()
@settable()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of the app, new or empty")],
    method: Annotated[str, typer.Argument(help="the method, or several joined by +")],
    run_folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="the run's folder at the server; by default DIR-run")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="METHOD.OPTION=VALUE", help="an option of a method; may be repeated"),
    ] = None,
    import_: Annotated[
        list[str] | None, typer.Option("--import", metavar="FILE", help="a Python file with methods of your own")
    ] = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Write a Flower app for a run; the options are those of `fedloom run`.

    With --partition own the sites bring data of their own, and no data set is read by name.
    """
    from fedloom.experiment import build
    from fedloom.flower.writing import write_app
    from fedloom.initial import checksum
    from fedloom.request import check, pin_partition, replace_config

    options = parse_settings(set_ or ())
    imports = {"imports": import_} if import_ else {}
    config = make_config({**settings, **imports, "method": method, "options": options, "engine": "flower"})
    check(config)
    config = pin_partition(config)
    if config.init is not None:  # sites must start from the very same file
        config = replace_config(config, init_sha256=checksum(Path(config.init)))
    if config.partition != "own":
        build(replace_config(config, engine="plain")).engine.close()  # what is wrong with the run is said now
    place = run_folder or folder.with_name(f"{folder.absolute().name}-run")
    write_app(folder, config, {"folder": str(place.absolute())})
    print(f"{folder} is an app for Flower; {folder / 'README.md'} says how to run it.")


@flower.command()
def superlink(
    certificates: Certificates = None,
    host: Annotated[str, typer.Option(help="the address at which SuperNodes connect")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="the port at which SuperNodes connect")] = 8000,
    control_port: Annotated[
        int, typer.Option(min=1, max=65535, help="the port for `flwr` commands, on this machine alone")
    ] = commands.CONTROL_PORT,
    database: Annotated[Path | None, typer.Option(help="a file for its state, so that a restart remembers it")] = None,
) -> None:
    """Start Flower's SuperLink, with TLS and only for nodes whose keys are registered.

    `flwr` commands reach it on this machine alone: Flower lets whoever reaches its Control API run code at every site.
    """
    require_flower()
    words = commands.superlink(certificates, host, port, control_port, database)
    commands.be(words, commands.environment())


@flower.command()
def supernode(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="where the SuperLink is")],
    ca: Annotated[Path | None, typer.Option(help="the certificate of the authority that signed the server's")] = None,
    key: Annotated[Path | None, typer.Option(help="this node's private key, whose public half is registered")] = None,
    client: Annotated[
        str | None, typer.Option(help="the number of its client; by default the server gives one")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="this site's own folder, for what its client keeps between rounds")
    ] = None,
    roster: Annotated[
        Path | None, typer.Option(help="the file with all sites' public keys, for the exchange of fedmr.secure")
    ] = None,
    agreed: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|HASH",
            help="the settings that this site serves, and no others, as `fedloom flower agreement` writes them",
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help='what site_data.py finds as node["data"], such as a path')] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="more for site_data.py; may be repeated")
    ] = None,
    port: Annotated[int, typer.Option(help="a port on this machine for the SuperNode's own processes")] = 9094,
) -> None:
    """Start Flower's SuperNode for one site."""
    from fedloom.flower.agreement import is_fingerprint
    from fedloom.flower.data import clients_of

    require_flower()
    node: dict[str, Any] = {}
    for pair in set_ or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputError(f"--set takes NAME=VALUE, not {pair!r}.")
        node[name] = value
    paths = {"folder": folder, "roster": roster}
    if agreed is not None and not is_fingerprint(agreed):
        agreed = str(Path(agreed).absolute())
    given = {
        "client": client,
        "data": data,
        "agreed": agreed,
        **{name: path and str(path.absolute()) for name, path in paths.items()},
    }
    node |= {name: value for name, value in given.items() if value is not None}
    clients_of(node)  # what is wrong with it is said now
    commands.be(commands.supernode(address, node, ca, key, port), commands.environment())


flower.command()(certificates)
flower.command()(agreement)
