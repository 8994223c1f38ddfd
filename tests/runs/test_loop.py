"""Tests of the loop over rounds: checkpoints when due, callbacks at the end."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.errors import RunStopped
from fedloom.runs import loop
from fedloom.runs.callback import Callback
from fedloom.runs.checkpoints import Checkpoints
from fedloom.runs.round import RoundRunner

RUN: dict[str, Any] = {
    "model": "logreg", "clients": 4, "clients_per_round": 2, "rounds": 8, "steps": 1, "engine": "sequential",
    "report": False,
}  # fmt: skip


@pytest.mark.parametrize(("seconds", "expected"), [(3.0, [3, 6, 8]), (0.0, [*range(1, 9)]), (99.0, [8])])
def test_checkpoints_are_as_many_seconds_apart_as_was_asked(
    seconds: float, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, saved, play = 0.0, list[int](), RoundRunner.run_round

    def one_second(self: RoundRunner, round: int) -> dict[str, Any]:
        nonlocal now
        now += 1.0
        return play(self, round)

    monkeypatch.setattr("fedloom.runs.checkpoints.time.monotonic", lambda: now)
    monkeypatch.setattr(RoundRunner, "run_round", one_second)
    monkeypatch.setattr(Checkpoints, "save", lambda self, round, *_, **__: saved.append(round))
    fedloom.run("fedavg", **RUN, checkpoint_seconds=seconds, out=tmp_path / "run")
    assert saved == expected


class StopAfter(Callback):
    """Stops a run after a round."""

    def __init__(self, round: int) -> None:
        self._last, self._stop = round, False

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        self._stop = record["round"] == self._last

    def should_stop(self) -> bool:
        return self._stop


@pytest.mark.parametrize("record_is_lost", [False, True])
def test_the_checkpoint_of_a_stop_belongs_to_the_lines_before_its_record(record_is_lost: bool, tmp_path: Path) -> None:
    """The record is in metrics.jsonl when the checkpoint is written, and then written again with another time."""
    whole = fedloom.run("fedavg", **RUN, out=tmp_path / "whole")
    path = tmp_path / "run"
    with pytest.raises(RunStopped):
        fedloom.run("fedavg", **RUN, checkpoint_seconds=99.0, out=path, callbacks=[StopAfter(3)])
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    if record_is_lost:
        (path / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    run = fedloom.resume(path, report=False)
    assert run.digest == whole.digest
    assert [record["round"] for record in run.history] == [*range(9)]
    (path / "metrics.jsonl").write_bytes(b"")
    (path / "summary.json").unlink()
    with pytest.raises(fedloom.InputError, match=r"metrics\.jsonl is damaged: lines before round 8 are missing"):
        fedloom.resume(path)


def test_who_looks_on_is_told_of_the_end_however_impatient_people_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C once more, while what was broken off is waited for: a display gives the terminal back all the same."""
    ended: list[bool] = []

    class Told(Callback):
        def on_run_end(self) -> None:
            ended.append(True)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RoundRunner, "run_round", interrupted)
    monkeypatch.setattr(Checkpoints, "wait_until_written", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fedloom.run("fedavg", **RUN, out=tmp_path / "run", callbacks=[Told()])
    assert ended == [True]


def test_on_a_cpu_and_with_models_on_the_disk_nothing_is_written_beside() -> None:
    def chosen(device: str, cache_dir: str | None) -> torch.device | None:
        class Of:
            pass

        experiment: Any = Of()
        experiment.engine, experiment.config = Of(), Of()
        experiment.engine.device, experiment.config.cache_dir = torch.device(device), cache_dir
        return loop._beside(experiment)

    assert chosen("cpu", None) is None
    assert chosen("cuda", "somewhere") is None
    assert chosen("cuda", None) == torch.device("cuda")
