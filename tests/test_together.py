"""Several runs at once: each is what it would be alone."""

import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.api import execute
from fedloom.config import make_config
from fedloom.errors import InputError
from fedloom.finished import Run
from fedloom.together import Job, carry_out
from fedloom.watching import Silent, Stopped, Watcher

SETTINGS = {"data": "digits", "model": "logreg", "rounds": 4, "clients": 5, "engine": "plain"}


class Eye(Silent):
    """Notes what it is shown."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.plan: Any = None
        self.rounds: list[int] = []
        self.notes: list[str] = []
        self.ended = False
        self._stop_after = stop_after

    def begin(self, folder: Path, config: Any, history: list[dict[str, Any]]) -> None:
        self.plan = config

    def note(self, text: str) -> None:
        self.notes.append(text)

    def record(self, record: Mapping[str, Any]) -> None:
        self.rounds.append(record["round"])
        if record.get("note"):
            self.notes.append(record["note"])

    def wants_stop(self) -> bool:
        return self._stop_after is not None and len(self.rounds) >= self._stop_after

    def end(self) -> None:
        self.ended = True


def jobs(folder: Path, methods: list[str], **settings: Any) -> list[Job]:
    def job(number: int, method: str) -> Job:
        config = make_config({**SETTINGS, "method": method, "seed": number, **settings})
        place = folder / f"{method}-seed{number}"
        return place, config, lambda watcher: execute(config, out=place, watcher=watcher, report=False)

    return [job(number, method) for number, method in enumerate(methods)]


def test_they_are_what_they_would_be_alone(tmp_path: Path) -> None:
    methods = ["fedavg", "scaffold", "fedcross", "lss", "fedmr"]
    alone = [run(Silent()).digest for _, _, run in jobs(tmp_path / "alone", methods)]
    eye = Eye()
    together = carry_out(jobs(tmp_path / "together", methods), 3, eye, tmp_path)
    assert [run.digest for run in together] == alone
    assert eye.rounds == list(range(1, 21))
    assert eye.plan.rounds == 20
    assert eye.ended


def test_dropout_is_each_runs_own(tmp_path: Path) -> None:
    """Threads share torch's global generator."""
    from torch import nn

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Dropout(0.5), nn.Linear(30, 10))

    def made(folder: Path) -> list[Job]:
        def job(seed: int) -> Job:
            place = folder / f"fedavg-seed{seed}"

            def run(watcher: Watcher) -> Run:
                return fedloom.run("fedavg", "digits", network, out=place, watcher=watcher, report=False, seed=seed,
                                   rounds=3, clients=5, engine="plain")  # fmt: skip

            return place, make_config({**SETTINGS, "seed": seed, "rounds": 3}), run

        return [job(seed) for seed in range(4)]

    alone = [run(Silent()).digest for _, _, run in made(tmp_path / "alone")]
    assert [run.digest for run in carry_out(made(tmp_path / "together"), 4, None, tmp_path)] == alone
    assert len(set(alone)) == 4


def test_one_that_fails_stops_the_others_and_is_named(tmp_path: Path) -> None:
    made = jobs(tmp_path, ["fedavg", "fedavg", "fedavg"], rounds=200)

    def fail(watcher: Watcher) -> Run:
        raise InputError("out of luck.")

    made[1] = (made[1][0], made[1][1], fail)
    eye = Eye()
    with pytest.raises(InputError, match="out of luck"):
        carry_out(made, 2, eye, tmp_path)
    assert len(eye.rounds) < 400
    assert eye.ended


def test_a_stop_is_heard_by_all(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        carry_out(jobs(tmp_path, ["fedavg", "scaffold", "fedavg"], rounds=100), 2, Eye(stop_after=5), tmp_path)
    assert not (tmp_path / "fedavg-seed2").exists()


def test_notes_say_whose_they_are(tmp_path: Path) -> None:
    eye = Eye()
    carry_out(jobs(tmp_path, ["fedavg"], lost=0.9, clients=3, rounds=20), 1, eye, tmp_path)
    assert eye.notes
    assert all(note.startswith("fedavg-seed0: ") for note in eye.notes)


@pytest.mark.parametrize(("number", "words"), [(0, "1 or more, not 0"), (2, "share a GPU only")])
def test_what_makes_no_sense_is_refused(number: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        fedloom.compare(["fedavg"], 2, at_once=number, out=tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("deaf", [0, 2], ids=["heard", "lost twice"])
def test_who_interrupts_at_once_does_not_wait_for_the_rounds(
    deaf: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C twice reaches the main thread, which only waits for the others; what a run does not hear is said again."""
    monkeypatch.setattr("fedloom.together._PATIENCE", 0.2)
    ended, begun = list[str](), list[str]()

    def sleep(name: str) -> None:
        begun.append(name)
        for _ in range(3000):
            time.sleep(0.01)

    def endless(name: str) -> Run:
        for _ in range(deaf):
            with suppress(KeyboardInterrupt):
                sleep(name)
        try:
            sleep(name)
        except KeyboardInterrupt:
            ended.append(name)
            raise
        raise AssertionError("nobody interrupted it")

    def job(name: str) -> Job:
        return tmp_path / name, make_config({**SETTINGS, "method": "fedavg"}), lambda _: endless(name)

    def press(person: int) -> None:
        while {*begun} != {"one", "two"}:
            time.sleep(0.001)
        signal.pthread_kill(person, signal.SIGINT)

    eye = Eye()
    threading.Thread(target=press, args=(threading.get_ident(),)).start()
    with pytest.raises(KeyboardInterrupt):
        carry_out([job("one"), job("two"), job("three")], 2, eye, tmp_path)
    assert sorted(ended) == sorted({*begun}) == ["one", "two"], "the third does not begin"
    assert eye.ended
