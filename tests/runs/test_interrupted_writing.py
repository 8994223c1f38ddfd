"""Tests of an interrupt while a checkpoint is written."""

import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom
from fedloom.errors import FedloomError
from fedloom.runs.checkpoints import Checkpoints, _BackgroundWriter
from fedloom.runs.round import RoundRunner
from fedloom.training.local_training import ClientStates
from fedloom.utils.storage import write_safetensors

CPU = torch.device("cpu")


def test_an_interrupt_is_told_where_nothing_was_ever_written_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is on a CPU, where each round looks all the same whether something went wrong with it."""

    def interrupted(_: _BackgroundWriter) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_BackgroundWriter, "wait_until_written", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Checkpoints(tmp_path).wait_until_written(wait=False)


def test_what_was_broken_off_does_not_break_off_one_that_is_written_at_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.cancel()
    checkpoints.save(1, {"model": torch.ones(2)}, ClientStates({}, torch.float32))
    assert checkpoints.rounds() == [1]


def test_who_was_interrupted_while_waiting_can_wait_again() -> None:
    """Nothing is written to a run that is over."""
    work, go, done = _BackgroundWriter(), threading.Event(), list[bool]()

    def slow() -> None:
        assert go.wait(30), "nobody let it go"
        done.append(True)

    work.start(slow, CPU)
    threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        work.wait_until_written()
    assert work.busy
    threading.Timer(0.1, go.set).start()
    work.wait_until_written()
    assert done == [True]


def test_it_is_broken_off_within_what_the_clients_keep_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, homes = Checkpoints(tmp_path), ClientStates({"c": (3,)}, torch.float32)
    homes.save(1, {"c": torch.ones(3)})
    reached, go = threading.Event(), threading.Event()

    def held(path: Path, tensors: Mapping[str, Tensor], check_cancelled: Callable[[], None]) -> str:
        if path.name.startswith("clients"):
            reached.set()
            assert go.wait(30), "nobody let it go"
        return write_safetensors(path, tensors, check_cancelled=check_cancelled)

    monkeypatch.setattr("fedloom.runs.checkpoints.write_safetensors", held)
    checkpoints.save(1, {"model": torch.ones(2)}, homes, background_device=CPU)
    assert reached.wait(30)
    threading.Timer(0.05, go.set).start()
    checkpoints.cancel()
    assert checkpoints.rounds() == []
    assert homes.changed == {1}, "and is to be written next time"


def test_what_ended_a_run_is_told_and_not_what_became_of_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, over = RoundRunner.run_round, threading.Event()

    def full(path: Path, *_: Any, **__: Any) -> str:
        assert over.wait(30), "the run does not end"
        raise FedloomError(f"cannot write {path}: No space left on device.")

    def fails(self: RoundRunner, round: int) -> dict[str, Any]:
        if round == 1:
            threading.Timer(0.1, over.set).start()
            raise FedloomError("round 2: nobody answered.")
        return play(self, round)

    monkeypatch.setattr("fedloom.runs.loop._beside", lambda _: CPU)
    monkeypatch.setattr("fedloom.runs.checkpoints.write_safetensors", full)
    monkeypatch.setattr(RoundRunner, "run_round", fails)
    with pytest.raises(FedloomError, match="nobody answered"):
        fedloom.run("fedavg", model="logreg", clients=4, clients_per_round=2, rounds=3, steps=1, engine="sequential",
                    report=False, checkpoint_seconds=0, out=tmp_path / "run")  # fmt: skip
