"""Tests that checkpoints restore the state of all parts and clients.

Only changes are written, and no crash loses the last checkpoint.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fedloom
from fedloom.errors import FedloomError, InputError
from fedloom.runs.checkpoints import Checkpoints
from fedloom.training.local_training import ClientStates
from fedloom.utils import storage
from fedloom.utils.storage import LARGEST_SHARE, StorageWriteSchedule, read_json, read_safetensors, write_json

SHAPES = {"c": (3,), "m": (2, 2)}


class Killed(BaseException):
    """The process dies here."""


def state_of(round: int) -> dict[str, Any]:
    """A state that tells rounds apart."""
    return {"server": {"model": torch.full((5,), float(round)), "order": np.arange(round), "best": 0.1 * round}}


def value_of(round: int, client: int) -> dict[str, Tensor]:
    return {"c": torch.full((3,), round + client / 100), "m": torch.full((2, 2), float(client))}


def keep(homes: ClientStates, round: int, clients: list[int]) -> None:
    for client in clients:
        homes.save(client, value_of(round, client))


def empty_homes() -> ClientStates:
    return ClientStates(SHAPES, torch.float32)


def snapshot(state: dict[str, Any], homes: ClientStates) -> str:
    """State and homes as text that is equal exactly when they are."""
    server = state["server"]
    kept = {c: {name: tensor.tolist() for name, tensor in homes.get(c).items()} for c in homes.client_ids()}
    return repr((server["model"].tolist(), list(server["order"]), server["best"], kept))


def loaded(folder: Path, keep: int = 2) -> tuple[int, str]:
    homes = empty_homes()
    latest = Checkpoints(folder, keep).load_latest(homes)
    assert latest is not None
    assert not homes.changed, "what was just read need not be written"
    return latest[0], snapshot(latest[1], homes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_homes_copy_what_they_keep_and_remember_what_changed() -> None:
    homes = empty_homes()
    values = value_of(1, 4)
    homes.save(4, values)
    values["c"].fill_(-1)
    assert torch.equal(homes.get(4)["c"], torch.full((3,), 1.04))
    assert homes.get(5) == {}
    assert 4 in homes
    assert 5 not in homes
    homes.save(2, value_of(1, 2))
    assert homes.client_ids() == [2, 4]
    assert len(homes) == 2
    assert homes.changed == {2, 4}
    nothing = ClientStates({}, torch.float32)
    nothing.save(1, {})
    assert len(nothing) == 0
    assert not nothing.changed


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").load_latest(empty_homes()) is None
    assert Checkpoints(tmp_path / "none").rounds() == []


@given(
    visits=st.lists(st.lists(st.integers(0, 5), max_size=4, unique=True), min_size=1, max_size=7),
    restart=st.integers(0, 7),
    kept=st.integers(1, 3),
)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_kept_checkpoint_is_whole_and_nothing_else_is_there(
    visits: list[list[int]], restart: int, kept: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    checkpoints, homes, taken = Checkpoints(folder, kept), empty_homes(), {}
    for round, clients in enumerate(visits, 1):
        if round == restart and round > 1:  # as a resumed run does
            checkpoints, homes = Checkpoints(folder, kept), empty_homes()
            checkpoints.load_latest(homes)
        keep(homes, round, clients)
        checkpoints.save(round, state_of(round), homes)
        taken[round] = snapshot(state_of(round), homes)
    rounds = sorted(taken, reverse=True)[:kept]
    assert checkpoints.rounds() == rounds
    needed = set()
    for round in rounds:
        assert loaded(folder, kept) == (round, taken[round])
        stored = set(read_json(folder / f"round-{round:06d}.json")["client_files"])
        needed |= stored | {f"round-{round:06d}.json", f"round-{round:06d}.safetensors"}
        if round == rounds[0]:
            everything = names(folder)
        (folder / f"round-{round:06d}.json").unlink()
    assert everything == sorted(needed)


def test_only_changed_clients_are_written(tmp_path: Path) -> None:
    checkpoints, homes = Checkpoints(tmp_path), empty_homes()
    keep(homes, 1, list(range(10)))
    checkpoints.save(1, state_of(1), homes)
    before = (tmp_path / "clients-000001.safetensors").read_bytes()
    keep(homes, 2, [3, 7])
    checkpoints.save(2, state_of(2), homes)
    assert {name.partition("/")[0] for name in read_safetensors(tmp_path / "clients-000002.safetensors")} == {"3", "7"}
    assert (tmp_path / "clients-000001.safetensors").read_bytes() == before
    checkpoints.save(3, state_of(3), homes)
    assert not (tmp_path / "clients-000003.safetensors").exists(), "nothing changed"
    assert loaded(tmp_path) == (3, snapshot(state_of(3), homes))


def test_files_mostly_out_of_date_are_written_anew(tmp_path: Path) -> None:
    checkpoints, homes = Checkpoints(tmp_path, keep_checkpoints=1), empty_homes()
    keep(homes, 1, list(range(10)))
    checkpoints.save(1, state_of(1), homes)
    for round in range(2, 40):
        keep(homes, round, sorted({round % 9, 2 * round % 9, 4}))
        checkpoints.save(round, state_of(round), homes)
        record = read_json(tmp_path / f"round-{round:06d}.json")
        assert sum(size for _, size in record["client_files"].values()) <= 2 * len(homes)
        assert loaded(tmp_path, 1) == (round, snapshot(state_of(round), homes))
    assert not (tmp_path / "clients-000001.safetensors").exists()


def test_strays_are_swept(tmp_path: Path) -> None:
    for stray in (".round-000009.json.part", "clients-000000.safetensors", "round-000077.safetensors"):
        (tmp_path / stray).write_bytes(b"half")
    (tmp_path / "folder").mkdir()
    checkpoints, homes = Checkpoints(tmp_path), empty_homes()
    keep(homes, 1, [1])
    checkpoints.save(1, state_of(1), homes)
    assert names(tmp_path) == [
        "clients-000001.safetensors",
        "folder",
        "round-000001.json",
        "round-000001.safetensors",
    ], "folders are not ours"


# damage


def two_rounds(folder: Path) -> tuple[str, str]:
    """Checkpoints of rounds 1 and 2 with homes; what each holds."""
    checkpoints, homes = Checkpoints(folder), empty_homes()
    keep(homes, 1, [0, 1, 2])
    checkpoints.save(1, state_of(1), homes)
    first = snapshot(state_of(1), homes)
    keep(homes, 2, [1])
    checkpoints.save(2, state_of(2), homes)
    return first, snapshot(state_of(2), homes)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = [truncate, flip, empty, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["round-000002.json", "round-000002.safetensors", "clients-000002.safetensors"])
def test_a_damaged_newest_is_passed_over_and_named(name: str, damage: Callable[[Path], None], tmp_path: Path) -> None:
    first, second = two_rounds(tmp_path)
    assert loaded(tmp_path) == (2, second)
    damage(tmp_path / name)
    assert loaded(tmp_path) == (1, first)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.load_latest(empty_homes())
    if (tmp_path / "round-000002.json").exists():
        assert len(checkpoints.damaged) == 1
        assert name in checkpoints.damaged[0]


@pytest.mark.parametrize("damage", [truncate, flip, empty])
def test_all_damaged_is_an_error(damage: Callable[[Path], None], tmp_path: Path) -> None:
    two_rounds(tmp_path)
    for path in tmp_path.glob("round-*.json"):
        damage(path)
    with pytest.raises(InputError, match=r"round-000002\.json is damaged"):
        Checkpoints(tmp_path).load_latest(empty_homes())


def test_a_file_that_all_need_is_an_error_when_damaged(tmp_path: Path) -> None:
    two_rounds(tmp_path)
    flip(tmp_path / "clients-000001.safetensors")
    with pytest.raises(InputError, match=r"clients-000001\.safetensors is damaged"):
        Checkpoints(tmp_path).load_latest(empty_homes())


def test_another_format_is_said(tmp_path: Path) -> None:
    two_rounds(tmp_path)
    for round in (1, 2):
        path = tmp_path / f"round-{round:06d}.json"
        write_json(path, read_json(path) | {"format": 99})
    with pytest.raises(InputError, match=r"round-000002\.json has format 99; this version of fedloom reads 3\."):
        Checkpoints(tmp_path).load_latest(empty_homes())


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_damaged_future_does_not_push_out_what_is_saved_next(kept: int, tmp_path: Path) -> None:
    """After going back from a damaged round 9, the rounds played again come before it."""
    checkpoints, homes = Checkpoints(tmp_path, keep_checkpoints=4), empty_homes()
    for round in (1, 8, 9):
        keep(homes, round, [round % 3])
        checkpoints.save(round, state_of(round), homes)
    flip(tmp_path / "round-000009.json")
    flip(tmp_path / "round-000008.safetensors")
    checkpoints, homes = Checkpoints(tmp_path, kept), empty_homes()
    latest = checkpoints.load_latest(homes)
    assert latest is not None
    assert latest[0] == 1
    for round in (2, 3, 4):
        keep(homes, round, [0, 1])
        checkpoints.save(round, state_of(round), homes)
        assert loaded(tmp_path, kept) == (round, snapshot(state_of(round), homes))
        assert checkpoints.rounds() == [r for r in (4, 3, 2, 1) if r <= round][:kept]


# crashes


def crash_at(patch: pytest.MonkeyPatch, number: int, error: BaseException) -> list[int]:
    """Let file operation `number` (from 0) fail, a write half done; returns the list that counts them."""
    write, unlink, done = storage.write_atomically, Path.unlink, [0]

    def counted() -> bool:
        done[0] += 1
        return done[0] - 1 == number

    def crashing_write(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
        content = content if isinstance(content, bytes) else b"".join(content)
        if counted():
            path.with_name(f".{path.name}.part").write_bytes(content[: len(content) // 2])
            raise error
        write(path, content)

    def crashing_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix != ".part" or path.exists():  # those that do something
            if counted():
                raise error
            unlink(path, missing_ok)

    patch.setattr(storage, "write_atomically", crashing_write)
    patch.setattr(Path, "unlink", crashing_unlink)
    return done


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("compacts", [False, True])
def test_a_crash_between_any_two_operations_leaves_the_old_or_the_new(
    kept: int, compacts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: set[int] = set()
    for number in range(50):
        folder = tmp_path / str(number)
        checkpoints, homes = Checkpoints(folder, kept), empty_homes()
        for round in (1, 2, 3):
            keep(homes, round, [0, 1, 2] if compacts else [round])
            checkpoints.save(round, state_of(round), homes)
        (folder / ".stray.part").write_bytes(b"")
        old = snapshot(state_of(3), homes)
        keep(homes, 4, [0, 3])
        new = snapshot(state_of(4), homes)
        with monkeypatch.context() as patch:
            done = crash_at(patch, number, Killed())
            try:
                checkpoints.save(4, state_of(4), homes)
                finished = True
            except Killed:
                finished = False
        found, content = loaded(folder, kept)
        assert content == (old if found == 3 else new)
        outcomes.add(found)

        # A resumed run goes on from there and leaves nothing behind.
        checkpoints, homes = Checkpoints(folder, kept), empty_homes()
        checkpoints.load_latest(homes)
        assert not checkpoints.damaged
        for round in range(found + 1, 6):
            keep(homes, round, [0, 3])
            checkpoints.save(round, state_of(round), homes)
        assert loaded(folder, kept) == (5, snapshot(state_of(5), homes))
        assert checkpoints.rounds() == [5, 4][:kept]
        assert not list(folder.glob(".*"))
        if finished:
            assert done[0] == number
            break
    else:
        raise AssertionError("the save never finished")
    assert number >= 5
    assert outcomes == {3, 4}


def test_a_failed_save_may_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the run says so; whoever goes on with the same object saves all that changed."""
    for number in range(3):
        folder = tmp_path / str(number)
        checkpoints, homes = Checkpoints(folder), empty_homes()
        keep(homes, 1, [0, 1, 2])
        checkpoints.save(1, state_of(1), homes)
        keep(homes, 2, [1])
        with monkeypatch.context() as patch:
            crash_at(patch, number, FedloomError("cannot write: No space left on device."))
            with pytest.raises(FedloomError, match="No space left"):
                checkpoints.save(2, state_of(2), homes)
        keep(homes, 3, [2])
        checkpoints.save(3, state_of(3), homes)
        assert loaded(folder) == (3, snapshot(state_of(3), homes))


@given(seconds=st.floats(0, 60), took=st.lists(st.floats(0, 20), min_size=1, max_size=20), round_=st.floats(0.01, 9))
def test_checkpoints_are_as_far_apart_as_was_asked_and_take_little_of_the_time(
    seconds: float, took: list[float], round_: float
) -> None:
    now = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.runs.checkpoints.time.monotonic", lambda: now)
        rhythm, saved_at, last = StorageWriteSchedule(seconds), 0.0, 0.0
        for each in took:
            rounds = 0
            while not rhythm.due(last):
                now, rounds = now + round_, rounds + 1
            least = max(seconds, last / LARGEST_SHARE) if seconds else 0.0
            assert now - saved_at >= least
            assert now - saved_at <= least + round_ + 1e-6, "and no later than the round in which it was due"
            now += each
            rhythm.saved()
            saved_at, last = now, each


@pytest.mark.parametrize(("seconds", "times"), [(0.0, 6), (1e-9, 2), (1e6, 1)])
def test_a_run_whose_checkpoints_take_long_writes_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, times: int
) -> None:
    """With 0 one after every round all the same; the last round's is always written."""
    saved: list[str] = []

    def slow(path: Path, value: Any) -> None:
        saved.append(path.name)
        time.sleep(0.3)  # so that the next is due after 15 s, when this run is over
        write_json(path, value)

    monkeypatch.setattr("fedloom.runs.checkpoints.write_json", slow)
    fedloom.run("fedavg", model="logreg", clients=4, clients_per_round=2, rounds=6, engine="sequential", report=False,
                checkpoint_seconds=seconds, out=tmp_path / "run")  # fmt: skip
    assert len(saved) == times
    assert saved[-1] == "round-000006.json"
