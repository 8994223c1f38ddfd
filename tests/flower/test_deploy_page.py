"""Tests that run the ten commands of docs/deploy.md on this machine.

The commands are read from the page. Only this is changed:

- `pip install` is left out, because fedloom is installed. `scp server.example.org:` becomes a copy from the server's
  folder.
- `server.example.org` becomes `127.0.0.1`. `certificates` makes a certificate for it anyway. The SuperLink listens
  there only, instead of on `0.0.0.0`.
- Ports are free ones, so that the test does not collide with other programs. `--port` is added to commands 5 and 9, as
  the page says for several SuperNodes on one machine, and `--control-port` to command 5.
- The run has two rounds instead of ten.
- Commands 8 and 9, which are written for site 0, run at all five sites.

Laptop and server share one folder. Each site has its own folder, and its own `~`.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fedloom.utils.system import find_free_ports

pytestmark = [pytest.mark.flower, pytest.mark.timeout(300)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
SITES = range(5)
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
"""What the page says to set for Flower's own commands, which otherwise talk to others."""
MARK = "FEDLOOM_TEN_COMMANDS"
"""In the environment of all that is started here, so that it can be found and ended."""


def commands() -> dict[int, str]:
    """The page's commands by their numbers; one that goes on in the next line is one command."""
    section = PAGE.read_text().partition("in ten commands\n")[2].partition("\n## ")[0]
    code = "\n".join(line for line in section.splitlines() if line.startswith("    ")).replace("\\\n", " ")
    found = re.findall(r"^\s*(.+?)\s+# (\d+)$", code, flags=re.MULTILINE)
    return {int(number): command for command, number in found}


def swapped(command: str, *pairs: tuple[str, str]) -> str:
    """The command with something else in the place of what the page says, which must be there."""
    for said, instead in pairs:
        assert said in command, f"{said!r} is not in {command!r} any more"
        command = command.replace(said, instead)
    return command


class Machine:
    """A folder in which commands are given, with a home of its own."""

    def __init__(self, place: Path, mark: str) -> None:
        self.place, self.home = place, place / "home"
        self.home.mkdir(parents=True)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        dropped = ("FLWR_HOME", "XDG_CACHE_HOME")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        self.environ = {**kept, **QUIET, "PATH": path, "HOME": str(self.home), MARK: mark}
        self.started: list[subprocess.Popen[bytes]] = []

    def starts(self, command: str) -> "subprocess.Popen[bytes]":
        """Start a command; what it says is in `log`."""
        with self.log.open("ab") as log:
            log.write(f"\n$ {command}\n".encode())
            log.flush()
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.place,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.started.append(process)
        return process

    def does(self, command: str, seconds: float = 90) -> None:
        """Carry a command out; it must succeed."""
        process = self.starts(command)
        wait_for(lambda: process.poll() is not None, f"the end of {command!r}", self.said, seconds)
        assert process.returncode == 0, f"{command!r} ended with {process.returncode}:\n{self.said()}"

    @property
    def log(self) -> Path:
        return self.place / "said.log"

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


def marked(mark: str) -> list[psutil.Process]:
    """All processes that came of what was started here, whoever is their parent now."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[str], Machine]]:
    mark, made = str(tmp_path), list[Machine]()

    def make(name: str) -> Machine:
        made.append(Machine(tmp_path / name, mark))
        return made[-1]

    yield make
    end = time.monotonic() + 10
    while left := marked(mark):  # some start others while they end
        for process in left:
            with suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        for process in [process for one in made for process in one.started]:
            process.poll()  # or it would be found again
        assert time.monotonic() < end, left
        time.sleep(0.1)
    for process in [process for one in made for process in one.started]:
        process.wait(10)


def wait_for(ready: Callable[[], bool], what: str, there: Callable[[], str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, f"{what} did not come about:\n{there()}"
        time.sleep(0.1)


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_the_page_has_ten_commands() -> None:
    assert sorted(commands()) == list(range(1, 11))
    assert commands()[1] == "pip install 'fedloom[flower]'"


def test_the_ten_commands_give_a_model(machine: Callable[[str], Machine]) -> None:
    given, (port, control, *ports) = commands(), find_free_ports(2 + len(SITES))
    fewer, here = ("--rounds 10", "--rounds 2"), ("server.example.org", "127.0.0.1")
    server = machine("server")

    server.does(swapped(given[2], fewer))
    [summary] = (server.place / "runs").glob("*/summary.json")
    alone = json.loads(summary.read_text())

    server.does(swapped(given[3], fewer))
    server.does(swapped(given[4], here))
    link = server.starts(swapped(given[5], ("0.0.0.0", "127.0.0.1")) + f" --port {port} --control-port {control}")
    wait_for(lambda: answers(port) or link.poll() is not None, "the SuperLink", server.said)
    server.does(swapped(given[6], (":9093", f":{control}")))
    server.does(given[7])

    nodes = {}
    for site, own_port in zip(SITES, ports, strict=True):
        own = machine(f"site-{site}")
        whose, from_server = ("site-0", f"site-{site}"), ("server.example.org:", f"{shlex.quote(str(server.place))}/")
        own.does(swapped(given[8], ("scp ", "cp "), from_server, whose))
        start = swapped(given[9], here, (":8000", f":{port}"), whose, ("--client 0", f"--client {site}"))
        nodes[site] = own, own.starts(f"{start} --port {own_port}")

    run = server.starts(given[10])
    ended = [link, run, *(node for _, node in nodes.values())]
    wait_for(lambda: any(process.poll() is not None for process in ended), "the end of the run", server.said)
    for own, node in nodes.values():
        assert node.poll() is None, own.said()
    assert link.poll() is None, server.said()
    assert run.poll() == 0, server.said()
    for own, _ in nodes.values():
        assert any((own.home / "fedloom-site").iterdir()), "its folder is where the command says"
    done = json.loads((server.place / "app-run" / "summary.json").read_text())
    assert done["accuracy"] == alone["accuracy"] > 0.2
    assert done["digest"] == alone["digest"]
    assert done["failed"] == alone["failed"] == 0
    assert done["rounds"] == 2
