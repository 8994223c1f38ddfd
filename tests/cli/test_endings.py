"""How the command ends: hang-ups, closed pipes, and names that are not text."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import fedloom
from fedloom.cli.interrupts import StopOnSignal
from fedloom.config import Config
from tests.support.refusals import TINY

FEDLOOM = [sys.executable, "-m", "fedloom"]


def start(callback: StopOnSignal, place: Path) -> StopOnSignal:
    callback.on_run_start(place, Config(), [])
    return callback


def test_a_hang_up_stops_like_sigterm(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    stopping = start(StopOnSignal(), tmp_path)
    try:
        assert signal.getsignal(signal.SIGHUP) == signal.getsignal(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stopping.should_stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        stopping.on_run_end()
        for number, handler in before.items():
            signal.signal(number, handler)
    start(quiet := StopOnSignal(), tmp_path)
    quiet.on_run_end()
    assert {number: signal.getsignal(number) for number in before} == before


def test_nohup_is_respected(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stopping = start(StopOnSignal(), tmp_path)
    try:
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        stopping.on_run_end()
        signal.signal(signal.SIGHUP, before)


def test_a_closed_pipe_ends_silently() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([*FEDLOOM, "list", "methods"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_path_that_is_not_utf_8(tmp_path: Path) -> None:
    words = [*FEDLOOM, "run", "fedavg", *map(str, TINY), "--quiet", "--out", b"r\xff"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == 2
    assert b"is not text in UTF-8; rename the file or folder." in ended.stderr
    assert ended.stderr.count(b"\n") == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(fedloom.InputError, match="must be text in UTF-8"):
        fedloom.run("fedavg", out=os.fsdecode(b"r\xff"))


def test_the_class_of_a_module_is_no_module(tmp_path: Path) -> None:
    with pytest.raises(fedloom.InputError, match=r"the model 'Linear' cannot be called without arguments.*an instance"):
        fedloom.run(model=nn.Linear, out=tmp_path / "r")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "resume"])
def test_a_read_only_folder_is_said(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, os.strerror(30))

    run = fedloom.run(out=tmp_path / "r", rounds=2, clients=4, model="logreg", report=False)
    if command == "run":
        monkeypatch.setattr(Path, "mkdir", read_only)
        with pytest.raises(fedloom.InputError, match="Read-only file system"):
            fedloom.run(out=tmp_path / "s")
        return
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(fedloom.InputError, match="Read-only file system"):
        fedloom.resume(run.path, rounds=4)
    assert fedloom.resume(run.path).digest == run.digest
