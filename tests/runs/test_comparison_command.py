"""Tests of the command that repeats a comparison."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.report import read_comparison_command
from tests.support.array_data import arrays, network

Command = Callable[..., Any]
SMALL: dict[str, Any] = {"clients": 4, "rounds": 2, "model": "logreg", "steps": 2, "seed": 5, "engine": "sequential"}


@pytest.mark.parametrize(
    ("methods", "more"),
    [
        (["fedavg", "fedprox"], {"options": {"fedprox": {"mu": 0.5}}, "target": 0.3}),
        ([], {"grid": "fedavg,fedcross x sgd,fedprox", "options": {"fedcross": {"alpha": 0.75}}}),
    ],
)
def test_the_command_gives_the_same_runs(
    command: Command, tmp_path: Path, methods: list[str], more: dict[str, Any]
) -> None:
    made = fedloom.compare(methods, seeds=2, out=tmp_path / "c", **more, **SMALL)
    text = read_comparison_command(made.path)
    assert text is not None
    again = command(*shlex.split(text)[1:], "--out", "again", "--json").result
    assert [run["digest"] for run in again["runs"]] == [run.digest for run in made.runs]
    assert again["headline"] == made.table.headline
    assert read_comparison_command(tmp_path / "again") == text
    assert command("report", "c", "-o", "all.html").code == 0
    assert shlex.split(text)[-1] in (tmp_path / "all.html").read_text().partition("<h2>")[0]


def test_python_objects_have_no_command(tmp_path: Path) -> None:
    made = fedloom.compare(["fedavg"], data=arrays(), model=network, rounds=1, out=tmp_path / "c", report=False)
    assert read_comparison_command(made.path) is None
