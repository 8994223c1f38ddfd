"""A federation of real Flower processes on this machine, for the fault scenarios: parts of it can be killed, frozen
and started again. TLS and node keys as between real sites; all processes end with this one."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from fedloom.config import Config, make_config
from fedloom.flower import commands
from fedloom.flower.app import write_app
from fedloom.flower.flwr_patches import WITH_PARENT
from fedloom.flower.trust import certificates
from fedloom.utils.settings import settings_to_toml
from fedloom.utils.system import find_free_ports

SITE = Path(__file__).with_name("flower_site.py")
PATIENCE = 240.0
"""Seconds that anything may take; a busy machine is slow, and nothing here is a matter of speed."""


class Missing(AssertionError):
    """Something that should have happened did not."""


def wait_until(ready: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """The first true thing that `ready` returns."""
    end = time.monotonic() + seconds
    while True:
        if found := ready():
            return found
        if time.monotonic() > end:
            raise Missing(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.1)


class World:
    """One SuperLink with its state on disk, and a SuperNode with a key of its own for each client."""

    def __init__(self, folder: Path, clients: int = 3) -> None:
        self.folder, self.clients = folder, clients
        self.names = [f"site-{number}" for number in range(clients)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.certificates, self.logs, self.faults = folder / "certificates", folder / "logs", folder / "faults"
        self._runs = 0
        for place in (self.logs, self.faults):
            place.mkdir(parents=True, exist_ok=True)
        certificates.make_certificates(self.certificates, [*self.names, "spare"])
        self.port, self.control_port, *self._ports = find_free_ports(2 + 40)

    # Processes

    def start_superlink(self) -> None:
        database = self.folder / "superlink.db"
        words = commands.build_superlink_command(self.certificates, "127.0.0.1", self.port, self.control_port, database)
        self.start("superlink", words)
        wait_until(self._answers, "the SuperLink's start")

    def start_node(self, name: str, client: int | None, key: Path | None = None, ca: Path | None = None) -> None:
        """Start a SuperNode; by default with its own key, as the client of its number."""
        node = {"folder": str(self.folder / name), "faults": str(self.faults)}
        key, ca = key or self.certificates / "nodes" / name, ca or self.certificates / "ca.crt"
        if client is not None:
            node["client"] = str(client)
        self.start(name, commands.build_supernode_command(f"127.0.0.1:{self.port}", node, ca, key, self._ports.pop()))

    def start(self, name: str, words: Sequence[str]) -> None:
        environ = {**commands.flower_command_environment(self.folder / f"home-{name}"), WITH_PARENT: "1"}
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process and to all that it started."""
        os.killpg(self.processes[name].pid, number)

    def kill(self, name: str) -> None:
        """As a power failure does: at once, and all that it started too."""
        process = self.processes.pop(name)
        below = _below(process.pid)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        psutil.wait_procs(below, timeout=30)

    def is_there(self, name: str) -> bool:
        return name in self.processes and self.processes[name].poll() is None

    def ready(self) -> None:
        """All parts run, and nobody is told to do wrong."""
        for file in self.faults.iterdir():
            file.unlink()
        if not self.is_there("superlink"):
            self.start_superlink()
        if not (self.folder / "registered").exists():
            self.flwr(*(["supernode", "register", str(self.public(name)), "here"] for name in [*self.names, "spare"]))
            (self.folder / "registered").touch()
        for client, name in enumerate(self.names):
            if not self.is_there(name):
                self.start_node(name, client)

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    # What a person does and sees

    def public(self, name: str) -> Path:
        return self.certificates / "nodes" / f"{name}.pub"

    def log(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def says(self, name: str, text: str, since: int = 0) -> None:
        """Wait until a log has a line with this text."""
        wait_until(lambda: text in self.log(name)[since:], f"{text!r} in the log of {name}")

    def flwr(self, *commands_: Sequence[str]) -> str:
        """What Flower's own command says, several times in one process."""
        code = "import json, sys\nfrom flwr.cli.app import app\nfor words in json.loads(sys.argv[1]):\n"
        code += "    app(words, standalone_mode=False)\n"
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(commands_)],
            env=commands.flower_command_environment(self.home()),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        if done.returncode:
            raise Missing(f"flwr {commands_} failed: {done.stdout[-500:]} {done.stderr[-2000:]}")
        return done.stdout

    def home(self) -> Path:
        """Where Flower's command finds the SuperLink."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        connection = {
            "address": f"127.0.0.1:{self.control_port}",
            "root-certificates": str(self.certificates / "ca.crt"),
        }
        (home / "config.toml").write_text(settings_to_toml({"superlink": {"default": "here", "here": connection}}))
        return home

    def app(self, config: Config, name: str) -> "App":
        """An app whose sites can be told to do wrong."""
        app = App(self, config, self.folder / "apps" / name)
        write_app(app.folder, config, {"folder": str(app.run), "join": PATIENCE})
        shutil.copyfile(SITE, app.folder / "client_app.py")
        return app

    def server_app(self) -> psutil.Process:
        """The process of the ServerApp that runs now."""

        def find() -> psutil.Process | None:
            for process in _below(self.processes["superlink"].pid):
                with suppress(psutil.Error):
                    if process.parent() in _below(self.processes["superlink"].pid):
                        return process
            return None

        found: psutil.Process = wait_until(find, "the ServerApp's start")
        return found

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


class App:
    """A run of the world."""

    def __init__(self, world: World, config: Config, folder: Path) -> None:
        self.world, self.config, self.folder = world, config, folder
        self.run = folder.with_name(f"{folder.name}-run")
        self._starts = 0

    @property
    def stream(self) -> str:
        """The name of the process that shows the run's log."""
        return f"{self.folder.name}-{self._starts}"

    def start(self) -> None:
        """`flwr run`."""
        self._starts += 1
        code = "import sys\nfrom flwr.cli.app import app\napp(sys.argv[1:])"
        self.world.home()
        words = [sys.executable, "-c", code, "run", str(self.folder), "here", "--stream"]
        (self.world.folder / f"home-{self.stream}").mkdir()
        shutil.copyfile(self.world.home() / "config.toml", self.world.folder / f"home-{self.stream}" / "config.toml")
        self.world.start(self.stream, words)

    def tell(self, client: int, round: int, word: str) -> None:
        """What a site does in a round; rounds are counted from 1."""
        (self.world.faults / f"do-{client}-{round}").write_text(word)

    def release(self, client: int, round: int) -> None:
        (self.world.faults / f"do-{client}-{round}").unlink()

    def wait_here(self, client: int, round: int) -> None:
        """Until a site that was told to wait does so."""
        wait_until((self.world.faults / f"here-{client}-{round}").exists, f"client {client} in round {round}")

    def history(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_round(self, round: int) -> None:
        """Until a round is over."""
        wait_until(lambda: any(r["round"] == round for r in self.history()), f"the end of round {round}")

    def finish(self) -> None:
        """Until the run is over."""
        wait_until((self.run / "summary.json").exists, "the end of the run")
        stream = self.world.processes.pop(self.stream, None)
        if stream is not None:
            with suppress(subprocess.TimeoutExpired):
                stream.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(stream.pid, signal.SIGKILL)
            stream.wait()

    @property
    def log(self) -> str:
        """All that the run has said, over all its starts."""
        return "".join(self.world.log(f"{self.folder.name}-{number}") for number in range(1, self._starts + 1))

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return found

    def lost(self) -> dict[tuple[int, int], str]:
        """(round, client), rounds from 1, and why."""
        return {
            (record["round"], int(client)): reason
            for record in self.history()
            for client, reason in record.get("lost_clients", {}).items()
        }


def make_run(**settings: Any) -> Config:
    """A short run on the digits that learns something."""
    usual = {"method": "fedavg", "clients": 3, "per_round": 3, "partition": "dirichlet:0.5", "rounds": 4, "epochs": 5}
    return make_config({**usual, "deadline": 120.0, "engine": "flower", **settings})


@contextmanager
def a_world(folder: Path) -> Iterator[World]:
    world = World(folder)
    try:
        yield world
    finally:
        world.close()


def _below(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []
