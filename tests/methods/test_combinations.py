"""Tests of every server with every client and every refiner.

Each combination runs for a few rounds or is rejected by name.

One comparison proves most for its price: a run on the sequential engine without a break against one that is begun by
two worker processes, stopped, and gone on with in this process. They agree only if the combination resumes exactly and
does not depend on the workers. Which of the two failed is found out when they do not.
"""

from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from fedloom.config import make_config
from fedloom.errors import InputError, RunStopped
from fedloom.methods import compose, methods
from fedloom.report.effects import EffectCell, EffectGrid
from fedloom.runs.callback import Callback
from fedloom.runs.execute import resume, run
from fedloom.runs.grids import PLAIN, _make_grid
from fedloom.testing.fixtures import SETTINGS, SmallFederatedDataset, SmallRunResult, simple_network, small_run

NAMES = {
    "server": ("fedavg", "fedcda", "fedcross", "fedmr", "scaffold"),
    "client": ("sgd", "fedprox", "lss", "swa", "swad", "soups", "diwa"),
    "refiner": ("none", "dynafed"),
}
"""What must combine."""

OPTIONS: dict[str, dict[str, Any]] = {
    "fedcda": {"warmup": 1},
    "lss": {"models": 2},
    "soups": {"models": 2},
    "diwa": {"models": 2},
    "dynafed": {"L": 2, "s": 1, "inner_steps": 2, "iterations": 3, "images_per_class": 1, "refine_epochs": 1},
}
"""So that in so few rounds each method gets to what is new in it, and no more often than needed."""

ROUNDS = 4


def options_for(method: str) -> dict[str, dict[str, Any]]:
    return {name: OPTIONS[name] for name in method.split("+") if name in OPTIONS}


def _grid() -> EffectGrid:
    """All the combinations of methods that are there."""
    known = {*methods(), *PLAIN.values()}
    config = make_config({**SETTINGS, "clients": 8, "model": "logreg"})
    return _make_grid([[name for name in names if name in known] for names in NAMES.values()], config, OPTIONS)


GRID = _grid()
POSSIBLE = [cell.method for cell in GRID.cells if cell.refusal is None]
REFUSED = [cell for cell in GRID.cells if cell.refusal is not None]


class StopAfter(Callback):
    """Asks a run to stop when some round has been played."""

    def __init__(self, round: int) -> None:
        self.round, self.played = round, 0

    def on_round_end(self, record: Any) -> None:
        self.played = record["round"]

    def should_stop(self) -> bool:
        return self.played >= self.round


@cache
def whole(method: str) -> SmallRunResult:
    """A run without a break, on the sequential engine."""
    return small_run(method, options_for(method), model=simple_network, rounds=ROUNDS)


def broken(method: str, place: Path, begin: dict[str, Any], go_on: dict[str, Any]) -> str:
    """The digest of a run that is stopped in the middle: after the first, second or third round, in turn."""
    federation, settings = SmallFederatedDataset(), {**SETTINGS, "rounds": ROUNDS, "report": False, **begin}
    with pytest.raises(RunStopped):
        run(
            method,
            federation,
            simple_network,
            options=options_for(method),
            out=place,
            callbacks=[StopAfter(1 + POSSIBLE.index(method) % (ROUNDS - 1))],
            **settings,
        )
    return resume(place, data=federation, model=simple_network, report=False, **go_on).digest


def test_the_names_that_must_combine_are_all_there() -> None:
    known = {*methods(), *PLAIN.values()}
    missing = [name for names in NAMES.values() for name in names if name not in known]
    assert missing == []
    assert len(GRID.cells) == 5 * 7 * 2
    assert len(POSSIBLE) == 4 * 7 * 2 + 2


@pytest.mark.quick_if(method=("fedcross+lss", "fedmr+fedprox", "fedcda+lss+dynafed"))
@pytest.mark.parametrize("method", POSSIBLE)
def test_a_combination_learns_resumes_exactly_and_does_not_depend_on_workers(method: str, tmp_path: Path) -> None:
    expected = whole(method)
    assert isfinite(expected.loss)
    assert [record["failed"] for record in expected.records] == [0] * ROUNDS
    host = {"engine": "multiprocess", "workers": 2}
    if broken(method, tmp_path / "both", host, {"engine": "sequential"}) != expected.digest:
        assert broken(method, tmp_path / "stop", {}, {}) == expected.digest, "it does not resume exactly"
        alone = small_run(method, options_for(method), model=simple_network, rounds=ROUNDS, **host)
        assert alone.digest == expected.digest, "it depends on the workers"
        pytest.fail("it does not go on exactly on another engine")


@pytest.mark.parametrize("method", ["fedavg", "lss", "fedcross+swad", "scaffold"])
def test_the_number_of_workers_does_not_matter(method: str) -> None:
    for workers in (1, 3):
        again = small_run(
            method, options_for(method), model=simple_network, rounds=ROUNDS, engine="multiprocess", workers=workers
        )
        assert again.digest == whole(method).digest


def test_every_part_makes_a_difference() -> None:
    """No two combinations give the same model: a part that is named and never used would go unseen otherwise."""
    digests: dict[str, str] = {}
    for method in POSSIBLE:
        same = digests.setdefault(whole(method).digest, method)
        assert same == method, f"{method} gives the model of {same}"


@pytest.mark.parametrize("cell", REFUSED, ids=lambda cell: cell.method)
def test_what_cannot_be_combined_is_refused_by_name(cell: EffectCell, tmp_path: Path) -> None:
    server, local, *_ = cell.levels
    sentence = (
        f"'{cell.method}' cannot be run: {server} and {local} both provide the part 'client', and a run has only one."
    )
    assert cell.refusal == sentence
    assert server == "scaffold"
    with pytest.raises(InputError) as refused:
        compose(cell.method)
    assert str(refused.value) == sentence
    with pytest.raises(InputError):
        run(cell.method, SmallFederatedDataset(), simple_network, out=tmp_path / "run", **SETTINGS)
    assert not (tmp_path / "run").exists()
