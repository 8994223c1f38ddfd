"""Tests of runs on text and tables from the command line.

Clients are speakers, users, or values of a column.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Command = Callable[..., Any]

QUICK = ("--engine", "sequential", "--epochs", 1, "--json")


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))


def clients_of(run: Path) -> int:
    line = next(line for line in (run / "config.toml").read_text().splitlines() if line.startswith("clients ="))
    return int(line.partition("=")[2])


def people(path: Path, label: Callable[[float, str], object]) -> Path:
    rng = np.random.default_rng(0)
    lines = ["age,job,label,site"]
    for k in range(240):
        age, job = rng.normal(40, 10), ("cook", "nurse")[int(rng.integers(2))]
        lines.append(f"{'' if k == 7 else round(age, 1)},{job},{label(age, job)},site{k % 6}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_table_by_its_owner_column(command: Command, tmp_path: Path) -> None:
    people(tmp_path / "people.csv", lambda age, job: "high" if age + 20 * (job == "nurse") > 50 else "low")
    outcome = command(
        *("run", "fedavg", "--data", "table:people.csv,label=label,owner=site", "--partition", "natural"),
        *("--model", "logreg", "--rounds", 8, "--lr", 0.5, *QUICK),
    )
    assert outcome.result["accuracy"] > 0.85
    assert clients_of(Path(outcome.result["run"])) == 6
    assert "note: people.csv: 1 missing values" in outcome.err
    assert Path(outcome.result["run"]).name.startswith("fedavg-people-seed0")
    again = command("verify", outcome.result["run"], "--json")
    assert again.code == 0, again.err


def test_a_regression_on_a_table(command: Command, tmp_path: Path) -> None:
    people(tmp_path / "people.csv", lambda age, job: round((age - 40) / 10 + (job == "nurse"), 3))
    outcome = command(
        *("run", "fedavg", "--data", "table:people.csv,label=label,owner=site", "--partition", "natural"),
        *("--model", "logreg", "--rounds", 10, "--lr", 0.1, *QUICK),
    )
    assert outcome.result["accuracy"] is None
    assert outcome.result["loss"] < 0.1


def test_a_comparison_on_a_table(command: Command, tmp_path: Path) -> None:
    people(tmp_path / "people.csv", lambda age, _: int(age > 40))
    outcome = command(
        *(
            "compare",
            "fedavg",
            "fedprox",
            "--data",
            "table:people.csv,label=label,owner=site",
            "--partition",
            "natural",
        ),
        *("--model", "logreg", "--rounds", 2, *QUICK, "-q"),
    )
    assert outcome.code == 0, outcome.err


def test_shakespeare_by_speaker(command: Command, tmp_path: Path) -> None:
    said = {f"ROLE{k}": [f"To be, or not to be, that is question {k}." * 2] for k in range(4)}
    (tmp_path / "data" / "shakespeare").mkdir(parents=True)
    (tmp_path / "data" / "shakespeare" / "by_role.json").write_text(json.dumps({"users": list(said), "speeches": said}))
    outcome = command(
        *("run", "fedavg", "--data", "shakespeare", "--partition", "natural", "--rounds", 2, "--clients-per-round", 2),
        *("--model", "lstm-shakespeare:hidden=8", "--lr", 0.5, *QUICK),
    )
    assert outcome.result["loss"] < np.log(80)
    assert clients_of(Path(outcome.result["run"])) == 4


def test_sent140_by_user(command: Command, tmp_path: Path) -> None:
    for part, count in (("train", 8), ("test", 2)):
        rows = {f"u{k}": [("good fun" if i % 2 else "bad rain", i % 2) for i in range(count)] for k in range(3)}
        data = {
            user: {"x": [["", "", "", user, x] for x, _ in held], "y": [y for _, y in held]}
            for user, held in rows.items()
        }
        (tmp_path / "data" / "sent140" / part).mkdir(parents=True)
        content = {"users": list(rows), "num_samples": [count] * 3, "user_data": data}
        (tmp_path / "data" / "sent140" / part / "all.json").write_text(json.dumps(content))
    outcome = command(
        *("run", "fedavg", "--data", "sent140:length=4", "--partition", "natural", "--rounds", 6),
        *("--model", "lstm-sent140:hidden=8,embedding=4,dense=4", "--optimizer", "adam", "--lr", 0.05, *QUICK),
    )
    assert outcome.result["accuracy"] == 1.0
    assert "4 words in the vocabulary, token 4 for all others" in outcome.err


def test_a_table_that_has_gone_is_one_sentence(command: Command, tmp_path: Path) -> None:
    outcome = command("run", "fedavg", "--data", "table:gone.csv,label=y", "--partition", "iid")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "gone.csv: No such file" in outcome.err


def test_a_table_without_owners_has_no_natural_partition(command: Command, tmp_path: Path) -> None:
    people(tmp_path / "people.csv", lambda age, _: int(age > 40))
    outcome = command("run", "fedavg", "--data", "table:people.csv,label=label", "--partition", "natural")
    assert outcome.code == 2
    assert "does not say whose sample is whose" in outcome.err
