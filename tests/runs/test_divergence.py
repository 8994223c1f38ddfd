"""Runs that diverge stop, say so, and are marked."""

from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.errors import TrainingDivergedError
from fedloom.report import read_run_record
from fedloom.runs.metrics import DivergenceMonitor
from tests.support.refusals import TINY, Command
from tests.support.small_runs import TINY as SETTINGS

SAID = r"training diverged in round 3: 6 of 6 updates were non-finite; lower --lr"


@pytest.mark.parametrize(
    ("rounds", "stops"),
    [
        ([(1, 2)] * 3, 3),
        ([(1, 2), (1, 2), (0, 2), (1, 2), (2, 2), (1, 2)], 6),
        ([(1, 3)] * 9, None),
        ([(0, 0)] * 9, None),
        ([(2, 2), (0, 0), (2, 2), (2, 2)], None),
    ],
)
def test_three_successive_rounds_count(rounds: list[tuple[int, int]], stops: int | None) -> None:
    monitor = DivergenceMonitor()
    stopped = None
    for number, (non_finite, received) in enumerate(rounds, start=1):
        again = DivergenceMonitor()  # as after a resume
        again.load_state_dict(monitor.state_dict())
        again.add_round(number, non_finite, received)
        monitor = again
        stopped = stopped or (number if monitor.message else None)
    assert stopped == stops


def test_a_diverged_run_is_marked(tmp_path: Path) -> None:
    with pytest.raises(TrainingDivergedError, match=SAID):
        fedloom.run(
            "fedavg", out=tmp_path / "a", **{**SETTINGS, "model": "mlp", "rounds": 9, "lr": 1e30, "report": True}
        )
    history = read_run_record(tmp_path / "a").history
    assert [record["round"] for record in history] == [0, 1, 2, 3]
    assert "training diverged in round 3" in (tmp_path / "a" / "report.html").read_text()
    with pytest.raises(TrainingDivergedError, match=SAID):
        fedloom.resume(tmp_path / "a")
    before, now = fedloom.verify(tmp_path / "a")
    assert before == now
    with pytest.raises(fedloom.InputError, match="cannot be extended: training diverged"):
        fedloom.resume(tmp_path / "a", rounds=12)


def test_a_killed_run_still_knows_that_it_diverged(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "model": "mlp", "rounds": 9, "lr": 1e30}
    with pytest.raises(TrainingDivergedError):
        fedloom.run("fedavg", out=tmp_path / "a", **settings)
    (tmp_path / "a" / "summary.json").unlink()
    with pytest.raises(TrainingDivergedError, match=SAID):
        fedloom.resume(tmp_path / "a")


def test_a_run_that_learns_is_not_stopped_by_clients_without_steps(tmp_path: Path) -> None:
    """Their loss is NaN because nothing was trained."""
    assert fedloom.run("fedavg", out=tmp_path / "a", **{**SETTINGS, "rounds": 5, "epochs": 0}).summary["rounds"] == 5


def test_the_command_exits_with_1_and_a_comparison_finishes_its_other_runs(command: Command, tmp_path: Path) -> None:
    words = ("--rounds", 5, "--model", "mlp", "--quiet")
    ended = command("run", "fedavg", *TINY, *words, "--lr", 1e30, "--out", "r")
    assert ended.code == 1
    assert "fedloom: training diverged in round 3: 4 of 4 updates were non-finite; lower --lr" in ended.err
    ended = command("compare", "fedavg:lr=1e30", "fedavg", *TINY, *words, "--seeds", 2, "--out", "c")
    assert ended.code == 1
    assert "2 of 4 runs diverged" in ended.err
    assert len(list((tmp_path / "c").glob("*/summary.json"))) == 4
    assert "diverged" in ended.out
    again = command("compare", "fedavg:lr=1e30", "fedavg", *TINY, *words, "--seeds", 2, "--out", "c")
    assert again.code == 1
    assert "training diverged in round 3" in (tmp_path / "c" / "report.html").read_text()
