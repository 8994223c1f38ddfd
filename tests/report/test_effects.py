"""Tests of effects in a grid: numbers by hand, missing runs, the report page."""

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from fedloom.errors import InputError
from fedloom.report import (
    RunRecord,
    analyze_effects,
    make_comparison_table,
    read_effect_grid,
    read_run_record,
    write_report_page,
)
from fedloom.report.effects import FILE, EffectCell, EffectFactor, EffectGrid
from fedloom.report.figures import heat_map_figure_data
from fedloom.utils.storage import read_json, write_json
from tests.support.fake_runs import write_run
from tests.support.report_pages import EVIL, Page

PLAIN = ("fedavg", "sgd", "none")
LEVELS = (("fedavg", "cross"), ("sgd", "prox", "soup"), ("none", "dyna"))


def name(levels) -> str:
    return "+".join(one for one, plain in zip(levels, PLAIN, strict=False) if one != plain) or "fedavg"


def grid_of(lists=LEVELS, refused=()) -> EffectGrid:
    factors = tuple(
        EffectFactor(what, tuple(one)) for what, one in zip(("server", "client", "refiner"), lists, strict=False)
    )
    cells = [
        EffectCell(one, name(one), f"{name(one)} clashes." if name(one) in refused else None) for one in product(*lists)
    ]
    return EffectGrid(factors, tuple(cells))


def run_of(method: str, seed: int, value: float | None, metric="accuracy", finished=True) -> RunRecord:
    history = [{"round": 0, metric: 0.1}, {"round": 1, metric: value, "loss" if metric != "loss" else "x": 1.0}]
    return RunRecord(Path(f"{method}-{seed}"), {"method": method, "seed": seed}, history, {} if finished else None)


def analysed(grid: EffectGrid, scores: dict, **more):
    """The analysis of runs whose final results are `scores[method]`, one number a seed."""
    records = [run_of(m, seed, value, **more) for m, values in scores.items() for seed, value in enumerate(values)]
    return analyze_effects(grid, make_comparison_table(records).groups)


def test_effects_of_an_additive_grid_are_what_was_put_in_and_nothing_is_beyond_the_sum():
    effect = {"cross": 0.05, "prox": -0.02, "soup": 0.03, "dyna": 0.1}
    seeds = np.array([0.5, 0.52, 0.47])
    scores = {name(one): list(seeds + sum(effect.get(level, 0.0) for level in one)) for one in product(*LEVELS)}
    found = analysed(grid_of(), scores)
    assert {one.level: one.estimate.mean for one in found.effects} == pytest.approx(effect)
    assert {one.level: one.estimate.contexts for one in found.effects} == {"cross": 6, "prox": 4, "soup": 4, "dyna": 6}
    for pair in found.pairs:
        assert pair.surplus.mean == pytest.approx(0, abs=1e-12)
        assert pair.gain.mean == pytest.approx(pair.apart) == pytest.approx(sum(effect[one] for one in pair.levels))
    assert found.pairs[0].levels == ("cross", "dyna")
    assert [pair.gain.mean for pair in found.pairs] == sorted((p.gain.mean for p in found.pairs), reverse=True)


def test_a_two_by_two_by_hand():
    """Both together reach 0.9 and 0.8 where the parts alone would add up to 0.7: 0.2 and 0.1 beyond the sum."""
    lists = (("fedavg", "cross"), ("sgd", "prox"))
    scores = {"fedavg": [0.5, 0.5], "cross": [0.6, 0.6], "prox": [0.6, 0.6], "cross+prox": [0.9, 0.8]}
    found = analysed(grid_of(lists), scores)
    cross, prox = found.effects
    assert cross.estimate.values == pytest.approx((0.2, 0.15))  # the mean of 0.1 alone and 0.3 or 0.2 with prox
    assert cross.estimate.error == pytest.approx(0.025)  # sample deviation 0.0354 over the root of two
    assert (cross.lowest, cross.highest) == pytest.approx((0.1, 0.25))
    assert (prox.factor, prox.against, prox.estimate.contexts, prox.possible) == ("client", "sgd", 2, 2)
    (pair,) = found.pairs
    assert pair.levels == ("cross", "prox")
    assert (pair.gain.mean, pair.apart) == pytest.approx((0.35, 0.2))
    assert pair.surplus.values == pytest.approx((0.2, 0.1))


def test_a_hole_leaves_out_pairs_and_biases_none():
    """`cross` cannot have `prox`. Were its mean simply held against fedavg's, the weak prox would flatter it."""
    lists = (("fedavg", "cross"), ("sgd", "prox"))
    scores = {"fedavg": [0.5, 0.6], "prox": [0.1, 0.2], "cross": [0.52, 0.62]}
    found = analysed(grid_of(lists, refused=["cross+prox"]), scores)
    cross, prox = found.effects
    assert (cross.estimate.mean, cross.estimate.contexts, cross.possible) == (pytest.approx(0.02), 1, 2)
    assert (prox.estimate.mean, prox.estimate.contexts, prox.possible) == (pytest.approx(-0.4), 1, 2)
    assert found.pairs == ()
    assert "1 of 2 pairs" in found.effect_table()[1][0]
    assert "fewer contexts" in found.footnote()


def test_seeds_are_paired_and_only_finished_runs_count():
    lists = (("fedavg", "cross"), ("sgd", "prox"))
    records = [run_of(m, seed, 0.5 + 0.1 * seed) for m in ("fedavg", "prox") for seed in range(3)]
    records += [run_of("cross", seed, 0.6 + 0.1 * seed) for seed in (1, 2)]
    records += [run_of("cross+prox", 0, 0.9, finished=False)]
    found = analyze_effects(grid_of(lists), make_comparison_table(records).groups)
    cross = next(one for one in found.effects if one.level == "cross")
    assert cross.estimate.values == pytest.approx((0.1, 0.1))  # seeds 1 and 2; the level of a seed cancels
    assert cross.estimate.contexts == 1
    assert heat_map_figure_data(found)["maps"][0]["cells"][1][1]["hover"] == "has no result yet"


def test_a_run_without_a_final_result_is_no_evidence():
    lists = (("fedavg", "cross"), ("sgd", "prox"))
    scores = {"fedavg": [0.5, 0.5], "cross": [0.6, None], "prox": [0.5, 0.5], "cross+prox": [0.7, 0.9]}
    found = analysed(grid_of(lists), scores)
    assert found.effects[0].estimate.values == pytest.approx((0.15,))


def test_of_a_grid_without_results_only_what_was_left_out_is_said(tmp_path):
    grid = grid_of(refused=["cross+prox"])
    found = analysed(grid, {"other": [0.5]})
    assert (found.effects, found.pairs, found.sentence) == ((), (), "")
    write_report_page([run_of("fedavg", 0, 0.5, finished=False)], tmp_path / "report.html", grid=grid)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "No combination has a result." in page.text
    assert "cross+prox clashes." in page.text
    assert "grid" not in json.loads(page.scripts[0])


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        (
            [0.1, 0.11, 0.12],
            "The server cross helped: +11.00 ± 0.58 points against fedavg (significant, p\u00a0=\u00a00.003).",
        ),
        (
            [-0.1, 0.3, 0.1],
            "cross helped: +10.00 ± 11.55 points against fedavg (no significant difference, p\u00a0=\u00a00.48).",
        ),
        ([0.1, 0.2], "+15.00 ± 5.00 points against fedavg. Fewer than 3 seeds cannot judge it."),
        ([-0.1, -0.1, -0.2], "The server cross did no better than fedavg."),
    ],
)
def test_the_sentence_claims_no_more_than_the_seeds_show(gains, said):
    lists = (("fedavg", "cross"), ("sgd",))
    found = analysed(grid_of(lists), {"fedavg": [0.5] * len(gains), "cross": [0.5 + one for one in gains]})
    assert said in found.sentence
    assert ("*" in found.effect_table()[1][0][2]) == ("(significant" in said)


def test_where_there_is_only_a_loss_less_is_better():
    lists = (("fedavg",), ("sgd", "prox", "soup"))
    scores = {"fedavg": [1.0, 1.0, 1.0], "prox": [0.5, 0.52, 0.51], "soup": [2.0, 2.0, 2.1]}
    found = analysed(grid_of(lists), scores, metric="loss")
    assert (
        "Of the clients, prox helped most: −0.490 ± 0.006 against sgd (significant, p\u00a0<\u00a00.001)."
        in found.sentence
    )
    assert heat_map_figure_data(found)["better"] == "low"


def test_a_grid_is_read_back_as_it_was_and_a_damaged_one_refused(tmp_path):
    grid = grid_of(refused=["cross+prox"])
    assert read_effect_grid(tmp_path) is None
    grid.write(tmp_path)
    assert read_effect_grid(tmp_path) == grid
    assert grid.refused == {"cross+prox": "cross+prox clashes."}
    whole = read_json(tmp_path / FILE)
    for values in ({"factors": [], "cells": []}, {**whole, "cells": 3}, {**whole, "factors": whole["factors"][:1]}):
        write_json(tmp_path / FILE, values)
        with pytest.raises(InputError, match="damaged"):
            read_effect_grid(tmp_path)
    grid.write(tmp_path)
    text = (tmp_path / FILE).read_text()
    for damage in ("{", "[]", text.replace('"sgd"', '"sdg"', 1)):
        (tmp_path / FILE).write_text(damage)
        with pytest.raises(InputError, match="damaged"):
            read_effect_grid(tmp_path)


@pytest.fixture
def gridded(tmp_path):
    """Three seeds of each cell, as folders, one cell refused in words that try to be more than words."""
    grid = grid_of(refused=["cross+prox", "cross+prox+dyna"])
    cells = [cell if not cell.refusal else EffectCell(cell.levels, cell.method, f"no: {EVIL}") for cell in grid.cells]
    folders = [
        write_run(tmp_path / f"{cell.method}-{seed}", cell.method, seed, rounds=6)
        for cell in grid.cells
        for seed in range(3)
        if cell.refusal is None
    ]
    return EffectGrid(grid.factors, tuple(cells)), [read_run_record(folder) for folder in sorted(folders)]


def test_the_page_shows_the_maps_the_tables_and_what_was_left_out(gridded, tmp_path):
    grid, records = gridded
    write_report_page(records, tmp_path / "report.html", grid=grid)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    comparison = make_comparison_table(records)
    found = analyze_effects(grid, comparison.groups)
    lines = set(page.text.split("\n"))
    for titles, rows in (found.effect_table(), found.pair_table()):
        assert lines.issuperset(titles)
        assert lines.issuperset(cell for row in rows for cell in row)
    assert found.sentence in lines
    assert {
        "2 servers × 3 clients × 2 refiners on digits",
        "2 combinations left out, with reasons",
        f"no: {EVIL}",
    } <= lines
    maps = json.loads(page.scripts[0])["grid"]["maps"]
    assert [one["title"] for one in maps] == ["refiner: none", "refiner: dyna"]
    assert maps[0]["cells"][1][1]["value"] is None
    group = next(group for group in comparison.groups if group.short.startswith("cross+soup+dyna"))
    cell = maps[1]["cells"][1][2]
    assert cell["value"] == pytest.approx(100 * group.accuracy.mean, rel=1e-5)
    assert cell["text"] == group.accuracy.show(100, 2)
    assert "against fedavg" in page.text  # the baseline comes first in the table, whatever its folder is called


def test_a_browser_draws_a_map_for_each_refiner(gridded, tmp_path, browse):
    grid, records = gridded
    write_report_page(records, tmp_path / "report.html", grid=grid)
    page = browse(tmp_path / "report.html")
    maps = re.search(r'id="grid".*?<h3>Effect of each part', page, flags=re.DOTALL)[0]
    assert maps.count('<svg class="heat"') == 2
    assert maps.count('<g class="cell"') == 2 * 6
    assert maps.count("<line ") == 2 * 4  # four where there is no result
    assert maps.count("<title>cross+prox\nno: ") == 1  # a tooltip gives the reason
    assert all(f">{one}</text>" in maps for one in ("cross", "soup"))
    for group in make_comparison_table(records).groups:
        assert f">{group.accuracy.show(100, 2)}</text>" in maps
    colours = re.findall(r'<g class="cell"[^>]*><title>[^<]*</title><rect [^>]*fill="rgb\((\d+),(\d+),(\d+)\)"', maps)
    assert len(set(colours)) > 5
