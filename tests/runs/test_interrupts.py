"""Tests of Ctrl-C, once or several times: the run stops and can be resumed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from fedloom import Client, LocalSteps, LocalTrainer, Method, Options, register
from fedloom.runs.directory import RunDirectory
from tests.support.rewritten_config import rewrite_config
from tests.support.small_runs import TINY_OPTIONS, Command


def _signals(signals: int) -> type[Client[Options]]:
    class Signals(Client[Options]):
        """Client 2 presses Ctrl-C in round 1 (from 0), this many times."""

        def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
            yield LocalSteps(self.training_step)
            if trainer.client_id == 2 and trainer.round == 1:
                for _ in range(signals):
                    os.kill(os.getpid(), signal.SIGINT)

    return Signals


@pytest.fixture(autouse=True)
def methods() -> None:
    """Methods with such a client; conftest.py forgets them after each test."""
    for name, signals in (("test-once", 1), ("test-twice", 2)):
        register(Method(name=name, summary="", reference="", client=_signals(signals)))


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """The command ignores further signals once it has been told to stop: here, others come after it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_interrupt_stops_after_the_round_and_the_run_goes_on(command: Command, tmp_path: Path) -> None:
    words = ("run", "test-once", *TINY_OPTIONS, "--engine", "sequential")
    ended = command(*words, "--out", "r")
    assert ended.code == 130
    assert ended.err.splitlines()[-1] == "fedloom: stopped after round 2; continue with: fedloom resume r"
    assert "Ctrl-C again stops at once" in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "r" / "summary.json").exists()
    resumed = command("resume", "r", "--json").result
    assert resumed["digest"] == command("run", "fedavg", *TINY_OPTIONS, "--json").result["digest"]
    rounds = [record["round"] for record in RunDirectory.open(tmp_path / "r").history()]
    assert rounds == [0, 1, 2, 3]


def test_a_second_interrupt_stops_at_once(command: Command, tmp_path: Path) -> None:
    ended = command("run", "test-twice", *TINY_OPTIONS, "--engine", "sequential", "--out", "r", "--json")
    assert (ended.code, ended.out) == (130, "")
    assert ended.err.splitlines()[-1] == "fedloom: interrupted; continue with: fedloom resume r"
    assert "Traceback" not in ended.err
    assert [record["round"] for record in RunDirectory.open(tmp_path / "r").history()] == [0, 1]


def test_an_interrupt_before_the_run_begins(command: Command, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    ended = command("run", "fedavg", *TINY_OPTIONS, "--import", "slow.py")
    assert (ended.code, ended.out, ended.err) == (130, "", "fedloom: interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slow.py"]


def test_a_stopped_comparison_says_how_the_comparison_goes_on(command: Command) -> None:
    words = ("compare", "test-once", "fedprox", *TINY_OPTIONS, "--engine", "sequential", "--out", "c")
    ended = command(*words)
    assert ended.code == 130
    last = ended.err.splitlines()[-1]
    assert "same command" in last
    assert "--out c" in last


@pytest.mark.parametrize("times", ["once", "twice"])
def test_a_stopped_verification_offers_nothing_to_resume(command: Command, tmp_path: Path, times: str) -> None:
    """It runs in a folder that is deleted."""
    command("run", "fedavg", *TINY_OPTIONS, "--engine", "sequential", "--out", "r", "--json").result  # noqa: B018
    rewrite_config(tmp_path / "r", method=f"test-{times}")
    ended = command("verify", "r")
    assert ended.code == 130
    assert "resume" not in ended.err.splitlines()[-1]
    assert "r was not verified" in ended.err.splitlines()[-1]


# real processes


class Process:
    """A real `fedloom` in a session of its own, so that a signal reaches it as a terminal would send it."""

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate(timeout=60)

    def __init__(self, folder: Path, *words: object) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "fedloom", *map(str, words)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.seen = ""

    def wait_for(self, text: str) -> None:
        assert self.popen.stderr is not None
        while text not in self.seen:  # pytest's timeout ends a wait in vain
            line = self.popen.stderr.readline()
            assert line, f"it ended before {text!r}: {self.seen}"
            self.seen += line

    def ends(self) -> tuple[int, str, str]:
        out, err = self.popen.communicate(timeout=60)
        return self.popen.returncode, out, self.seen + err


ENDLESS = ("--clients", 6, "--clients-per-round", 6, "--rounds", 3000, "--model", "logreg", "--workers", 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_process_stops_and_goes_on(command: Command, tmp_path: Path, number: int) -> None:
    with Process(tmp_path, "run", "scaffold", *ENDLESS, "--out", "r") as process:
        process.wait_for("3000 rounds")
        os.killpg(process.popen.pid, number)
        code, out, err = process.ends()
    assert (code, out) == (130, "")
    assert "continue with: fedloom resume r" in err.splitlines()[-1]
    assert "Traceback" not in err
    # three more rounds, and the same bits as without the stop
    history = RunDirectory.open(tmp_path / "r").history()
    rounds = history[-1]["round"] + 3
    rewrite_config(tmp_path / "r", rounds=rounds)
    resumed = command("resume", "r", "--json").result
    whole = command("run", "scaffold", *ENDLESS, "--rounds", rounds, "--json").result
    assert (resumed["digest"], resumed["rounds"]) == (whole["digest"], rounds)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_impatient_person_gets_away_at_once(tmp_path: Path, number: int) -> None:
    """Long rounds, and the signal again and again, also while the process is ending."""
    with Process(tmp_path, "run", "fedavg", *ENDLESS, "--epochs", 20000, "--out", "r") as process:
        process.wait_for("3000 rounds")
        os.killpg(process.popen.pid, signal.SIGINT)
        process.wait_for("Ctrl-C again stops at once")
        for _ in range(500):
            os.killpg(process.popen.pid, number)
            try:
                process.popen.wait(timeout=0.02)
                break
            except subprocess.TimeoutExpired:
                continue
        code, out, err = process.ends()
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert "continue with: fedloom resume r" in err


def test_an_interrupt_while_the_command_is_loaded(tmp_path: Path) -> None:
    """Seconds in which nothing is shown yet, so that people think better of it then."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    ended = subprocess.run(
        [sys.executable, "-m", "fedloom", "run", "fedavg"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "fedloom: interrupted\n")


def test_the_script_enters_by_the_same_door() -> None:
    (script,) = entry_points(group="console_scripts", name="fedloom")
    assert script.value == "fedloom.__main__:main"
