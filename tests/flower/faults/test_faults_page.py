"""docs/faults.md shows what the script wrote, and every scenario of the script."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_table_is_that_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    faults, judge = (importlib.import_module(name) for name in ("flower_faults", "flower_judge"))
    found = json.loads((ROOT / "results" / "flower-faults.json").read_text(encoding="utf-8"))["scenarios"]
    assert list(dict.fromkeys(row["scenario"].partition("/")[0] for row in found)) == list(faults.SCENARIOS)
    assert all(row["same_digest"] and row["accuracy"] >= judge.GOOD for row in found)
    assert faults.table(found) in (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
