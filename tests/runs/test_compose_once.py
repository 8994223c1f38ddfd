"""The method of a run is composed once."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.errors import RunStopped
from fedloom.methods import composition
from fedloom.methods.composition import ComposedMethod
from tests.support.callbacks import Eye

TINY: dict[str, Any] = {
    "engine": "sequential", "clients": 4, "clients_per_round": 2, "rounds": 2, "epochs": 1, "report": False
}  # fmt: skip


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each method was composed."""
    counts, compose = Counter[str](), composition.compose

    def counted(name: str, options: Any = None) -> ComposedMethod:
        counts[name] += 1
        return compose(name, options)

    for module in ("methods.composition", "methods", "runs.resolve", "runs.grids", "privacy.compatibility"):
        monkeypatch.setattr(f"fedloom.{module}.compose", counted)
    return counts


@pytest.mark.parametrize("more", [{}, {"clip_update": 1.0}])
def test_a_run_composes_its_method_once(more: dict[str, Any], composed: Counter[str], tmp_path: Path) -> None:
    fedloom.run("fedprox", **TINY, **more, out=tmp_path / "run")
    assert composed == {"fedprox": 1}


def test_a_resumed_and_a_repeated_run_compose_it_once_more(composed: Counter[str], tmp_path: Path) -> None:
    with pytest.raises(RunStopped):
        fedloom.run("fedprox", **TINY, out=tmp_path / "run", callbacks=[Eye(stop_after=1)])
    composed.clear()
    fedloom.resume(tmp_path / "run", report=False)
    assert composed == {"fedprox": 1}
    fedloom.verify(tmp_path / "run")
    assert composed == {"fedprox": 2}


def test_a_comparison_composes_each_row_once_for_all_seeds(composed: Counter[str], tmp_path: Path) -> None:
    fedloom.compare(["fedavg", "fedprox", "fedprox:mu=0.1"], seeds=2, **TINY, out=tmp_path / "compared")
    assert composed == {"fedavg": 1, "fedprox": 2}
