"""Tests of the tables that the documentation takes from results/."""

import re
from statistics import mean

import pytest

from benchmarks.experiments.tables import PAGES, ROOT, TABLES, Curves, curves, filled, read_results

CURVES = [
    (file, experiment, method)
    for file in ("cifar10", "dynafed", "fashion-lenet-long", "fedcda")
    for experiment, entry in read_results(file).items()
    for method in entry["methods"]
]


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_are_those_of_the_results(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert filled(page) == page, "run `python -m benchmarks result-tables`"


def test_every_table_stands_in_one_page() -> None:
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in PAGES]
    shown = [name for page in pages for name in re.findall(r"<!-- results: (.+?) -->", page)]
    assert sorted(shown) == sorted(TABLES)


@pytest.mark.parametrize(("file", "experiment", "method"), CURVES)
def test_windows_agree_with_the_stored_summaries(file: str, experiment: str, method: str) -> None:
    found = curves(file, experiment, method)
    stored = read_results(file)[experiment]["methods"][method]
    tail = found.ten(found.rounds[-1])
    assert mean(found.window(*tail)) == pytest.approx(
        100 * stored["mean of the last ten evaluations"]["mean"], abs=0.02
    )
    assert mean(found.variation(*tail)) == pytest.approx(
        100 * stored["standard deviation within the last ten"], abs=0.02
    )
    assert [seed[-1] for seed in found.seeds] == pytest.approx([100 * x for x in stored["final accuracy"]["seeds"]])


def test_a_window_is_by_round_and_seed() -> None:
    two = Curves([0, 2, 4, 6], [[0.0, 10.0, 20.0, 60.0], [0.0, 0.0, 0.0, 30.0]])
    assert two.between(3, 6) == [[20.0, 60.0], [0.0, 30.0]]
    assert two.window(3, 6) == [40.0, 15.0]
    assert two.variation(2, 4) == pytest.approx([50**0.5, 0.0])


def test_a_window_that_the_runs_did_not_reach_is_refused() -> None:
    with pytest.raises(ValueError, match="6 rounds, not 7"):
        Curves([0, 2, 4, 6], [[0.0] * 4]).window(5, 7)
