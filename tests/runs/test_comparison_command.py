"""Tests of the command that repeats a comparison."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.errors import InputError
from fedloom.report import ComparisonRecord
from fedloom.utils.storage import write_json
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
    text = ComparisonRecord.read(made.path).command
    assert text is not None
    again = command(*shlex.split(text)[1:], "--out", "again", "--json").result
    assert [run["digest"] for run in again["runs"]] == [run.digest for run in made.runs]
    assert again["headline"] == made.table.headline
    assert ComparisonRecord.read(tmp_path / "again").command == text
    assert command("report", "c", "-o", "all.html").code == 0
    assert shlex.split(text)[-1] in (tmp_path / "all.html").read_text().partition("<h2>")[0]


def test_python_objects_have_no_command(tmp_path: Path) -> None:
    made = fedloom.compare(["fedavg"], data=arrays(), model=network, rounds=1, out=tmp_path / "c", report=False)
    assert ComparisonRecord.read(made.path) == ComparisonRecord(("fedavg-seed0",), None)


def test_a_report_of_the_folder_keeps_the_reference(command: Command, tmp_path: Path) -> None:
    made = fedloom.compare(["scaffold", "fedavg"], out=tmp_path / "c", **SMALL)
    assert command("report", "c", "-o", "all.html").code == 0
    text = (tmp_path / "all.html").read_text()
    assert made.table.headline in text
    assert "against scaffold" in text


def test_the_order_of_runs_is_that_of_the_record_and_others_follow() -> None:
    record = ComparisonRecord(("b-seed0", "a-seed0"))
    assert record.sort_runs([Path(name) for name in ("a-seed0", "z", "b-seed0", "c")]) == [
        Path(name) for name in ("b-seed0", "a-seed0", "c", "z")
    ]


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"runs": ["a"], "command": null}'])
def test_a_damaged_record_is_refused(tmp_path: Path, damage: str) -> None:
    (tmp_path / "comparison.json").write_text(damage)
    with pytest.raises(InputError, match=r"comparison\.json is damaged: its checksum is not"):
        ComparisonRecord.read(tmp_path)


@pytest.mark.parametrize("content", [{"command": None}, {"runs": 3, "command": None}])
def test_a_record_of_something_else_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    write_json(tmp_path / "comparison.json", content)
    with pytest.raises(InputError, match=r"comparison\.json is damaged: it does not hold a comparison"):
        ComparisonRecord.read(tmp_path)
