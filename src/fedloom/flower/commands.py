"""Command lines of Flower's SuperLink and SuperNode.

They use TLS and authenticated nodes, and send no telemetry.
"""

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
"""No telemetry, no update check, no packages fetched for an app, faster polling where Flower has a setting for it, and
none of Flower's older servers, which listen on every address."""

CONTROL_PORT = 9093
"""Default port at which `flwr` reaches the SuperLink, on the server's machine only."""


def flower_command_environment(flower_home: Path | None = None) -> dict[str, str]:
    """Return the environment for Flower's commands; Flower keeps its own state in `flower_home`."""
    here = Path(sys.executable).parent  # Flower finds its other commands on the PATH
    values = {**os.environ, **QUIET, "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', '')}"}
    return {**values, "FLWR_HOME": str(flower_home)} if flower_home is not None else values


def build_superlink_command(
    certificates: Path | None, host: str, port: int, control_port: int = CONTROL_PORT, database: Path | None = None
) -> list[str]:
    """Return the command that starts a SuperLink; without certificates it accepts only a loopback address.

    SuperNodes connect to `host` and `port`. Flower's Control API authenticates nobody, so it listens on loopback only.
    """
    if port == control_port:
        raise InputError(f"SuperNodes and the Control API need different ports, but both have {port}.")
    command = [sys.executable, "-m", "fedloom.flower.flwr_patches", "superlink", host.strip("[]"), str(port)]
    command += ["--host", "127.0.0.1", "--port", str(control_port)]
    if certificates is None:
        _refuse_insecure("a SuperLink", host, "--certificates")
        command.append("--insecure")
    else:
        for option, name in (("ca-certfile", "ca.crt"), ("certfile", "server.pem"), ("keyfile", "server.key")):
            command += [f"--ssl-{option}", str(_there(certificates / name))]
        command.append("--enable-supernode-auth")
    command.append("--disable-runtime-dependency-installation")
    return command + (["--database", str(database)] if database is not None else [])


def build_supernode_command(
    address: str,
    node_config: Mapping[str, Any],
    ca: Path | None = None,
    key: Path | None = None,
    port: int = 9094,
) -> list[str]:
    """Return the command that starts a SuperNode with this configuration for the SuperLink at `address`."""
    command = [sys.executable, "-m", "fedloom.flower.flwr_patches", "supernode", "--superlink", address]
    if (ca is None) != (key is None):
        missing = "--ca" if ca is None else "--key"
        raise InputError(
            f"{missing} is missing: a SuperNode needs both --ca and --key, or neither on a loopback address."
        )
    if ca is None or key is None:
        _refuse_insecure("a SuperNode", address.rpartition(":")[0], "--ca and --key")
        command.append("--insecure")
    else:
        command += ["--root-certificates", str(_there(ca)), "--auth-supernode-private-key", str(_there(key))]
        node_config = {**node_config, "key": str(key.absolute())}
    if "roster" in node_config:
        _there(Path(str(node_config["roster"])))
    if "agreed" in node_config:  # report errors in it now, not at the first message
        from fedloom.flower.trust.agreement import Agreement

        Agreement.read(str(node_config["agreed"]))
    # The SuperNode and the processes of its app talk over loopback only.
    return [*command, "--host", "127.0.0.1", "--port", str(port), "--node-config", _node_config_argument(node_config)]


def original_supernode_command(command: list[str]) -> list[str]:
    """Return the same command with an unpatched SuperNode."""
    return [str(Path(sys.executable).parent / "flower-supernode"), *command[4:]]


def _node_config_argument(node_config: Mapping[str, Any]) -> str:
    """Return a node configuration in the form of Flower's command line."""
    words = []
    for key, value in node_config.items():
        if isinstance(value, str) and ('"' in value or "\n" in value or "\\" in value):
            raise InputError(
                f"the {key} of a node must not contain quotes, backslashes or line breaks, but is {value!r}."
            )
        words.append(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}")
    return " ".join(words)


def exec_flower_command(command: list[str], environment: dict[str, str]) -> None:
    """Replace this process with the command."""
    sys.stdout.flush()
    os.execve(command[0], command, {**environment, NODE_PID: str(os.getpid())})


def _is_loopback_host(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def _refuse_insecure(what: str, host: str, needed: str) -> None:
    if not _is_loopback_host(host):
        raise InputError(
            f"{what} for {host!r} needs {needed}; only a loopback address such as 127.0.0.1 works without."
        )


def _there(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"there is no file {path}.")
    return path.absolute()
