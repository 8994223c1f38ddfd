"""Tests that docs/faults.md shows every scenario's result."""

import json
from pathlib import Path

from benchmarks.flower import faults, verdict

ROOT = Path(__file__).parents[3]


def test_the_table_is_that_of_the_results() -> None:
    found = json.loads((ROOT / "results" / "flower-faults.json").read_text(encoding="utf-8"))["scenarios"]
    assert list(dict.fromkeys(row["scenario"].partition("/")[0] for row in found)) == list(faults.SCENARIOS)
    assert all(row["same_digest"] and row["accuracy"] >= verdict.GOOD for row in found)
    assert faults.table(found) in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
