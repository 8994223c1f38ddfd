"""Tests of Flower's simulation over Ray: the multiprocess engine's bits."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fedloom.config import make_config
from fedloom.flower import commands
from fedloom.flower.app import write_app
from fedloom.runs.directory import RunDirectory
from fedloom.runs.execute import execute_run
from fedloom.runs.resolve import resolve_run

pytestmark = [pytest.mark.flower, pytest.mark.timeout(900)]


@pytest.fixture
def simulation(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A SuperLink that simulates its nodes, and the environment to reach it as `sim`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = commands.flower_command_environment(tmp_path / "home")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.toml").write_text(
        f'[superlink.sim]\naddress = "127.0.0.1:{port}"\ninsecure = true\n', encoding="utf-8"
    )
    words = [str(Path(sys.executable).parent / "flower-superlink"), "--insecure", "--simulation"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
    with (tmp_path / "superlink.log").open("wb") as log:
        process = subprocess.Popen(words, env=environ, stdout=log, stderr=log, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield environ
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_hundred_clients_on_two_workers(tmp_path: Path, simulation: dict[str, str]) -> None:
    config = make_config(
        {"method": "scaffold", "clients": 100, "clients_per_round": 20, "rounds": 2, "epochs": 1, "partition": "iid"}
    )
    write_app(tmp_path / "app", config, {"folder": str(tmp_path / "run")})
    flwr = str(Path(sys.executable).parent / "flwr")
    many = "num-supernodes=100 client-resources-num-cpus=1 init-args-num-cpus=2"
    words = [flwr, "run", str(tmp_path / "app"), "sim", "--stream", "--federation-config", many]
    told = subprocess.run(words, env=simulation, capture_output=True, text=True, timeout=800)
    summary = RunDirectory.open(tmp_path / "run").summary()
    assert summary is not None, told.stdout + told.stderr
    assert summary["failed"] == 0
    assert summary["digest"] == execute_run(resolve_run(config), out=tmp_path / "host", report=False).digest
