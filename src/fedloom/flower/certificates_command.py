"""`fedloom flower certificates`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from fedloom.errors import InputError


def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder to write to")],
    nodes: Annotated[
        str, typer.Option(help="how many nodes get a key pair; they are site-0, site-1, ...", metavar="N")
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(help="a name or address at which sites reach the server; may be repeated", metavar="NAME"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="replace what is there already")] = False,
) -> None:
    """Make certificates and node keys for trying out: an authority, a server certificate, a key pair for each node."""
    from importlib.util import find_spec

    if find_spec("cryptography") is None:
        raise InputError("certificates need the package cryptography; install fedloom[flower].")
    from fedloom.flower.certificates import DAYS, HERE, make, node_names

    if not re.fullmatch(r"[0-9]{1,9}", nodes):
        raise InputError(f"nodes must be a whole number from 1 on, not {nodes!r}.")
    hosts = list(dict.fromkeys([*(host or ()), *HERE]))
    names = node_names(int(nodes))
    make(folder, names, hosts, force)
    last = f" to {names[-1]}" if names[1:] else ""
    print(f"{folder / 'ca.crt'}: what every site trusts the server by")
    print(
        f"{folder / 'server.pem'}, server.key: the server's certificate, for {', '.join(hosts)}, valid for {DAYS} days"
    )
    print(f"{folder / 'nodes'}: a private key and its .pub for each of {names[0]}{last}, without an end")
    print(f"{folder / 'roster.pub'}: all public keys, by which sites know each other")
    print(
        "They are for trying out: whoever has this folder can be the server and every site. In earnest each site makes"
    )
    print("its own key (ssh-keygen -t ecdsa -b 384) and hands over the .pub alone.")
