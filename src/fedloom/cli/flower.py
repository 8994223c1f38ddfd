"""`fedloom flower`: commands for runs over real sites with Flower.

The commands are `new`, `superlink`, `supernode`, `agreement` and `certificates`.
"""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.options import Imports, MethodOptions, add_cli_options
from fedloom.config import parse_config_overrides
from fedloom.errors import InputError, shorten_error_message
from fedloom.flower import commands
from fedloom.flower.flwr_patches import require_supported_flwr


def agreement(
    app: Annotated[Path, typer.Argument(metavar="DIR", help="folder of the app, as `fedloom flower new` wrote it")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="file to write; by default the settings are printed")
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="setting as for `flwr run --run-config`; may be repeated"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="replace an existing file")] = False,
) -> None:
    """Show all settings that the sites of an app receive, so that their operators can agree to them.

    A site that is started with --agreed and this file, or its fingerprint, accepts these settings and no others.
    """
    from fedloom.flower.trust.agreement import agreement_fingerprint, agreement_settings_from_app, format_agreement
    from fedloom.utils.storage import write_atomically

    settings = agreement_settings_from_app(app, _changes(run_config or []))
    if out is None:
        print(format_agreement(settings), end="")
        # On stderr, so that the settings alone can be redirected to a file.
        print(f"fingerprint {agreement_fingerprint(settings)}", file=sys.stderr)
        return
    if out.is_dir():
        raise InputError(f"{out} is a folder; --out takes a file to write.")
    if out.exists() and not force:
        raise InputError(f"{out} exists already; --force replaces it.")
    write_atomically(out, format_agreement(settings).encode())
    print(f"{out}: the settings, with the fingerprint {agreement_fingerprint(settings)}")
    print(f"A site accepts no others if you start it with: fedloom flower supernode ... --agreed {out}")


def _changes(words: list[str]) -> dict[str, Any]:
    """Parse settings as `flwr run --run-config` does."""
    if not words:
        return {}
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise InputError("--run-config needs Flower; install fedloom[flower].")
    import click
    from flwr.common.config import parse_config_args

    try:
        found: dict[str, Any] = dict(parse_config_args(words))
    except (click.ClickException, ValueError, OSError) as error:
        raise InputError(
            f"--run-config takes NAME=VALUE, such as seed=3, not {' '.join(words)!r}: {shorten_error_message(error)}."
        ) from None
    if not found:
        raise InputError(f"--run-config takes NAME=VALUE, such as seed=3, not {' '.join(words)!r}.")
    return found


def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder to write to")],
    nodes: Annotated[str, typer.Option(help="number of nodes that get a key pair: site-0, site-1, ...", metavar="N")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="name or address of the server for the sites; may be repeated", metavar="NAME"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="replace existing files")] = False,
) -> None:
    """Create certificates and node keys for tests: an authority, a server certificate, a key pair for each node."""
    from importlib.util import find_spec

    if find_spec("cryptography") is None:
        raise InputError("certificates need the package cryptography; install fedloom[flower].")
    from fedloom.flower.trust.certificates import DAYS, HERE, make_certificates

    if not re.fullmatch(r"[0-9]{1,9}", nodes):
        raise InputError(f"nodes must be an integer of at least 1, not {nodes!r}.")
    hosts = list(dict.fromkeys([*(host or ()), *HERE]))
    names = [f"site-{number}" for number in range(int(nodes))]
    make_certificates(folder, names, hosts, force)
    last = f" to {names[-1]}" if names[1:] else ""
    print(f"{folder / 'ca.crt'}: the authority by which every site trusts the server")
    print(
        f"{folder / 'server.pem'}, server.key: the server's certificate, for {', '.join(hosts)}, valid for {DAYS} days"
    )
    print(f"{folder / 'nodes'}: a private key and its .pub for each of {names[0]}{last}, without expiry date")
    print(f"{folder / 'roster.pub'}: all public keys, by which sites recognize each other")
    print("They are for tests: anyone who has this folder can act as the server and as every site. In production, each")
    print("site creates its own key (ssh-keygen -t ecdsa -b 384) and hands over only the .pub file.")


flower = typer.Typer(
    name="flower",
    help=r"Run over real sites that Flower connects (install fedloom\[flower]).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Certificates = Annotated[
    Path | None,
    typer.Option(help="folder with ca.crt, server.pem and server.key; not needed on a loopback address"),
]


@flower.command()
@add_cli_options()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="folder of the app, new or empty")],
    method: Annotated[str, typer.Argument(help="method, or several joined by +")],
    run_directory: Annotated[
        Path | None, typer.Option(metavar="DIR", help="run directory on the server; by default DIR-run")
    ] = None,
    set_: MethodOptions = None,
    import_: Imports = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Write a Flower app for a run; the options are those of `fedloom run`.

    With --partition own, the sites have their own data, and no data set is loaded by name.
    """
    from fedloom.config import replace_config
    from fedloom.flower.app import write_app
    from fedloom.models.initial_weights import initial_weights_sha256
    from fedloom.runs.build import build_run
    from fedloom.runs.resolve import resolve_config, resolve_run

    options = parse_config_overrides(set_ or ())
    imports = {"imports": import_} if import_ else {}
    config = resolve_config({**settings, **imports, "method": method, "options": options, "engine": "flower"})
    request = resolve_run(config)
    config = replace_config(config, partition_sha256=request.config.partition_sha256)
    if config.init is not None:  # sites must start from the same file
        config = replace_config(config, init_sha256=initial_weights_sha256(Path(config.init)))
    if config.partition != "own":
        settings = {"engine": "sequential", "init_sha256": config.init_sha256}
        build_run(request.replace_settings(**settings)).engine.close()  # report errors in the settings now
    run_path = run_directory or folder.with_name(f"{folder.absolute().name}-run")
    write_app(folder, config, {"folder": str(run_path.absolute())})
    print(f"{folder} is an app for Flower; {folder / 'README.md'} says how to run it.")


@flower.command()
def superlink(
    certificates: Certificates = None,
    host: Annotated[str, typer.Option(help="address at which SuperNodes connect")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port at which SuperNodes connect")] = 8000,
    control_port: Annotated[
        int, typer.Option(min=1, max=65535, help="port for `flwr` commands, on this machine only")
    ] = commands.CONTROL_PORT,
    database: Annotated[Path | None, typer.Option(help="file for its state, which then survives a restart")] = None,
) -> None:
    """Start Flower's SuperLink, with TLS and only for nodes whose keys are registered.

    `flwr` commands reach it on this machine only: anyone who reaches Flower's Control API can run code at every site.
    """
    require_supported_flwr()
    command = commands.build_superlink_command(certificates, host, port, control_port, database)
    commands.exec_flower_command(command, commands.flower_command_environment())


@flower.command()
def supernode(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="address of the SuperLink")],
    ca: Annotated[
        Path | None, typer.Option(help="certificate of the authority that signed the server's certificate")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="this node's private key; its public key is registered")] = None,
    client: Annotated[str | None, typer.Option(help="number of its client; by default the server assigns one")] = None,
    folder: Annotated[Path | None, typer.Option(help="this site's own folder, for the client state")] = None,
    roster: Annotated[
        Path | None, typer.Option(help="file with all sites' public keys, for the exchange of fedmr.secure")
    ] = None,
    agreed: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|HASH",
            help="settings that this site accepts, and no others, as `fedloom flower agreement` writes them",
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help='value of node["data"] in site_data.py, such as a path')] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="another value of node in site_data.py; may be repeated"),
    ] = None,
    port: Annotated[int, typer.Option(help="local port for the SuperNode's own processes")] = 9094,
) -> None:
    """Start Flower's SuperNode for one site."""
    from fedloom.flower.site_data import site_data_clients
    from fedloom.flower.trust.agreement import is_agreement_fingerprint

    require_supported_flwr()
    node_config: dict[str, Any] = {}
    for pair in set_ or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputError(f"--set takes NAME=VALUE, not {pair!r}.")
        node_config[name] = value
    paths = {"folder": folder, "roster": roster}
    if agreed is not None and not is_agreement_fingerprint(agreed):
        agreed = str(Path(agreed).absolute())
    given = {
        "client": client,
        "data": data,
        "agreed": agreed,
        **{name: path and str(path.absolute()) for name, path in paths.items()},
    }
    node_config |= {name: value for name, value in given.items() if value is not None}
    site_data_clients(node_config)  # report errors in it now
    commands.exec_flower_command(
        commands.build_supernode_command(address, node_config, ca, key, port), commands.flower_command_environment()
    )


flower.command()(certificates)
flower.command()(agreement)
