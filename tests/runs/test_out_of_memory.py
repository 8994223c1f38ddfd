"""Tests of server work out of memory: fewer slots and the same bits, or an error."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.cli import main
from fedloom.config import make_config
from fedloom.engines.base import Engine
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.errors import InsufficientMemoryError
from fedloom.methods.fedavg import FedAvgServer
from fedloom.runs.callback import Callback
from fedloom.runs.concurrent import PlannedRun, run_concurrently
from fedloom.runs.execute import execute_run, resume
from fedloom.runs.out_of_memory import explain_out_of_memory, retry_with_fewer_slots
from fedloom.runs.resolve import resolve_run
from fedloom.runs.result import RunResult
from fedloom.runs.round import RoundRunner
from fedloom.training.context import TrainingContext
from tests.support.callbacks import Eye

RUN: dict[str, Any] = {
    "data": "digits", "model": "logreg", "clients": 8, "clients_per_round": 8, "rounds": 4, "steps": 2,
    "engine": "sequential",
}  # fmt: skip


class Heavy:
    """What the server has in hand when memory ends."""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[CudaEngine]:
    """All engines that are made, which are those of a GPU, with slots."""
    made: list[CudaEngine] = []

    def make(chosen: type[Engine], shop: TrainingContext, config: Any) -> Engine:
        made.append(CudaEngine(shop, "cpu", config.slots))
        return made[-1]

    monkeypatch.setattr("fedloom.runs.build.create_engine", make)
    return made


def short_in_collecting(monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool]) -> list[weakref.ref[Heavy]]:
    """Let memory end at the end of a round's collecting; gives what was in hand each time."""
    collect, held = FedAvgServer.aggregate, list[weakref.ref[Heavy]]()

    def collecting(self: FedAvgServer, round: int, updates: Iterator[Any]) -> None:
        collect(self, round, updates)
        in_hand = Heavy()
        if when(round):
            held.append(weakref.ref(in_hand))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(FedAvgServer, "aggregate", collecting)
    return held


@pytest.mark.parametrize("again", [False, True], ids=["from the beginning", "resumed"])
def test_the_server_has_more_room_where_fewer_clients_train_at_once(
    again: bool, engines: list[CudaEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = fedloom.run("fedavg", out=tmp_path / "a", report=False, **RUN)
    out = tmp_path / "b"
    if again:
        with pytest.raises(fedloom.errors.RunStopped):
            execute_run(
                resolve_run(make_config({**RUN, "method": "fedavg"})),
                out=out,
                callbacks=[Eye(stop_after=2)],
                report=False,
            )
    engines.clear()
    held = short_in_collecting(monkeypatch, lambda round: round == 2 and engines[-1].concurrency > 2)
    eye = Eye()
    if again:
        found = resume(out, callbacks=[eye], report=False, checkpoint_seconds=7.0)
    else:
        found = execute_run(
            resolve_run(make_config({**RUN, "method": "fedavg"})), out=out, callbacks=[eye], report=False
        )
    assert found.digest == expected.digest
    assert [record["round"] for record in found.history] == [0, 1, 2, 3, 4]
    assert [note.partition("; ")[2] for note in eye.notes] == [
        "the run continues from the last checkpoint with 4 clients at once, with the same result.",
        "the run continues from the last checkpoint with 2 clients at once, with the same result.",
    ]
    assert len(held) == 2
    assert [engine.gpus[0].max_slots for engine in engines] == [16, 4, 2]


def test_a_run_that_is_verified_goes_on_with_the_start_that_it_was_given(
    engines: list[CudaEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file that it was once taken from is gone."""
    fedloom.run("fedavg", out=tmp_path / "a", report=False, **RUN)
    model = (tmp_path / "a" / "model.safetensors").rename(tmp_path / "start.safetensors")
    run = fedloom.run("fedavg", out=tmp_path / "b", report=False, init=str(model), **RUN)
    model.unlink()
    held = short_in_collecting(monkeypatch, lambda round: round == 2 and engines[-1].concurrency > 4)
    assert fedloom.verify(tmp_path / "b") == (run.digest, run.digest)
    assert len(held) == 1


def test_what_a_failed_attempt_had_is_let_go_before_the_next() -> None:
    held: list[weakref.ref[Heavy]] = []
    alive: list[bool] = []

    def work() -> None:
        in_hand = Heavy()
        held.append(weakref.ref(in_hand))
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError("CUDA out of memory, again.") from error

    class Slots:
        concurrency = 2

    def attempt(slots: int | None) -> None:
        alive.extend(ref() is not None for ref in held)
        if slots is None:
            with explain_out_of_memory("cuda", Slots()):  # type: ignore[arg-type]
                work()

    retry_with_fewer_slots(attempt, Callback())
    assert alive == [False]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "cpu has not enough memory for the work of the server"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "this machine has not enough memory"),
        (MemoryError(), "this machine has not enough memory"),
    ],
)
@pytest.mark.parametrize("where", ["fedloom.runs.build.load_run_data", "fedloom.runs.round.RoundRunner.run_round"])
def test_a_user_is_told_in_a_sentence(
    error: BaseException, words: str, where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fail(*given: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(where, fail)
    with pytest.raises(SystemExit) as ended:
        main.main(["run", "fedavg", "--rounds", "2", "--engine", "sequential", "--out", str(tmp_path / "run")])
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told
    assert (tmp_path / "run").exists() is (where == "fedloom.runs.round.RoundRunner.run_round")


def test_other_failures_are_not_taken_for_it() -> None:
    with pytest.raises(RuntimeError, match="shapes do not match"), explain_out_of_memory("cuda"):
        raise RuntimeError("shapes do not match")


def job(patch: pytest.MonkeyPatch, folder: Path, name: str, seed: int, short: Callable[[], bool]) -> PlannedRun:
    """A run that finds no memory as long as `short` says so, in its third round and the ones that follow."""
    config, place = make_config({**RUN, "method": "fedavg", "seed": seed, "checkpoint_seconds": 0}), folder / name
    play = RoundRunner.run_round

    def run_round(self: RoundRunner, round: int) -> dict[str, Any]:
        if self.config.seed == seed and round >= 2 and short():
            raise InsufficientMemoryError("the GPU has not enough memory.")
        return play(self, round)

    def run(eye: Callback) -> RunResult:
        if (place / "config.toml").exists():
            return resume(place, callbacks=[eye], report=False)
        return execute_run(resolve_run(config), out=place, callbacks=[eye], report=False)

    patch.setattr(RoundRunner, "run_round", run_round)
    return place, config, run


def test_a_run_without_memory_beside_others_goes_on_alone_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [job(monkeypatch, tmp_path / "alone", f"{n}", n, lambda: False)[2](Callback()).digest for n in range(3)]
    others: list[str] = []

    def short() -> bool:
        return len(others) < 2

    made = [job(monkeypatch, tmp_path / "together", f"{n}", n, short if n == 0 else lambda: False) for n in range(3)]
    for n in (1, 2):
        place, config, run = made[n]

        def noting(eye: Callback, run: Callable[[Callback], RunResult] = run) -> RunResult:
            finished = run(eye)
            others.append(finished.digest)
            return finished

        made[n] = (place, config, noting)
    eye = Eye()
    together = run_concurrently(made, 1, eye, tmp_path)
    assert [run.digest for run in together] == alone
    assert eye.rounds == list(range(1, 13))
    assert [note.partition(": ")[0] for note in eye.notes] == ["0"]


def test_one_that_has_no_memory_even_alone_ends_in_its_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [job(monkeypatch, tmp_path, f"{n}", n, (lambda: True) if n == 0 else (lambda: False)) for n in range(2)]
    eye = Eye()
    with pytest.raises(InsufficientMemoryError, match="not enough memory"):
        run_concurrently(made, 2, eye, tmp_path)
    assert (tmp_path / "1" / "summary.json").exists()
    assert eye.ended


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_that_is_really_full_a_run_goes_on_with_fewer_slots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {**RUN, "engine": "cuda", "device": "cuda"}
    expected = fedloom.run("fedavg", out=tmp_path / "a", report=False, **given)
    play, counts = RoundRunner.run_round, list[int]()

    def greedy(self: Any, round: int) -> dict[str, Any]:
        record: dict[str, Any] = play(self, round)
        if round == 2:
            counts.append(self.engine.concurrency)
            torch.empty(1 << 42 if self.engine.concurrency > 2 else 1, dtype=torch.uint8, device="cuda")
        return record

    monkeypatch.setattr(RoundRunner, "run_round", greedy)
    assert fedloom.run("fedavg", out=tmp_path / "b", report=False, **given).digest == expected.digest
    assert counts == [8, 4, 2]
