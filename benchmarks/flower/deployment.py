"""A deployment of real Flower processes on this machine for the fault scenarios.

Scenarios kill, freeze and restart the processes.

It uses TLS and node keys, as between real sites. All processes end with this process.
"""

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

SITE = Path(__file__).with_name("site.py")
PATIENCE = 240.0
"""Timeout in seconds, long enough for a busy machine."""


class CheckFailed(AssertionError):
    """Something expected did not happen."""


def wait_until(ready: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait until `ready` returns something true, and return it."""
    end = time.monotonic() + seconds
    while True:
        if found := ready():
            return found
        if time.monotonic() > end:
            raise CheckFailed(f"{what} did not happen within {seconds:g} s")
        time.sleep(0.1)


class Deployment:
    """One SuperLink with its state on disk, and a SuperNode with its own key for each client."""

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
        """Start the SuperLink and wait until it accepts connections."""
        database = self.folder / "superlink.db"
        words = commands.build_superlink_command(self.certificates, "127.0.0.1", self.port, self.control_port, database)
        self.start("superlink", words)
        wait_until(self._answers, "the SuperLink's start")

    def start_node(self, name: str, client: int | None, key: Path | None = None, ca: Path | None = None) -> None:
        """Start a SuperNode, by default with its own key."""
        node = {"folder": str(self.folder / name), "faults": str(self.faults)}
        key, ca = key or self.certificates / "nodes" / name, ca or self.certificates / "ca.crt"
        if client is not None:
            node["client"] = str(client)
        self.start(name, commands.build_supernode_command(f"127.0.0.1:{self.port}", node, ca, key, self._ports.pop()))

    def start(self, name: str, words: Sequence[str]) -> None:
        """Start a process with its own log."""
        environ = {**commands.flower_command_environment(self.folder / f"home-{name}"), WITH_PARENT: "1"}
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                words, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process and its children."""
        os.killpg(self.processes[name].pid, number)

    def kill(self, name: str) -> None:
        """Kill a process and its children, as a power failure does."""
        process = self.processes.pop(name)
        children = _children_of(process.pid)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        psutil.wait_procs(children, timeout=30)

    def is_running(self, name: str) -> bool:
        """Return whether a process runs."""
        return name in self.processes and self.processes[name].poll() is None

    def reset(self) -> None:
        """Start what does not run, and delete all instructions to sites."""
        for file in self.faults.iterdir():
            file.unlink()
        if not self.is_running("superlink"):
            self.start_superlink()
        if not (self.folder / "registered").exists():
            self.flwr(
                *(["supernode", "register", str(self.public_key(name)), "here"] for name in [*self.names, "spare"])
            )
            (self.folder / "registered").touch()
        for client, name in enumerate(self.names):
            if not self.is_running(name):
                self.start_node(name, client)

    def close(self) -> None:
        """Kill all processes."""
        for name in list(self.processes):
            self.kill(name)

    # Commands and logs

    def public_key(self, name: str) -> Path:
        """Return the file with the public key of a node."""
        return self.certificates / "nodes" / f"{name}.pub"

    def log(self, name: str) -> str:
        """Return the log of a process."""
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_log(self, name: str, text: str, since: int = 0) -> None:
        """Wait until the log of a process holds a text."""
        wait_until(lambda: text in self.log(name)[since:], f"{text!r} in the log of {name}")

    def flwr(self, *commands_: Sequence[str]) -> str:
        """Run several commands of `flwr` in one process, and return what they print."""
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
            raise CheckFailed(f"flwr {commands_} failed: {done.stdout[-500:]} {done.stderr[-2000:]}")
        return done.stdout

    def home(self) -> Path:
        """Return the Flower home whose configuration names the SuperLink."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        connection = {
            "address": f"127.0.0.1:{self.control_port}",
            "root-certificates": str(self.certificates / "ca.crt"),
        }
        (home / "config.toml").write_text(settings_to_toml({"superlink": {"default": "here", "here": connection}}))
        return home

    def app(self, config: Config, name: str) -> "App":
        """Write an app whose sites follow instructions."""
        app = App(self, config, self.folder / "apps" / name)
        write_app(app.folder, config, {"folder": str(app.run), "join": PATIENCE})
        shutil.copyfile(SITE, app.folder / "client_app.py")
        return app

    def server_app(self) -> psutil.Process:
        """Return the process of the running ServerApp."""

        def find() -> psutil.Process | None:
            for process in _children_of(self.processes["superlink"].pid):
                with suppress(psutil.Error):
                    if process.parent() in _children_of(self.processes["superlink"].pid):
                        return process
            return None

        found: psutil.Process = wait_until(find, "the ServerApp's start")
        return found

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False


class App:
    """One run of the deployment."""

    def __init__(self, deployment: Deployment, config: Config, folder: Path) -> None:
        self.deployment, self.config, self.folder = deployment, config, folder
        self.run = folder.with_name(f"{folder.name}-run")
        self._starts = 0

    @property
    def stream(self) -> str:
        """The name of the process that streams the run's log."""
        return f"{self.folder.name}-{self._starts}"

    def start(self) -> None:
        """Run `flwr run`."""
        self._starts += 1
        code = "import sys\nfrom flwr.cli.app import app\napp(sys.argv[1:])"
        self.deployment.home()
        words = [sys.executable, "-c", code, "run", str(self.folder), "here", "--stream"]
        (self.deployment.folder / f"home-{self.stream}").mkdir()
        shutil.copyfile(
            self.deployment.home() / "config.toml", self.deployment.folder / f"home-{self.stream}" / "config.toml"
        )
        self.deployment.start(self.stream, words)

    def instruct(self, client: int, round: int, word: str) -> None:
        """Give a site an instruction for a round; rounds count from 1."""
        (self.deployment.faults / f"do-{client}-{round}").write_text(word)

    def release(self, client: int, round: int) -> None:
        """Withdraw the instruction of a round, which lets a waiting site continue."""
        (self.deployment.faults / f"do-{client}-{round}").unlink()

    def wait_for_client(self, client: int, round: int) -> None:
        """Wait until a site waits, as instructed."""
        wait_until((self.deployment.faults / f"here-{client}-{round}").exists, f"client {client} in round {round}")

    def history(self) -> list[dict[str, Any]]:
        """Return the records of the finished rounds."""
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for_round(self, round: int) -> None:
        """Wait until a round has ended."""
        wait_until(lambda: any(r["round"] == round for r in self.history()), f"the end of round {round}")

    def finish(self) -> None:
        """Wait until the run has ended."""
        wait_until((self.run / "summary.json").exists, "the end of the run")
        stream = self.deployment.processes.pop(self.stream, None)
        if stream is not None:
            with suppress(subprocess.TimeoutExpired):
                stream.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(stream.pid, signal.SIGKILL)
            stream.wait()

    @property
    def log(self) -> str:
        """The log of the run, over all its starts."""
        return "".join(self.deployment.log(f"{self.folder.name}-{number}") for number in range(1, self._starts + 1))

    def summary(self) -> dict[str, Any]:
        """Return the summary of the run."""
        found: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        return found

    def failed_clients(self) -> dict[tuple[int, int], str]:
        """Return the reason of each failure by round (from 1) and client."""
        return {
            (record["round"], int(client)): reason
            for record in self.history()
            for client, reason in record.get("failed_clients", {}).items()
        }


def make_config_of_run(**settings: Any) -> Config:
    """Return the config of a short run on the digits that reaches a good accuracy."""
    defaults = {
        "method": "fedavg",
        "clients": 3,
        "clients_per_round": 3,
        "partition": "dirichlet:0.5",
        "rounds": 4,
        "epochs": 5,
    }
    return make_config({**defaults, "deadline": 120.0, "engine": "flower", **settings})


@contextmanager
def open_deployment(folder: Path) -> Iterator[Deployment]:
    """Yield a deployment, and kill its processes at the end."""
    deployment = Deployment(folder)
    try:
        yield deployment
    finally:
        deployment.close()


def _children_of(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []
