"""Tests of checkpoints written in the background.

They come from copies, one at a time, and lose nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedloom
from fedloom.errors import FedloomError
from fedloom.runs import checkpoints as beside
from fedloom.runs import loop
from fedloom.runs.callback import Callback
from fedloom.runs.checkpoints import Checkpoints, _BackgroundWriter, _snapshot_tensors
from fedloom.runs.execute import resume
from fedloom.training.local_training import ClientStates
from fedloom.utils.storage import StorageWriteSchedule, write_json, write_safetensors

CPU = torch.device("cpu")
RUN: dict[str, Any] = {
    "data": "digits", "model": "logreg", "clients": 6, "clients_per_round": 3, "rounds": 4, "steps": 2,
    "engine": "sequential",
    "report": False,
}  # fmt: skip


class Killed(BaseException):
    """The process dies here."""


class Held:
    """Holds up the writing of tensors until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go, self.waiting = threading.Event(), threading.Event()
        patch.setattr("fedloom.runs.checkpoints.write_safetensors", self._write)

    def _write(self, path: Path, tensors: dict[str, Tensor], check_cancelled: Callable[[], None]) -> str:
        self.waiting.set()
        assert self.go.wait(30), "nobody let it go"
        return write_safetensors(path, tensors, check_cancelled=check_cancelled)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    one = Held(monkeypatch)
    yield one
    one.go.set()


def homes_of(values: dict[int, float]) -> ClientStates:
    homes = ClientStates({"c": (3,)}, torch.float32)
    for client, value in values.items():
        homes.save(client, {"c": torch.full((3,), value)})
    return homes


def loaded(folder: Path) -> tuple[int, list[float], dict[int, float]]:
    """The newest checkpoint: its round, its model, what clients keep."""
    homes = homes_of({})
    latest = Checkpoints(folder).load_latest(homes)
    assert latest is not None
    return latest[0], latest[1]["model"].tolist(), {c: float(homes.get(c)["c"][0]) for c in homes.client_ids()}


def test_what_changes_while_it_is_written_is_written_as_it_was(tmp_path: Path, held: Held) -> None:
    checkpoints, model, homes, notes = Checkpoints(tmp_path), torch.ones(2), homes_of({1: 1.0}), ["before"]
    checkpoints.save(1, {"model": model, "notes": notes}, homes, background_device=CPU)
    assert held.waiting.wait(30)
    model.fill_(7)
    notes.append("after")
    homes.save(1, {"c": torch.full((3,), 7.0)})
    assert homes.changed == {1}
    held.go.set()
    checkpoints.wait_until_written()
    assert loaded(tmp_path) == (1, [1.0, 1.0], {1: 1.0})
    latest = Checkpoints(tmp_path).load_latest(homes_of({}))
    assert latest is not None
    assert latest[1]["notes"] == ["before"]


def test_until_it_is_whole_the_one_before_counts(tmp_path: Path, held: Held) -> None:
    checkpoints, homes = Checkpoints(tmp_path, keep_checkpoints=1), homes_of({1: 1.0})
    held.go.set()
    checkpoints.save(1, {"model": torch.ones(2)}, homes, background_device=CPU)
    checkpoints.wait_until_written()
    held.go.clear()
    held.waiting.clear()
    homes.save(1, {"c": torch.full((3,), 2.0)})
    checkpoints.save(2, {"model": torch.zeros(2)}, homes, background_device=CPU)
    assert held.waiting.wait(30)
    assert loaded(tmp_path) == (1, [1.0, 1.0], {1: 1.0})
    held.go.set()
    checkpoints.wait_until_written()
    assert loaded(tmp_path) == (2, [0.0, 0.0], {1: 2.0})
    assert checkpoints.rounds() == [2]


def test_the_next_one_waits_for_it(tmp_path: Path, held: Held) -> None:
    checkpoints, homes = Checkpoints(tmp_path, keep_checkpoints=5), homes_of({})
    checkpoints.save(1, {"model": torch.ones(2)}, homes, background_device=CPU)
    checkpoints.wait_until_written(wait=False)
    assert checkpoints.rounds() == []
    threading.Timer(0.05, held.go.set).start()
    checkpoints.save(2, {"model": torch.zeros(2)}, homes)
    assert checkpoints.rounds() == [2, 1]


def test_it_is_never_time_for_another_while_one_is_written(tmp_path: Path, held: Held) -> None:
    checkpoints, rhythm = Checkpoints(tmp_path), StorageWriteSchedule(1e-9)
    assert rhythm.due(checkpoints.write_seconds)
    checkpoints.save(1, {"model": torch.ones(2)}, homes_of({}), background_device=CPU)
    rhythm.saved()
    assert held.waiting.wait(30)
    assert not any(rhythm.due(checkpoints.write_seconds) for _ in range(1000))
    held.go.set()
    checkpoints.wait_until_written()
    took = checkpoints.write_seconds
    time.sleep(0.01)
    assert checkpoints.write_seconds == took, "once it is written its time stands"


@pytest.mark.parametrize("fails", ["round-000002.safetensors", "clients-000002.safetensors", "round-000002.json"])
@pytest.mark.parametrize("told", ["by settling", "by looking", "by the next"])
def test_what_goes_wrong_is_told_once_and_nothing_is_lost(
    fails: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, homes = Checkpoints(tmp_path), homes_of({1: 1.0, 2: 1.0, 3: 1.0})
    checkpoints.save(1, {"model": torch.ones(2)}, homes)
    homes.save(2, {"c": torch.full((3,), 2.0)})
    done = threading.Event()

    def full(path: Path, *given: Any, **named: Any) -> str:
        if path.name == fails:
            done.set()
            raise FedloomError("cannot write: No space left on device.")
        return (
            write_safetensors(path, *given, **named) if path.suffix == ".safetensors" else str(write_json(path, *given))
        )

    with monkeypatch.context() as patch:
        patch.setattr("fedloom.runs.checkpoints.write_safetensors", full)
        patch.setattr("fedloom.runs.checkpoints.write_json", full)
        checkpoints.save(2, {"model": torch.zeros(2)}, homes, background_device=CPU)
        assert done.wait(30)

        def tell() -> None:
            if told == "by settling":
                checkpoints.wait_until_written()
            elif told == "by the next":
                checkpoints.save(3, {"model": torch.zeros(2)}, homes)
            else:
                while True:
                    checkpoints.wait_until_written(wait=False)

        with pytest.raises(FedloomError, match="No space left"):
            tell()
    checkpoints.wait_until_written()
    assert loaded(tmp_path) == (1, [1.0, 1.0], {1: 1.0, 2: 1.0, 3: 1.0})
    homes.save(3, {"c": torch.full((3,), 3.0)})
    checkpoints.save(3, {"model": torch.full((2,), 3.0)}, homes)
    assert loaded(tmp_path) == (3, [3.0, 3.0], {1: 1.0, 2: 2.0, 3: 3.0})


@given(
    plan=st.lists(
        st.tuples(st.booleans(), st.dictionaries(st.integers(0, 4), st.floats(-9, 9, width=32))), min_size=1, max_size=8
    ),
    kept=st.integers(1, 3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_order_of_both_ways_saves_the_same(
    plan: list[tuple[bool, dict[int, float]]], kept: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same files, to the byte, as one after the other."""
    contents = []
    for mixed in (False, True):
        folder = tmp_path_factory.mktemp("both")
        checkpoints, homes, model = Checkpoints(folder, kept), homes_of({}), torch.zeros(3)
        for round, (aside, changes) in enumerate(plan, start=1):
            model.fill_(round)
            for client, value in changes.items():
                homes.save(client, {"c": torch.full((3,), value)})
            checkpoints.save(round, {"model": model}, homes, background_device=CPU if mixed and aside else None)
        checkpoints.wait_until_written()
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert contents[0] == contents[1]


def test_copies_are_apart_and_kept_as_they_are() -> None:
    originals = [torch.arange(6.0).view(2, 3).t(), torch.ones(1).expand(4), torch.tensor(3), torch.empty(0, 2)]
    copies = _snapshot_tensors(originals)
    assert copies is not None
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(originals, copies, strict=True))
    originals[0].zero_()
    assert float(copies[0].sum()) == 15.0


def test_without_memory_for_copies_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def noted(path: Path, tensors: dict[str, Tensor], **_: Any) -> str:
        threads.add(threading.get_ident())
        return write_safetensors(path, tensors)

    monkeypatch.setattr("fedloom.runs.checkpoints.write_safetensors", noted)
    monkeypatch.setattr(beside, "MOST_ON_HOST", 39)
    checkpoints, homes = Checkpoints(tmp_path), homes_of({})
    checkpoints.save(1, {"model": torch.ones(10)}, homes, background_device=CPU)
    assert checkpoints.rounds() == [1]
    assert threads == {threading.get_ident()}
    monkeypatch.setattr(beside, "MOST_ON_HOST", 40)
    checkpoints.save(2, {"model": torch.ones(10)}, homes, background_device=CPU)
    checkpoints.wait_until_written()
    assert len(threads) == 2


def test_a_device_that_has_no_room_after_all_gives_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(Tensor):
        def clone(self, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
            raise torch.OutOfMemoryError("there is none")

    monkeypatch.setattr(Tensor, "detach", lambda self: self)
    assert _snapshot_tensors([torch.ones(2).as_subclass(Large)]) is None


def test_work_is_done_one_after_the_other() -> None:
    order: list[str] = []
    go, work = threading.Event(), _BackgroundWriter()

    def first() -> None:
        assert go.wait(30)
        order.append("first")

    work.start(first, CPU)
    assert work.busy
    threading.Timer(0.05, go.set).start()
    work.start(lambda: order.append("second"), CPU)
    work.wait_until_written()
    assert order == ["first", "second"]
    assert not work.busy


def test_what_nobody_wants_any_more_ends_soon_and_the_one_before_counts(tmp_path: Path, held: Held) -> None:
    checkpoints, homes = Checkpoints(tmp_path), homes_of({1: 1.0})
    held.go.set()
    checkpoints.save(1, {"model": torch.ones(2)}, homes)
    held.go.clear()
    held.waiting.clear()
    homes.save(1, {"c": torch.full((3,), 2.0)})
    checkpoints.save(2, {"model": torch.zeros(2)}, homes, background_device=CPU)
    assert held.waiting.wait(30)
    threading.Timer(0.05, held.go.set).start()
    checkpoints.cancel()
    assert loaded(tmp_path) == (1, [1.0, 1.0], {1: 1.0})
    assert not list(tmp_path.glob(".*")), "and nothing half done is left"
    checkpoints.save(3, {"model": torch.zeros(2)}, homes, background_device=CPU)
    checkpoints.wait_until_written()
    assert loaded(tmp_path) == (3, [0.0, 0.0], {1: 2.0}), "whoever goes on all the same loses nothing"


def aside(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Runs on the CPU write beside too; returns the list of their checkpoints, and which were written so."""
    made: list[tuple[int, bool]] = []
    save: Callable[..., None] = Checkpoints.save

    def noted(self: Checkpoints, round: int, *rest: Any, background_device: torch.device | None) -> None:
        made.append((round, background_device is not None))
        save(self, round, *rest, background_device=background_device)

    monkeypatch.setattr(Checkpoints, "save", noted)
    monkeypatch.setattr(loop, "_beside", lambda _: CPU)
    return made


@pytest.mark.parametrize("method", ["scaffold", "fedcda", "fedcross"])
def test_a_run_is_the_same_and_its_last_checkpoint_is_waited_for(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in (folder / "checkpoints").glob("*.safetensors")}

    plain = fedloom.run(method, **RUN, checkpoint_seconds=0, out=tmp_path / "plain")
    made = aside(monkeypatch)
    run = fedloom.run(method, **RUN, checkpoint_seconds=0, out=tmp_path / "aside")
    assert run.digest == plain.digest
    assert made == [(1, True), (2, True), (3, True), (4, False)]
    assert files(run.path) == files(plain.path)


class Stops(Callback):
    def __init__(self) -> None:
        self.left = 2

    def should_stop(self) -> bool:
        self.left -= 1
        return not self.left


def test_a_run_that_is_stopped_has_its_checkpoint_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fedloom.run("scaffold", **RUN, checkpoint_seconds=0, out=tmp_path / "whole")
    made = aside(monkeypatch)
    with pytest.raises(FedloomError, match="stopped after round 2"):
        fedloom.run("scaffold", **RUN, checkpoint_seconds=0, out=tmp_path / "r", callbacks=[Stops()])
    assert made == [(1, True), (2, True)]
    assert resume(tmp_path / "r", report=False).digest == whole.digest


def test_a_run_that_fails_ends_its_writing_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Held) -> None:
    """Nothing is written to a run that is over, and the reason that is told is the run's."""
    aside(monkeypatch)
    play = fedloom.runs.round.RoundRunner.run_round

    def dies(self: Any, round: int) -> dict[str, Any]:
        if round == 1:
            assert held.waiting.wait(30)
            threading.Timer(0.1, held.go.set).start()
            raise Killed
        return play(self, round)

    monkeypatch.setattr(fedloom.runs.round.RoundRunner, "run_round", dies)
    with pytest.raises(Killed):
        fedloom.run("scaffold", **RUN, checkpoint_seconds=0, out=tmp_path / "r")
    assert Checkpoints(tmp_path / "r" / "checkpoints").rounds() == [1]


def test_ctrl_c_twice_does_not_wait_for_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Held
) -> None:
    aside(monkeypatch)
    play, ended = fedloom.runs.round.RoundRunner.run_round, list[bool]()

    def interrupted(self: Any, round: int) -> dict[str, Any]:
        if round == 1:
            assert held.waiting.wait(30)
            threading.Timer(0.1, held.go.set).start()
            raise KeyboardInterrupt
        return play(self, round)

    class Told(Callback):
        def on_run_end(self) -> None:
            ended.append(True)

    monkeypatch.setattr(fedloom.runs.round.RoundRunner, "run_round", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fedloom.run("scaffold", **RUN, checkpoint_seconds=0, out=tmp_path / "r", callbacks=[Told()])
    assert Checkpoints(tmp_path / "r" / "checkpoints").rounds() == [], "it was broken off"
    assert ended == [True]


def test_a_disk_that_is_full_meanwhile_soon_ends_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside(monkeypatch)
    play, played, failed = fedloom.runs.round.RoundRunner.run_round, list[int](), threading.Event()

    def full(path: Path, *_: Any, **__: Any) -> str:
        failed.set()
        raise FedloomError(f"cannot write {path}: No space left on device.")

    def counted(self: Any, round: int) -> dict[str, Any]:
        played.append(round)
        assert round == 0 or failed.wait(30)
        time.sleep(0.01)
        return play(self, round)

    monkeypatch.setattr("fedloom.runs.checkpoints.write_safetensors", full)
    monkeypatch.setattr(fedloom.runs.round.RoundRunner, "run_round", counted)
    with pytest.raises(FedloomError, match=r"cannot write .*round-000001\.safetensors: No space left on device"):
        fedloom.run("fedavg", **{**RUN, "rounds": 99}, checkpoint_seconds=1e-9, out=tmp_path / "r")
    assert len(played) < 99, "not only in the end"
    assert not (tmp_path / "r" / "summary.json").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("method", ["scaffold", "fedcda", "fedcross"])
def test_on_a_gpu_what_is_written_beside_is_what_is_written_at_once(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**RUN, "rounds": 8, "engine": "cuda", "device": "cuda", "checkpoint_seconds": 0, "keep_checkpoints": 8}
    found = []
    for device in (torch.device("cuda"), None):
        with monkeypatch.context() as patch:
            patch.setattr(loop, "_beside", lambda _, device=device: device)
            run = fedloom.run(method, **settings, out=tmp_path / str(device))
        files = {p.name: p.read_bytes() for p in (run.path / "checkpoints").glob("*.safetensors")}
        found.append((run.digest, files))
    assert found[0] == found[1]
    assert len(found[0][1]) >= 8
