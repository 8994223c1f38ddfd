"""`--engine flower`: a whole deployment on this machine, for one run.

It has a SuperLink, SuperNodes with their own keys, and TLS between them: the same processes and the same app as with
real sites. Temporary files are in a temporary folder. Logs and client states are in the run directory. All processes
end with this one.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from fedloom.config import Config, replace_config
from fedloom.errors import FedloomError, InputError
from fedloom.flower import commands
from fedloom.flower.app import make_app_run_config, resolve_app_config, write_app
from fedloom.flower.flwr_patches import WITH_PARENT, require_supported_flwr
from fedloom.flower.server.engine import FlowerEngineFactory, make_engine_exchange
from fedloom.flower.server.transport import SocketTransport, open_transport_socket
from fedloom.flower.site.client_app import HERE
from fedloom.flower.trust.agreement import agreement_settings, format_agreement
from fedloom.runs.build import build_run
from fedloom.runs.resolve import RunRequest
from fedloom.utils.settings import flatten_settings, settings_to_toml
from fedloom.utils.storage import write_atomically
from fedloom.utils.system import find_free_ports

RUN = "FEDLOOM_RUN"
"""Environment variable that names the run directory in every process started here, to tell whose it is."""
START_SECONDS = 120.0
"""Longest time in seconds that Flower's processes may take to start."""


@contextmanager
def start_local_deployment(
    request: RunRequest, run_path: Path, unpatched: bool = False
) -> Iterator[FlowerEngineFactory]:
    """Start the sites of a run on this machine; `run_path` is the run directory.

    With `unpatched`, for comparison, SuperNodes poll as Flower does, and each message gets a new process with torch.
    """
    require_supported_flwr()
    if names := request.user_objects.names:
        raise InputError(
            f"the flower engine runs its sites in other processes, so {' and '.join(names)} cannot be "
            "Python objects; write an app with: fedloom flower new"
        )
    # Report errors in the settings before anything starts.
    checked_run = build_run(request.replace_settings(engine="sequential"))
    checked_run.engine.close()
    if (exchange := make_engine_exchange(request, checked_run.engine.context)) is not None:
        exchange.check(checked_run.engine.context.client.upload_shapes)
    config = replace_config(checked_run.config, engine="flower", nodes=request.config.nodes)
    with _ended_by_sigterm(), _Loopback(config, run_path / "flower", unpatched) as started:
        yield FlowerEngineFactory(started.transport, replace(request, config=config), run_path, START_SECONDS)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that the started processes end too."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Loopback:
    """The processes of one deployment."""

    def __init__(self, config: Config, logs: Path, unpatched: bool) -> None:
        assert config.clients is not None
        self._config, self._logs, self._unpatched = config, logs, unpatched
        self._names = [f"site-{number}" for number in range(min(config.nodes or config.clients, config.clients))]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "_Loopback":
        self._folder = Path(tempfile.mkdtemp(prefix="fedloom-"))
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all processes; they hold nothing that would be lost."""
        if hasattr(self, "_connection"):
            self._connection.close()
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        from fedloom.flower.trust.certificates import make_certificates

        folder, certificates = self._folder, self._folder / "certificates"
        make_certificates(certificates, self._names)
        port, control, *ports = find_free_ports(2 + len(self._names))
        server = open_transport_socket(folder / "bridge")
        write_app(folder / "app", self._config, {"bridge": str(folder / "bridge")})
        run_config = flatten_settings(make_app_run_config(self._config, []))  # this process ran the imported files
        agreed = format_agreement(agreement_settings(resolve_app_config(run_config, folder / "app", None)))
        write_atomically(folder / "agreed.json", agreed.encode())
        superlink_command = commands.build_superlink_command(certificates, "127.0.0.1", port, control)
        self._run("superlink", superlink_command, folder / "superlink")
        connection = {"address": f"127.0.0.1:{control}", "root-certificates": str(certificates / "ca.crt")}
        (folder / "superlink").mkdir(exist_ok=True)
        (folder / "superlink" / "config.toml").write_text(
            settings_to_toml({"superlink": {"default": "here", "here": connection}})
        )
        self._wait("superlink", lambda: _answers(port), "Flower's SuperLink")
        keys = [str(certificates / "nodes" / f"{name}.pub") for name in self._names]
        submit = [
            sys.executable,
            "-m",
            "fedloom.flower.submit",
            str(folder / "app"),
            "here",
            str(folder / "registered"),
        ]
        self._run("run", [*submit, *keys], folder / "superlink")
        self._wait("run", (folder / "registered").exists, "the registration of the nodes' keys")
        # Seeded draws give the same bits as the other engines. Between real sites nobody may know these draws.
        exchange = {"roster": str(certificates / "roster.pub"), "exchange-draws": "seeded", "fewest-sites": 1}
        exchange["agreed"] = str(folder / "agreed.json")
        for number, (name, own_port) in enumerate(zip(self._names, ports, strict=True)):
            clients = ",".join(map(str, range(number, self._config.clients or 0, len(self._names))))
            node_config = {"clients": clients, "folder": str((self._logs / name).absolute()), **exchange}
            if self._unpatched:
                node_config["site"] = HERE
            key = certificates / "nodes" / name
            command = commands.build_supernode_command(
                f"127.0.0.1:{port}", node_config, certificates / "ca.crt", key, own_port
            )
            if self._unpatched:
                command = commands.original_supernode_command(command)
            self._run(name, command, folder / name)
        self._connection = self._accept(server)
        self.transport = SocketTransport(self._connection)

    def _run(self, name: str, command: Sequence[str], flower_home: Path) -> None:
        """Start a process that ends with this one and writes to its own log."""
        environment = {
            **commands.flower_command_environment(flower_home),
            WITH_PARENT: "1",
            RUN: str(self._logs.parent.absolute()),
        }
        with (self._logs / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self, name: str, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready`, and raise an error if the process `name` ends before or takes too long."""
        end = time.monotonic() + START_SECONDS
        while not ready():
            code = self._processes[name].poll()
            if code is not None or time.monotonic() > end:
                log = self._logs / f"{name}.log"
                raise FedloomError(f"{what} failed, or took too long. Its log ends with: {_last_line(log)}")
            time.sleep(0.05)

    def _accept(self, server: socket.socket) -> socket.socket:
        """Return the connection of the ServerApp, which connects as soon as Flower has started it."""
        with server:
            self._wait("run", lambda: bool(select.select([server], [], [], 0)[0]), "Flower's ServerApp")
            return server.accept()[0]


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _last_line(log: Path) -> str:
    """Return the last line of a log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing."
