"""`--engine flower`: a whole federation on this machine, for one run.

A SuperLink, SuperNodes with keys of their own, TLS between them: the same processes and the same app as between real
sites. What is only needed while it runs lies in a temporary folder; logs, and what clients keep, lie in the run's
folder. All processes end with this one.
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
from pathlib import Path

from fedloom.config import Config, replace_config
from fedloom.errors import FedloomError, InputError
from fedloom.flower import commands
from fedloom.flower.app import make_app_run_config, resolve_app_config, write_app
from fedloom.flower.flwr_patches import WITH_PARENT, require_flower
from fedloom.flower.server.engine import FlowerEngineFactory, update_exchange
from fedloom.flower.server.transport import SocketTransport, open_transport_socket
from fedloom.flower.site.client_app import HERE
from fedloom.flower.trust.agreement import agreement_settings, format_agreement
from fedloom.runs.build import build_run
from fedloom.runs.resolve import UserObjects
from fedloom.utils.settings import flatten_settings, settings_to_toml
from fedloom.utils.storage import write_atomically
from fedloom.utils.system import find_free_ports

RUN = "FEDLOOM_RUN"
"""The environment of every process that is started here names the run's folder, so that one can tell whose it is."""
START_SECONDS = 120.0
"""How long Flower's processes may take to be there."""


@contextmanager
def start_local_deployment(
    config: Config, own: UserObjects, path: Path, as_shipped: bool = False
) -> Iterator[FlowerEngineFactory]:
    """The sites of a run, started on this machine; `path` is the run's folder.

    `as_shipped` takes SuperNodes with Flower's own waits, and a new process with torch for every message: to compare.
    """
    require_flower()
    if own.names:
        raise InputError(
            f"the sites of the flower engine are processes of their own: {' and '.join(own.names)} cannot be given as "
            "Python objects; write an app with: fedloom flower new"
        )
    plain = build_run(replace_config(config, engine="plain"), own)  # what is wrong with the run is said before all else
    plain.engine.close()
    if (exchange := update_exchange(plain.config, plain.engine.shop)) is not None:
        exchange.check(plain.engine.shop.workshop.uploads)
    config = replace_config(plain.config, engine="flower", nodes=config.nodes)
    with _ended_by_sigterm(), _Loopback(config, path / "flower", as_shipped) as started:
        yield FlowerEngineFactory(started.link, config, path, START_SECONDS)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process as an error does, so that what was started is ended too."""

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
    """The processes of one federation."""

    def __init__(self, config: Config, logs: Path, as_shipped: bool) -> None:
        assert config.clients is not None
        self._config, self._logs, self._as_shipped = config, logs, as_shipped
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
        """End all processes, at once: nothing is lost with them."""
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
        given = flatten_settings(make_app_run_config(self._config, []))  # what it imports was run here already
        agreed = format_agreement(agreement_settings(resolve_app_config(given, folder / "app", None)))
        write_atomically(folder / "agreed.json", agreed.encode())
        link = commands.build_superlink_command(certificates, "127.0.0.1", port, control)
        self._run("superlink", link, folder / "superlink")
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
        # For a run that is to have the bits of the other engines; between real sites nobody is to know these choices.
        exchange = {"roster": str(certificates / "roster.pub"), "exchange-draws": "seeded", "fewest-sites": 1}
        exchange["agreed"] = str(folder / "agreed.json")
        for number, (name, own_port) in enumerate(zip(self._names, ports, strict=True)):
            clients = ",".join(map(str, range(number, self._config.clients or 0, len(self._names))))
            node = {"clients": clients, "folder": str((self._logs / name).absolute()), **exchange}
            if self._as_shipped:
                node["site"] = HERE
            key = certificates / "nodes" / name
            words = commands.build_supernode_command(f"127.0.0.1:{port}", node, certificates / "ca.crt", key, own_port)
            if self._as_shipped:
                words = commands.original_supernode_command(words)
            self._run(name, words, folder / name)
        self._connection = self._accept(server)
        self.link = SocketTransport(self._connection)

    def _run(self, name: str, words: Sequence[str], home: Path) -> None:
        """Start a process that ends with this one and writes to a log of its own."""
        environ = {
            **commands.flower_command_environment(home),
            WITH_PARENT: "1",
            RUN: str(self._logs.parent.absolute()),
        }
        with (self._logs / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self, name: str, ready: Callable[[], bool], what: str) -> None:
        """Wait until something is there that the process `name` brings about."""
        end = time.monotonic() + START_SECONDS
        while not ready():
            code = self._processes[name].poll()
            if code is not None or time.monotonic() > end:
                log = self._logs / f"{name}.log"
                raise FedloomError(f"{what} did not come about. The last that was said of it: {_last_line(log)}")
            time.sleep(0.05)

    def _accept(self, server: socket.socket) -> socket.socket:
        """The ServerApp, which calls as soon as Flower has started it."""
        with server:
            self._wait("run", lambda: bool(select.select([server], [], [], 0)[0]), "Flower's ServerApp")
            return server.accept()[0]


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _last_line(log: Path) -> str:
    """What a log ends with."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing."
