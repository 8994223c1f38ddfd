"""Tests that the same seed gives the same bits, whatever happens to a run."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import fedloom
from fedloom.config import make_config
from fedloom.engines.multiprocess import engine
from fedloom.engines.multiprocess.engine import MultiprocessEngine
from fedloom.engines.multiprocess.worker import WorkerEvaluateRequest
from fedloom.runs.execute import execute_run, resume
from fedloom.runs.resolve import resolve_run
from fedloom.runs.result import RunResult

Command = Callable[..., Any]
TINY: dict[str, Any] = {
    "clients": 6,
    "clients_per_round": 4,
    "rounds": 3,
    "model": "logreg",
    "epochs": 1,
    "report": False,
}
TINY_OPTIONS = ("--clients", 6, "--clients-per-round", 4, "--rounds", 3, "--model", "logreg", "--epochs", 1)


def tiny(folder: Path, method: str = "fedavg", **settings: Any) -> RunResult:
    """A small run in `folder`."""
    return fedloom.run(method, out=folder, **{**TINY, **settings})


def measured(folder: Path) -> list[tuple[int, float, float]]:
    """What metrics.jsonl says of each round, less the seconds."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(r["round"], r["accuracy"], r["loss"]) for r in map(json.loads, lines)]


@pytest.mark.quick_if(method=("fedcross", "scaffold"))
@pytest.mark.parametrize("method", ["fedavg", "fedcda", "fedcross", "fedmr", "fedprox", "scaffold"])
def test_engines_and_numbers_of_workers_agree(tmp_path: Path, method: str) -> None:
    plans: list[dict[str, Any]] = [
        {"engine": "sequential"},
        *({"engine": "multiprocess", "workers": n} for n in (1, 2, 3)),
    ]
    runs = [tiny(tmp_path / str(at), method, **plan) for at, plan in enumerate(plans)]
    assert len({run.digest for run in runs}) == 1
    assert all(measured(run.path) == measured(runs[0].path) for run in runs)
    assert tiny(tmp_path / "other", method, seed=1).digest != runs[0].digest


def test_two_processes_with_one_seed_agree_and_another_seed_differs(tmp_path: Path) -> None:
    def start(seed: int, workers: int) -> "subprocess.Popen[str]":
        words = ["run", "scaffold", *TINY_OPTIONS, "--seed", seed, "--workers", workers, "--json", "-q"]
        words += ["--out", tmp_path / f"{seed}-{workers}"]
        return subprocess.Popen([sys.executable, "-m", "fedloom", *map(str, words)], stdout=subprocess.PIPE, text=True)

    processes = [start(0, 1), start(0, 3), start(1, 1)]
    first, same, other = (json.loads(process.communicate(timeout=120)[0])["digest"] for process in processes)
    assert first == same != other


def test_fedprox_without_its_pull_is_fedavg(tmp_path: Path) -> None:
    neutral = tiny(tmp_path / "prox", "fedprox", options={"fedprox": {"mu": 0.0}})
    assert neutral.digest == tiny(tmp_path / "avg").digest != tiny(tmp_path / "pull", "fedprox").digest


def test_lost_clients_are_lost_alike_everywhere(tmp_path: Path) -> None:
    runs = [
        tiny(tmp_path / e, "scaffold", failure_rate=0.5, engine=e, rounds=4) for e in ("sequential", "multiprocess")
    ]
    assert runs[0].digest == runs[1].digest
    lost = [[record.get("failed_clients") for record in run.history] for run in runs]
    assert lost[0] == lost[1]
    assert 0 < runs[0].summary["failed"] < 16
    reasons = {reason for record in lost[0] for reason in (record or {}).values()}
    assert reasons == {"did not answer (simulated)"}


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_workers_that_are_killed_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """At many instants, in training and in scoring, one of the busy workers is killed outright."""
    settings = {"rounds": 4, "workers": 3, "model": "mlp", "engine": "multiprocess"}
    undisturbed = tiny(tmp_path / "a", method, **settings)
    rng, engines, kills = random.Random(method), [], Counter[object]()

    class Watched(MultiprocessEngine):
        scores = 0

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            engines.append(self)

        def evaluate(self, row: Any) -> Any:
            Watched.scores += 1
            return super().evaluate(row)

    def deadly_wait(pipes: Sequence[Any], timeout: float | None = None) -> list[Any]:
        scoring = any(
            isinstance(order, WorkerEvaluateRequest) for worker in engines[0]._workers for order in worker.requests
        )
        ready = real_wait(pipes, 0 if scoring else rng.uniform(0, 0.003))
        busy = [w for w in engines[0]._workers if w.requests and w.pipe not in ready]
        for worker in busy[:1]:
            order = worker.requests[0]
            key = (
                ("score", Watched.scores)
                if isinstance(order, WorkerEvaluateRequest)
                else (order.task.round, order.index)
            )
            if kills[key] < engine.LIVES - 1:  # once more and the client would be given up, rightly
                kills[key] += 1
                assert worker.process.pid in engines[0].worker_pids()
                os.kill(worker.process.pid, signal.SIGKILL)
        return real_wait(pipes, timeout)

    real_wait = engine.wait
    monkeypatch.setattr(engine, "wait", deadly_wait)
    monkeypatch.setattr("fedloom.engines.multiprocess.engine.MultiprocessEngine", Watched)
    run = tiny(tmp_path / "b", method, **settings)
    # One that was killed just after its reply is found dead when it gets its next order, or never.
    assert 3 < engines[0].num_dead_workers <= sum(kills.values())
    assert any(isinstance(key, tuple) and key[0] == "score" for key in kills)
    assert run.digest == undisturbed.digest
    assert measured(run.path) == measured(undisturbed.path)
    assert run.summary["failed"] == 0
    assert not engines[0].worker_pids()


# a run that is killed


def in_a_process(*words: object) -> "multiprocessing.process.BaseProcess":
    """`fedloom WORDS` in a process of its own, forked: no two seconds of imports."""
    from fedloom.cli.main import main

    def child() -> None:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        main([str(word) for word in words])

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process


def kill(pid: int) -> None:
    """Kill a process outright; its workers must follow by themselves."""
    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    os.kill(pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, "workers outlived their coordinator"


LONGER = ("--clients", 6, "--clients-per-round", 3, "--rounds", 15, "--model", "logreg", "--epochs", 1)


@pytest.mark.quick_if(method=("fedcross",))
@pytest.mark.parametrize(
    ("method", "instants", "more"),
    [
        ("scaffold", 12, ()),
        ("fedcross", 4, ()),
        ("fedmr", 4, ("--set", "fedmr.secure=true")),
        ("fedcda", 4, ("--set", "fedcda.warmup=2")),
        ("fedcda", 6, ("--set", "fedcda.warmup=2", "--cache-dir", "cache")),
    ],
)
def test_a_run_killed_at_any_instant_goes_on_to_the_same_bits(
    command: Command, tmp_path: Path, method: str, instants: int, more: tuple[str, ...]
) -> None:
    """A checkpoint after every round, so that most instants lie in the writing of one."""
    words = ("run", method, *LONGER, *more, "--checkpoint-seconds", 0, "--workers", 2, "--quiet")
    whole = command(*words, "--out", "whole", "--json").result
    reference = measured(tmp_path / "whole")
    rng, interrupted = random.Random(0), 0
    for instant in range(instants):
        folder = tmp_path / f"killed-{instant}"
        process = in_a_process(*words, "--out", folder)
        while process.is_alive() and not (folder / "config.toml").exists():
            process.join(timeout=0.001)
        process.join(timeout=rng.uniform(0, 0.9) * whole["seconds"])
        if process.is_alive():
            kill(process.pid or 0)
        process.join(timeout=60)
        interrupted += not (folder / "summary.json").exists()
        again = command("resume", folder, "--json", "--quiet", "--workers", rng.choice([1, 2])).result
        assert again["digest"] == whole["digest"]
        assert measured(folder) == reference
    assert interrupted >= instants // 2


@pytest.mark.exhaustive
def test_a_real_process_killed_and_resumed_and_killed_again(command: Command, tmp_path: Path) -> None:
    words = ("scaffold", *LONGER, "--rounds", 150, "--checkpoint-seconds", 0, "--workers", 2, "--quiet")
    whole = command("run", *words, "--out", "whole", "--json").result
    metrics = tmp_path / "r" / "metrics.jsonl"
    for rounds, arguments in ((5, ["run", *words, "--out", "r"]), (40, ["resume", "r", "--quiet"])):
        process = subprocess.Popen([sys.executable, "-m", "fedloom", *map(str, arguments)], cwd=tmp_path)
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < rounds:
            assert process.poll() is None
            time.sleep(0.002)  # nothing tells of another process's rounds but its file
        kill(process.pid)
        assert process.wait(timeout=60) == -signal.SIGKILL
    assert not (tmp_path / "r" / "summary.json").exists()
    assert command("resume", "r", "--json").result["digest"] == whole["digest"]
    assert measured(tmp_path / "r") == measured(tmp_path / "whole")


class Killed(BaseException):
    """The instant at which a process would have died."""


class FileOperations:
    """Counts what is done to files below a folder, and dies at the n-th time, before or after doing it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.count, self.fatal, self.after = str(folder), 0, -1, False
        for name in ("open", "replace", "unlink", "mkdir"):
            self._watch(monkeypatch, Path, name)
        self._watch(monkeypatch, os, "fsync")

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(first: Any, *arguments: Any, **options: Any) -> Any:
            reading = name == "open" and (*arguments, "r")[0] in ("r", "rb")
            if reading or not (name == "fsync" or str(first).startswith(self.folder)):
                return real(first, *arguments, **options)
            self.count += 1
            fatal = self.count == self.fatal
            if fatal and not self.after:
                raise Killed
            result = real(first, *arguments, **options)
            if fatal:
                if name == "open":
                    result.write(b"half of it"[:5] if "b" in arguments[0] else '{"rou')
                    result.close()
                raise Killed
            return result

        monkeypatch.setattr(owner, name, watched)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FileOperations:
    return FileOperations(monkeypatch, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("beside", [None, torch.device("cpu")])
def test_dying_at_any_file_operation_loses_nothing(
    operations: FileOperations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: torch.device | None
) -> None:
    """Also where checkpoints are written beside the next rounds, as on a GPU."""
    monkeypatch.setattr("fedloom.runs.loop._beside", lambda _: beside)
    settings = {key: value for key, value in TINY.items() if key != "report"}
    config = make_config(
        {**settings, "method": "scaffold", "checkpoint_seconds": 0, "engine": "sequential", "keep_checkpoints": 1}
    )
    whole = execute_run(resolve_run(config), out=tmp_path / "whole", report=False)
    total, reference = operations.count, measured(whole.path)
    assert total > 60
    rng = random.Random(1)
    instants = [(n, after) for n in range(1, total + 1) for after in (False, True)]
    for n, after in sorted(rng.sample(instants, 60)):
        folder = tmp_path / f"{n}-{after}"
        operations.count, operations.fatal, operations.after = 0, n, after
        with pytest.raises(Killed):
            execute_run(resolve_run(config), out=folder, report=False)
        operations.fatal = -1
        if (folder / "config.toml").exists():
            run = resume(folder, report=False)
        else:
            run = execute_run(resolve_run(config), out=folder, report=False)
        assert run.digest == whole.digest, (n, after)
        assert measured(folder) == reference, (n, after)


def test_dying_again_and_again_while_resuming(operations: FileOperations, tmp_path: Path) -> None:
    """Each try gets a few file operations further and dies; in the end the run is done, with the same bits."""
    settings = {**TINY, "checkpoint_seconds": 0, "engine": "sequential"}
    whole = tiny(tmp_path / "whole", "scaffold", **settings)
    folder, tries = tmp_path / "r", 0
    while not (folder / "summary.json").exists():
        operations.count, operations.fatal, operations.after = 0, 26 + tries % 3, tries % 2 == 0
        tries += 1
        assert tries < 60, "it gets nowhere"
        try:
            if (folder / "config.toml").exists():
                resume(folder, report=False)
            else:
                tiny(folder, "scaffold", **settings)
        except Killed:
            continue
    operations.fatal = -1
    assert tries > 4
    assert resume(folder).digest == whole.digest
    assert measured(folder) == measured(whole.path)


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_line_of_metrics_that_was_cut_off_is_made_good(tmp_path: Path, cut: int) -> None:
    run = tiny(tmp_path / "r", "scaffold", checkpoint_seconds=0)
    reference = measured(run.path)
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    (run.path / "summary.json").unlink()
    assert resume(run.path, report=False).digest == run.digest
    assert measured(run.path) == reference


def test_old_checkpoints_are_swept_and_the_kept_ones_are_whole(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", "scaffold", checkpoint_seconds=0, keep_checkpoints=2, rounds=6)
    folder = run.path / "checkpoints"
    assert sorted(path.name for path in folder.glob("round-*.json")) == ["round-000005.json", "round-000006.json"]
    (run.path / "summary.json").unlink()
    (folder / "round-000006.safetensors").write_bytes(b"")
    assert resume(run.path, report=False).digest == run.digest
    assert measured(run.path) == measured(tiny(tmp_path / "s", "scaffold", rounds=6).path)
