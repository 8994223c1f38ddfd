"""Tests that concurrent runs give the results of single runs."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import fedloom
from fedloom.config import make_config
from fedloom.errors import InputError, RunStopped
from fedloom.runs.callback import Callback
from fedloom.runs.concurrent import PlannedRun, run_concurrently
from fedloom.runs.directory import RunDirectory
from fedloom.runs.execute import execute_run, resume
from fedloom.runs.resolve import resolve_run
from fedloom.runs.result import RunResult
from tests.support.callbacks import Eye

SETTINGS = {"data": "digits", "model": "logreg", "rounds": 4, "clients": 5, "engine": "sequential"}


def jobs(folder: Path, methods: list[str], **settings: Any) -> list[PlannedRun]:
    def job(number: int, method: str) -> PlannedRun:
        config = make_config({**SETTINGS, "method": method, "seed": number, **settings})
        place = folder / f"{method}-seed{number}"
        return (
            place,
            config,
            lambda watcher: execute_run(resolve_run(config), out=place, callbacks=[watcher], report=False),
        )

    return [job(number, method) for number, method in enumerate(methods)]


def test_they_are_what_they_would_be_alone(tmp_path: Path) -> None:
    methods = ["fedavg", "scaffold", "fedcross", "lss", "fedmr"]
    alone = [run(Callback()).digest for _, _, run in jobs(tmp_path / "alone", methods)]
    eye = Eye()
    together = run_concurrently(jobs(tmp_path / "together", methods), 3, eye, tmp_path)
    assert [run.digest for run in together] == alone
    assert eye.rounds == list(range(1, 21))
    assert eye.plan.rounds == 20
    assert eye.ended


def test_dropout_is_each_runs_own(tmp_path: Path) -> None:
    """Threads share torch's global generator."""
    from torch import nn

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Dropout(0.5), nn.Linear(30, 10))

    def made(folder: Path) -> list[PlannedRun]:
        def job(seed: int) -> PlannedRun:
            place = folder / f"fedavg-seed{seed}"

            def run(watcher: Callback) -> RunResult:
                return fedloom.run("fedavg", "digits", network, out=place, callbacks=[watcher], report=False, seed=seed,
                                   rounds=3, clients=5, engine="sequential")  # fmt: skip

            return place, make_config({**SETTINGS, "seed": seed, "rounds": 3}), run

        return [job(seed) for seed in range(4)]

    alone = [run(Callback()).digest for _, _, run in made(tmp_path / "alone")]
    assert [run.digest for run in run_concurrently(made(tmp_path / "together"), 4, Callback(), tmp_path)] == alone
    assert len(set(alone)) == 4


def test_one_that_fails_stops_the_others_and_is_named(tmp_path: Path) -> None:
    made = jobs(tmp_path, ["fedavg", "fedavg", "fedavg"], rounds=200)

    def fail(watcher: Callback) -> RunResult:
        raise InputError("out of luck.")

    made[1] = (made[1][0], made[1][1], fail)
    eye = Eye()
    with pytest.raises(InputError, match="out of luck"):
        run_concurrently(made, 2, eye, tmp_path)
    assert len(eye.rounds) < 400
    assert eye.ended


def test_a_stop_is_heard_by_all(tmp_path: Path) -> None:
    with pytest.raises(RunStopped):
        run_concurrently(jobs(tmp_path, ["fedavg", "scaffold", "fedavg"], rounds=100), 2, Eye(stop_after=5), tmp_path)
    assert not (tmp_path / "fedavg-seed2").exists()


def test_notes_say_whose_they_are(tmp_path: Path) -> None:
    eye = Eye()
    run_concurrently(jobs(tmp_path, ["fedavg"], failure_rate=0.9, clients=3, rounds=20), 1, eye, tmp_path)
    assert eye.notes
    assert all(note.startswith("fedavg-seed0: ") for note in eye.notes)


@pytest.mark.parametrize(("number", "words"), [(0, "1 or more, not 0"), (2, "one run keeps all cores of a CPU busy")])
def test_what_makes_no_sense_is_refused(number: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        fedloom.compare(["fedavg"], 2, concurrent_runs=number, out=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def press(person: int, *moments: Callable[[], bool]) -> None:
    """Ctrl-C in the thread of `person` at each of these moments."""

    def work() -> None:
        for come in moments:
            while not come():
                time.sleep(0.001)
            signal.pthread_kill(person, signal.SIGINT)

    Thread(target=work).start()


def test_who_interrupts_does_not_wait_for_the_rounds(tmp_path: Path) -> None:
    """Ctrl-C reaches the main thread, which only waits for the others."""
    begun, ended = list[str](), list[str]()

    def endless(name: str, watcher: Callback) -> RunResult:
        begun.append(name)
        while True:
            try:
                watcher.check()
                watcher.on_server_progress("distillation", 1, 2)
            except RunStopped:
                ended.append(name)
                raise
            time.sleep(0.01)

    def job(name: str) -> PlannedRun:
        return tmp_path / name, make_config({**SETTINGS, "method": "fedavg"}), lambda watcher: endless(name, watcher)

    eye = Eye()
    press(threading.get_ident(), lambda: len({*begun}) == 2)
    with pytest.raises(KeyboardInterrupt):
        run_concurrently([job("one"), job("two"), job("three")], 2, eye, tmp_path)
    assert sorted(ended) == sorted(begun) == ["one", "two"], "the third does not begin"
    assert eye.ended


def test_a_second_interrupt_waits_for_nobody(tmp_path: Path) -> None:
    begun, heard, released = threading.Event(), threading.Event(), threading.Event()
    ended: list[Callback] = []

    def deaf(watcher: Callback) -> RunResult:
        begun.set()
        while not watcher.should_stop():
            time.sleep(0.001)
        heard.set()
        released.wait(60)
        ended.append(watcher)
        raise RunStopped("at last")

    press(threading.get_ident(), begun.is_set, heard.is_set)
    with pytest.raises(KeyboardInterrupt):
        run_concurrently([(tmp_path, make_config({**SETTINGS, "method": "fedavg"}), deaf)], 1, Callback(), tmp_path)
    assert not ended
    released.set()


def test_a_run_looks_for_interrupts_after_each_answer(tmp_path: Path) -> None:
    class Third(Callback):
        """Ends the run after the third client of the second round."""

        asked = 0

        def check(self) -> None:
            self.asked += 1
            if self.asked == 8:
                raise RunStopped("stopped within a round")

    (place, _, run) = jobs(tmp_path, ["scaffold"], checkpoint_seconds=0)[0]
    with pytest.raises(RunStopped, match="within a round"):
        run(Third())
    assert [record["round"] for record in RunDirectory.open(place).history()] == [0, 1]
    alone = jobs(tmp_path / "alone", ["scaffold"])[0][2](Callback())
    assert resume(place, report=False).digest == alone.digest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_ends_the_process(number: int, tmp_path: Path) -> None:
    """Whatever the runs are doing, also where they never look."""
    (tmp_path / "deaf.py").write_text(DEAF)
    words = [sys.executable, "deaf.py", "compare", "fedavg", "fedprox", "--concurrent-runs", "2", "--out", "c"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said = ""
    assert process.stderr is not None
    for awaited in ("two began", "Ctrl-C again stops at once"):
        while awaited not in said:  # pytest's timeout ends a wait in vain
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "fedloom: interrupted; continue with the same command and --out c"


DEAF = """
import sys, threading, time
from pathlib import Path
import fedloom.runs.compare
from fedloom.cli.main import main
from fedloom.config import make_config
from fedloom.runs.callback import CallbackList
from fedloom.runs.concurrent import run_concurrently

barrier = threading.Barrier(2, action=lambda: print("two began", file=sys.stderr, flush=True))

def endless(callback):
    barrier.wait()
    while True:
        time.sleep(0.01)

def compare(*_, callbacks, **__):
    config = make_config({"method": "fedavg"})
    run_concurrently([(Path(name), config, endless) for name in ("one", "two")], 2, CallbackList(callbacks), Path("c"))

fedloom.runs.compare.compare = compare
main()
"""
