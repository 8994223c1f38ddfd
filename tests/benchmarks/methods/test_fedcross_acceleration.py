"""Tests of FedCross's acceleration benchmark, and of its figures in the docs."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.methods.fedcross_acceleration import PLAIN, ROWS, rounds_to, summarize

ROOT = Path(__file__).parents[3]
TITLES = {PLAIN: PLAIN, "PM": "PM", "DA": "DA", "PM-DA": "PM-DA", "PM, shared": "PM with `shared` weights"}


def test_rounds_to_a_target_are_those_of_the_first_evaluation_that_has_it() -> None:
    curve = [(0, 0.1), (2, 0.5), (4, 0.4), (6, 0.6)]
    assert [rounds_to(curve, target) for target in (0.1, 0.45, 0.6, 0.7)] == [0, 2, 6, None]


def test_each_seed_has_the_target_of_its_own_plain_run() -> None:
    curves = {
        PLAIN: {0: [(6, 0.3), (12, 0.4)], 1: [(6, 0.3), (12, 0.8)]},
        "PM": {0: [(6, 0.4), (12, 0.4)], 1: [(6, 0.7), (12, 0.7)]},
    }
    found = summarize(curves, {PLAIN: {0: 0.5, 1: 1.0}, "PM": {0: 0.4, 1: 0.7}})
    assert found["targets, %"] == [40.0, 80.0]
    assert found[PLAIN]["rounds to target"] == [12, 12]
    assert found["PM"]["rounds to target"] == [6, None]
    assert found["PM"]["earlier than plain"] == 1
    assert found["PM"]["mean final accuracy, %"] == pytest.approx(55.0)
    assert found["PM"]["mean accuracy in round, %"] == {"6": 55.0, "12": 55.0}


def test_the_page_shows_what_was_measured() -> None:
    result = json.loads((ROOT / "results" / "fedcross-acceleration.json").read_text())
    page = (ROOT / "docs" / "fedcross.md").read_text()
    assert result["command"] in re.sub(r"\s+", " ", page)
    for row in ROWS:
        cells = [TITLES[row]]
        for count in (4, 10):
            found = result[f"{count} clients a round"][row]
            cells.append(", ".join(map(str, found["rounds to target"])))
            cells += [f"{found['mean accuracy in round, %']['6']} %", f"{found['mean final accuracy, %']} %"]
            assert found["earlier than plain"] <= 1, "the page says so"
        assert f"| {' | '.join(cells)} |" in page
