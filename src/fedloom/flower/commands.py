"""Flower's commands as fedloom starts them: with TLS and authenticated nodes, and without a word to anybody else."""

import ipaddress
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.errors import InputError
from fedloom.flower.site.socket import NODE_PID

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
    "FLWR_INTERNAL_GRPC_CONTROL_API": "0",
    "FLWR_INTERNAL_GRPC_FLEET_API": "0",
}
"""No telemetry, no look for updates, no packages fetched for an app; a shorter wait where Flower offers that; and none
of Flower's older servers, which listen on every address."""

CONTROL_PORT = 9093
"""Where `flwr` finds the SuperLink on the server's own machine, unless told otherwise."""


def flower_command_environment(home: Path | None = None) -> dict[str, str]:
    """The environment for Flower's commands; `home` is where it keeps its own state."""
    here = Path(sys.executable).parent  # Flower starts its helpers by name
    values = {**os.environ, **QUIET, "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}"}
    return {**values, "FLWR_HOME": str(home)} if home is not None else values


def build_superlink_command(
    certificates: Path | None, host: str, port: int, control_port: int = CONTROL_PORT, database: Path | None = None
) -> list[str]:
    """The command that starts a SuperLink; without certificates only for this machine itself.

    SuperNodes connect to `host` and `port`. Flower's Control API is on loopback alone: it authenticates nobody.
    """
    if port == control_port:
        raise InputError(f"SuperNodes and the Control API need ports of their own, and both were given {port}.")
    words = [sys.executable, "-m", "fedloom.flower.flwr_patches", "superlink", host.strip("[]"), str(port)]
    words += ["--host", "127.0.0.1", "--port", str(control_port)]
    if certificates is None:
        _refuse_insecure("a SuperLink", host, "--certificates")
        words.append("--insecure")
    else:
        for option, name in (("ca-certfile", "ca.crt"), ("certfile", "server.pem"), ("keyfile", "server.key")):
            words += [f"--ssl-{option}", str(_there(certificates / name))]
        words.append("--enable-supernode-auth")
    words.append("--disable-runtime-dependency-installation")
    return words + (["--database", str(database)] if database is not None else [])


def build_supernode_command(
    address: str,
    node: Mapping[str, Any],
    ca: Path | None = None,
    key: Path | None = None,
    port: int = 9094,
) -> list[str]:
    """The command that starts a SuperNode for the SuperLink at `address`, with this configuration of the node."""
    words = [sys.executable, "-m", "fedloom.flower.flwr_patches", "supernode", "--superlink", address]
    if (ca is None) != (key is None):
        missing = "--ca" if ca is None else "--key"
        raise InputError(f"{missing} is missing: a SuperNode needs both --ca and --key, or on this machine neither.")
    if ca is None or key is None:
        _refuse_insecure("a SuperNode", address.rpartition(":")[0], "--ca and --key")
        words.append("--insecure")
    else:
        words += ["--root-certificates", str(_there(ca)), "--auth-supernode-private-key", str(_there(key))]
        node = {**node, "key": str(key.absolute())}
    if "roster" in node:
        _there(Path(str(node["roster"])))
    if "agreed" in node:  # what is wrong with it is said now, and not when the server has come
        from fedloom.flower.trust.agreement import Agreement

        Agreement.read(str(node["agreed"]))
    # What the SuperNode and the processes of its app tell each other does not leave this machine.
    return [*words, "--host", "127.0.0.1", "--port", str(port), "--node-config", _node_config_argument(node)]


def original_supernode_command(words: list[str]) -> list[str]:
    """The command of a SuperNode with Flower's own waits."""
    return [str(Path(sys.executable).parent / "flower-supernode"), *words[4:]]


def _node_config_argument(node: Mapping[str, Any]) -> str:
    """A node's configuration as Flower reads it from the command line."""
    words = []
    for key, value in node.items():
        if isinstance(value, str) and ('"' in value or "\n" in value or "\\" in value):
            raise InputError(f"the {key} of a node must be without quotes, backslashes and line ends, not {value!r}.")
        words.append(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}")
    return " ".join(words)


def exec_flower_command(words: list[str], environ: dict[str, str]) -> None:
    """Become that command: this process goes on as it."""
    sys.stdout.flush()
    os.execve(words[0], words, {**environ, NODE_PID: str(os.getpid())})


def _is_loopback_host(host: str) -> bool:
    """Whether an address is this machine's own and nobody else's."""
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def _refuse_insecure(what: str, host: str, needed: str) -> None:
    if not _is_loopback_host(host):
        raise InputError(f"{what} for {host!r} needs {needed}; without, there is one on 127.0.0.1 alone.")


def _there(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"there is no file {path}.")
    return path.absolute()
