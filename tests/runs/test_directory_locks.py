"""Tests that one process at a time gets a folder."""

import io
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import fedloom
from fedloom.errors import InputError
from fedloom.runs import directory as folders
from fedloom.runs.directory import RunDirectory, claim_directory, hold_directory_lock, refuse_occupied_directory
from tests.support.small_runs import TINY, TINY_OPTIONS, tiny

WORDS = tuple(map(str, (*TINY_OPTIONS, "--engine", "sequential", "--quiet")))
CLEAN = multiprocessing.get_context("forkserver")  # a process that has trained cannot be forked and train again
CLEAN.set_forkserver_preload(["fedloom.cli.main", "fedloom.runs.execute", "fedloom.runs.compare"])


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def command(*words: str) -> None:
    """The command; where it fails, its exit code and what it said are the error."""
    from fedloom.cli.main import main

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            main(words)
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{ended.code} {said.getvalue()}") from None


def slow_command(*words: str) -> None:
    """The command with a pause before it writes config.toml, for others to come in between; it waits for nobody."""

    def slow(*given: Any, to_toml: Callable[..., str] = folders.settings_to_toml) -> str:
        time.sleep(1)
        return to_toml(*given)

    folders.settings_to_toml = slow  # type: ignore[assignment]
    folders.PATIENCE = 1
    command(*words)


def child(work: Callable[..., object], words: Sequence[Any], barrier: Any, said: Any, number: int) -> None:
    barrier.wait(60)
    try:
        work(*words)
    except BaseException as error:
        said.put((number, f"{type(error).__name__}: {error}"))
    else:
        said.put((number, ""))


def at_once(work: Callable[..., object], words: Sequence[Sequence[Any]]) -> list[str]:
    """What the processes say that begin together: "" where the work succeeds, and its error where not."""
    barrier, said = CLEAN.Barrier(len(words)), CLEAN.Queue()
    given = [(work, each, barrier, said, number) for number, each in enumerate(words)]
    children = [CLEAN.Process(target=child, args=args) for args in given]
    for process in children:
        process.start()
    found = dict(said.get(timeout=100) for _ in words)
    for process in children:
        process.join()
    return [found[number] for number in range(len(words))]


def claim_and_die(stem: Path) -> None:
    with claim_directory(stem, numbered=True):
        os.kill(os.getpid(), signal.SIGKILL)


def test_of_several_processes_one_gets_a_folder(tmp_path: Path) -> None:
    said = at_once(slow_command, [("run", "fedavg", *WORDS, "--seed", str(n), "--out", "r") for n in range(4)])
    assert said.count("") == 1, said
    for text in filter(None, said):
        assert text.startswith("RuntimeError: 2 fedloom: ")
        assert text.count("\n") == 1
        assert "r is not empty; choose another --out" in text or "another process is at work on r;" in text
    winner = said.index("")
    run = RunDirectory.open(tmp_path / "r")
    assert run.config.seed == winner
    assert [record["round"] for record in run.history()] == [0, 1, 2, 3]
    assert fedloom.verify(tmp_path / "r") == (run.summary()["digest"],) * 2  # type: ignore[index]


def test_ten_commands_started_together_make_ten_runs(tmp_path: Path) -> None:
    assert at_once(command, [("run", "fedavg", *WORDS, "--rounds", "1")] * 10) == [""] * 10
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == [f"fedavg-digits-seed0-{number:03d}" for number in range(1, 11)]
    digests = {RunDirectory.open(tmp_path / "runs" / name).summary()["digest"] for name in names}  # type: ignore[index]
    assert len(digests) == 1


def test_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    assert at_once(command, [("compare", "fedavg", "fedprox", *WORDS, "--rounds", "1")] * 3) == [""] * 3
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == [f"compare-digits-{number:03d}" for number in range(1, 4)]
    for name in names:
        inside = {path.name for path in (tmp_path / "runs" / name).iterdir()}
        assert inside == {".lock", "comparison.json", "fedavg-seed0", "fedprox-seed0", "report.html"}


@pytest.mark.exhaustive
def test_of_two_comparisons_one_gets_a_folder(tmp_path: Path) -> None:
    """They have no run in common that would stop the other, and while one is at it the other gives up."""
    methods = ["fedavg", "fedprox"]
    said = at_once(slow_command, [("compare", method, *WORDS, "--seeds", "3", "--out", "c") for method in methods])
    assert said.count("") == 1, said
    assert "RuntimeError: 2 fedloom: another process is at work on c; wait for it or stop it.\n" in said
    runs = {f"{methods[said.index('')]}-seed{seed}" for seed in range(3)}
    assert {path.name for path in (tmp_path / "c").iterdir()} == {".lock", "comparison.json", "report.html", *runs}


# what is left behind


def test_a_process_that_dies_with_an_empty_folder_is_in_nobodys_way(tmp_path: Path) -> None:
    process = CLEAN.Process(target=claim_and_die, args=(tmp_path / "runs" / "fedavg-digits-seed0",))
    process.start()
    process.join()
    left = tmp_path / "runs" / "fedavg-digits-seed0-001"
    assert [path.name for path in left.iterdir()] == [".lock"]
    assert fedloom.run("fedavg", **TINY).path.name == "fedavg-digits-seed0-002"
    assert tiny(left, "fedavg").path == left


@pytest.mark.parametrize("words", [("run", "fedavg"), ("compare", "fedavg"), ("run", "fedavg", "--out", "a/b/c")])
def test_who_cannot_begin_leaves_nothing_behind(words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^2 fedloom: "):
        command(*words, *WORDS, "--model", "lstm")  # the data are read before it turns out that it takes text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(RuntimeError, match=r"^2 fedloom: "):
        command("run", "fedavg", *WORDS, "--model", "lstm", "--out", "mine")
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("name", ["there", "not/there"])
def test_who_waited_for_one_that_leaves_nothing_has_the_folder_to_itself(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock it waited for is removed, and so may the folder be: it must not believe that it holds a lock then."""
    (tmp_path / "there").mkdir()
    path, held = tmp_path / name, list[bool]()
    monkeypatch.setattr(folders, "PATIENCE", 100)

    def take() -> None:
        with claim_directory(path, refuse_occupied_directory):
            held.append(True)
            time.sleep(0.5)

    thread = Thread(target=take)
    with claim_directory(path, refuse_occupied_directory):
        thread.start()
        time.sleep(0.2)
    while not held:
        time.sleep(0.01)
    monkeypatch.setattr(folders, "PATIENCE", 1)
    with pytest.raises(InputError, match="another process is at work"), hold_directory_lock(path):
        raise AssertionError("the lock was given twice")
    thread.join()
    assert path.exists() == (name == "there")
