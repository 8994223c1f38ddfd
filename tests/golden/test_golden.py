"""Tests of a few golden runs against stored digests.

`make golden` compares all of them with the old commit.
"""

from pathlib import Path

import pytest

from fedloom.methods.registry import BUILT_IN
from tests.golden import draws, values
from tests.golden.__main__ import CHANGES
from tests.golden.cases import CASES, LATER, METHODS, QUICK_CASES, Case
from tests.golden.compare import Changes
from tests.golden.runner import Result, play


def result_of(case: Case, folder: Path) -> Result:
    changes = Changes.read(CHANGES)
    with draws.noted():
        return play([changes.command(words) for words in case.commands], case.files, case.stop, folder)


def test_every_method_is_played() -> None:
    assert {*METHODS, *LATER} == set(BUILT_IN)
    assert not set(METHODS) & set(LATER)


def test_worker_processes_draw_what_one_process_draws(tmp_path: Path) -> None:
    one, many = (result_of(CASES[f"fedavg/norm/{engine}"], tmp_path / engine) for engine in ("plain", "host"))
    assert one["draws"] == many["draws"]
    assert one["draws"]["0|select|1|0"] == 1
    assert sum(name.startswith("0|batches|") for name in one["draws"]) == 12  # three rounds of four clients
    assert one["runs"]["run"]["digest"] == many["runs"]["run"]["digest"]


def test_a_resumed_case_is_stopped_in_the_middle(tmp_path: Path) -> None:
    result = result_of(CASES["fedprox/adam-kept-resumed"], tmp_path / "case")
    assert result["exit"] == [130, 0]
    assert result["message"][0].startswith("fedloom: stopped after round 3")
    assert [record["round"] for record in result["runs"]["run"]["metrics"]] == [0, 1, 2, 3, 4]
    assert result["draws"]["0|init|0|0"] == 2 * result["draws"]["0|select|3|0"] == 2


@pytest.mark.parametrize("name", QUICK_CASES)
def test_a_run_gives_the_stored_digests(name: str, tmp_path: Path) -> None:
    stored = values.stored()
    if stored is None:
        pytest.skip(f"no values are stored for {values.machine()} (python -m tests.golden --store)")
    if CASES[name].needs:
        pytest.importorskip(CASES[name].needs)
    assert values.condense(result_of(CASES[name], tmp_path / "case")) == stored[name]


def test_values_are_stored_for_the_quick_cases_and_no_others() -> None:
    assert all(set(known) == set(QUICK_CASES) for known in values.read().values())
