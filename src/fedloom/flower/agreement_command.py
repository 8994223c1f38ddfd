"""`fedloom flower agreement`."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.errors import InputError, brief


def agreement(
    app: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of the app, as `fedloom flower new` wrote it")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the file to write; by default they are printed")
    ] = None,
    run_config: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="what `flwr run` is given by this name; may be repeated"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="replace the file that is there already")] = False,
) -> None:
    """Show the settings that an app tells the sites, all of them, for their operators to read and agree to.

    A site that is started with --agreed and that file, or with the fingerprint, serves these settings and no others.
    """
    from fedloom.flower.agreement import fingerprint, readable, told_by_app
    from fedloom.storage import write_atomically

    told = told_by_app(app, _changes(run_config or []))
    if out is None:
        print(readable(told), end="")
        print(f"fingerprint {fingerprint(told)}", file=sys.stderr)  # apart, so that the settings can be sent to a file
        return
    if out.is_dir():
        raise InputError(f"{out} is a folder; --out takes a file to write.")
    if out.exists() and not force:
        raise InputError(f"{out} is there already; --force replaces it.")
    write_atomically(out, readable(told).encode())
    print(f"{out}: the settings, with the fingerprint {fingerprint(told)}")
    print(f"A site serves no others when it is started with: fedloom flower supernode ... --agreed {out}")


def _changes(words: list[str]) -> dict[str, Any]:
    """Settings as `flwr run --run-config` reads them."""
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
            f"--run-config takes NAME=VALUE, such as seed=3, not {' '.join(words)!r}: {brief(error)}."
        ) from None
    if not found:
        raise InputError(f"--run-config takes NAME=VALUE, such as seed=3, not {' '.join(words)!r}.")
    return found
