"""Grids of methods: main effects, and effects of pairs.

An effect is a mean of differences between runs with the same seed that differ only in the levels in question. A
difference counts only if all its combinations have a result. A missing result therefore removes pairs and biases none.
Standard errors are over seeds, because other contexts answer other questions and only other seeds are new evidence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.errors import InputError
from fedloom.report.significance import ENOUGH, LEVEL, adjust_p_values, format_p_statement, paired_p_value
from fedloom.report.statistics import GroupStatistics, SeedStatistics
from fedloom.utils.formatting import format_plural, format_signed
from fedloom.utils.storage import read_json, write_json

FILE = "grid.json"


@dataclass(frozen=True)
class EffectFactor:
    """One factor of a grid: the server, the client or the refiner."""

    name: str
    levels: tuple[str, ...]
    """The first level is the baseline."""

    @property
    def baseline(self) -> str:
        return self.levels[0]


@dataclass(frozen=True)
class EffectCell:
    """A combination of one level of each factor."""

    levels: tuple[str, ...]
    method: str
    """The combination as a method, such as `fedcross+fedprox`. Two cells may be the same method."""
    refusal: str | None = None
    """A sentence that says why the combination cannot be run, or None."""


@dataclass(frozen=True)
class EffectGrid:
    """All combinations of the levels; the first factor varies slowest."""

    factors: tuple[EffectFactor, ...]
    cells: tuple[EffectCell, ...]

    @property
    def methods(self) -> list[str]:
        """The methods to run, each once."""
        return list(dict.fromkeys(cell.method for cell in self.cells if cell.refusal is None))

    @property
    def refused(self) -> dict[str, str]:
        """The reasons for the combinations that are left out, by method."""
        return {cell.method: cell.refusal for cell in self.cells if cell.refusal is not None}

    def at(self, levels: Sequence[str]) -> EffectCell:
        """Return the cell with these levels."""
        return next(cell for cell in self.cells if cell.levels == tuple(levels))

    def write(self, folder: Path) -> None:
        """Write the grid into the folder of its comparison."""
        factors = [{"name": factor.name, "levels": factor.levels} for factor in self.factors]
        cells = [{"levels": cell.levels, "method": cell.method, "refused": cell.refusal} for cell in self.cells]
        write_json(folder / FILE, {"factors": factors, "cells": cells})


def read_effect_grid(folder: Path) -> EffectGrid | None:
    """Read the grid of the comparison in `folder`; None if it compared a list of methods."""
    path = Path(folder) / FILE
    if not path.exists():
        return None
    table: Any = read_json(path)
    try:
        factors = tuple(EffectFactor(str(one["name"]), tuple(map(str, one["levels"]))) for one in table["factors"])
        cells = tuple(
            EffectCell(
                tuple(map(str, one["levels"])), str(one["method"]), None if one["refused"] is None else one["refused"]
            )
            for one in table["cells"]
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged: it does not hold a grid ({error}).") from None
    whole = all(
        len(cell.levels) == len(factors)
        and all(level in factor.levels for level, factor in zip(cell.levels, factors, strict=True))
        for cell in cells
    )
    if not factors or not whole or not all(factor.levels for factor in factors):
        raise InputError(f"{str(path)!r} is damaged: its cells do not match its factors.")
    return EffectGrid(factors, cells)


Levels = tuple[str, ...]
Scores = Mapping[Levels, Mapping[str, float]]
"""The result of each cell that has one, by levels and seed."""


@dataclass(frozen=True)
class _EffectEstimate:
    """A mean difference over contexts, for each seed."""

    values: tuple[float, ...]
    """The mean over contexts, for each seed that all contexts have."""
    contexts: int
    p: float | None = None
    """The p-value of a paired t-test, corrected for the other estimates of its kind; None with too few seeds."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def error(self) -> float | None:
        """The standard error of the mean over seeds; None for one seed, or if all seeds agree to the last digit."""
        if len(self.values) < 2 or (spread := float(np.std(self.values, ddof=1))) < 1e-9:
            return None
        return spread / float(np.sqrt(len(self.values)))

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < LEVEL


@dataclass(frozen=True)
class _LevelEffect:
    """The effect of one level instead of the baseline of its factor, all else equal."""

    factor: str
    level: str
    against: str
    estimate: _EffectEstimate
    possible: int
    """Number of contexts in the grid, including those in which a result is missing."""
    lowest: float
    highest: float
    """The smallest and the largest difference of any context, each a mean over seeds."""


@dataclass(frozen=True)
class _PairEffect:
    """The effect of two levels of different factors together, compared with both baselines."""

    levels: tuple[str, str]
    gain: _EffectEstimate
    apart: float
    """The sum of the effects of each level alone, with the other factor at its baseline."""
    surplus: _EffectEstimate
    """The interaction: `gain` minus `apart`."""


@dataclass(frozen=True)
class GridEffects:
    """The effects of one grid, in units of `metric`; a lower loss is better."""

    grid: EffectGrid
    metric: str
    scores: Scores
    effects: tuple[_LevelEffect, ...]
    pairs: tuple[_PairEffect, ...]
    """Sorted, best first."""

    @property
    def sign(self) -> int:
        """1 if higher is better, else -1."""
        return 1 if self.metric == "accuracy" else -1

    @property
    def scale(self) -> tuple[float, int]:
        """The display factor and the number of digits; accuracies are in percent."""
        return (100.0, 2) if self.metric == "accuracy" else (1.0, 3)

    def spread(self, cell: EffectCell) -> SeedStatistics | None:
        """Return the result of a cell over its seeds."""
        values = self.scores.get(cell.levels)
        return SeedStatistics(tuple(values.values())) if values else None

    def effect_table(self) -> tuple[list[str], list[list[str]]]:
        """Return column titles and one row of text for each effect."""
        unit = "points" if self.metric == "accuracy" else "loss"
        titles = ["part", "instead of", f"effect, {unit}", "lowest to highest", "measured in", "seeds"]
        rows = [
            [
                one.level,
                f"{one.against} ({one.factor})",
                self.show(one.estimate),
                f"{self._signed(one.lowest)} to {self._signed(one.highest)}" if one.estimate.contexts > 1 else "–",
                f"{one.estimate.contexts} of {format_plural(one.possible, 'pair')}",
                str(len(one.estimate.values)),
            ]
            for one in self.effects
        ]
        return titles, rows

    def pair_table(self, most: int | None = None) -> tuple[list[str], list[list[str]]]:
        """Return column titles and rows for the `most` best pairs, or all of them."""
        titles = ["pair", "effect of both", "sum of single effects", "interaction", "measured in", "seeds"]
        rows = [
            [
                " + ".join(one.levels),
                self.show(one.gain),
                self._signed(one.apart),
                self.show(one.surplus),
                format_plural(one.gain.contexts, "context"),
                str(len(one.gain.values)),
            ]
            for one in self.pairs[:most]
        ]
        return titles, rows

    def to_dict(self) -> dict[str, Any]:
        """Return all effects as plain data, in units of `metric`."""

        def plain(estimate: _EffectEstimate) -> dict[str, Any]:
            return {
                "mean": estimate.mean,
                "standard_error": estimate.error,
                "p": estimate.p,
                "seeds": len(estimate.values),
            }

        return {
            "factors": {factor.name: list(factor.levels) for factor in self.grid.factors},
            "refused": self.grid.refused,
            "metric": self.metric,
            "effects": [
                {"factor": one.factor, "level": one.level, "against": one.against, **plain(one.estimate)}
                | {"pairs": one.estimate.contexts, "possible": one.possible}
                | {"lowest": one.lowest, "highest": one.highest}
                for one in self.effects
            ],
            "pairs": [
                {"levels": list(one.levels), "effect": plain(one.gain), "alone": one.apart}
                | {"interaction": plain(one.surplus), "contexts": one.gain.contexts}
                for one in self.pairs
            ],
        }

    def show(self, estimate: _EffectEstimate) -> str:
        """Format a difference with its standard error, and a star if it is significant."""
        scale, digits = self.scale
        error = "" if estimate.error is None else f" ± {scale * estimate.error:.{digits}f}"
        return f"{self._signed(estimate.mean)}{error}{' *' if estimate.significant else ''}"

    def _signed(self, value: float) -> str:
        scale, digits = self.scale
        return format_signed(scale * value, digits)

    @property
    def sentence(self) -> str:
        """The part that helped most, for each factor. Claims no more than the seeds show."""
        said = [text for factor in self.grid.factors if (text := self._about(factor))]
        return " ".join(said)

    def _about(self, factor: EffectFactor) -> str:
        mine = [one for one in self.effects if one.factor == factor.name]
        if not mine:
            return ""
        best, several = max(mine, key=lambda one: self.sign * one.estimate.mean), len(mine) > 1
        if self.sign * best.estimate.mean <= 0:
            if several:
                return f"None of the {factor.name}s did better than {factor.baseline}."
            return f"The {factor.name} {best.level} did no better than {factor.baseline}."
        unit = " points" if self.metric == "accuracy" else ""
        effect = f"{self.show(best.estimate).removesuffix(' *')}{unit}"
        who = (
            f"Of the {factor.name}s, {best.level} helped most" if several else f"The {factor.name} {best.level} helped"
        )
        said = f"{who}: {effect} against {factor.baseline}"
        if best.estimate.p is None:
            return f"{said}. Fewer than {ENOUGH} seeds cannot judge it."
        significance = "significant" if best.estimate.significant else "no significant difference"
        return f"{said} ({significance}, {format_p_statement(best.estimate.p)})."

    def footnote(self) -> str:
        """Return how to read the tables."""
        several = any(len(one.estimate.values) > 1 for one in self.effects)
        said = ["An effect is the mean difference in result to the baseline, all else equal and paired by seed."]
        if several:
            said.append("± is the standard error over seeds.")
        if any(one.estimate.significant for one in self.effects) or any(
            estimate.significant for one in self.pairs for estimate in (one.gain, one.surplus)
        ):
            said.append(
                f"* marks p < {LEVEL:g} in a paired t-test over seeds, corrected by Holm's method for all numbers of "
                "the column."
            )
        if any(one.estimate.contexts < one.possible for one in self.effects):
            said.append("Levels with fewer pairs were measured in fewer contexts; compare their effects with care.")
        return " ".join(said)


def analyze_effects(grid: EffectGrid, groups: Sequence[GroupStatistics]) -> GridEffects:
    """Compute the effects in `grid` from the finished runs of `groups`."""
    metric = "accuracy" if any(group.metric == "accuracy" for group in groups) else "loss"
    by_method: dict[str, dict[str, float]] = {}
    for group in groups:
        finished = {run.seed for run in group.runs if run.finished and group.metric == metric}
        if found := {seed: value for seed, value in group.results.items() if seed in finished}:
            by_method[group.runs[0].label] = found
    scores = {
        cell.levels: by_method[cell.method] for cell in grid.cells if cell.refusal is None and cell.method in by_method
    }
    made = [
        effect
        for at, factor in enumerate(grid.factors)
        for level in factor.levels[1:]
        if (effect := _effect(grid, scores, at, level))
    ]
    made = [
        replace(effect, estimate=estimate)
        for effect, estimate in zip(made, _corrected([effect.estimate for effect in made]), strict=True)
    ]
    pairs = list(_pairs(grid, scores))
    gains, surpluses = _corrected([pair.gain for pair in pairs]), _corrected([pair.surplus for pair in pairs])
    pairs = [
        replace(pair, gain=gain, surplus=surplus) for pair, gain, surplus in zip(pairs, gains, surpluses, strict=True)
    ]
    sign = 1 if metric == "accuracy" else -1
    pairs.sort(key=lambda pair: -sign * pair.gain.mean)
    return GridEffects(grid, metric, scores, tuple(made), tuple(pairs))


def _corrected(estimates: Sequence[_EffectEstimate]) -> list[_EffectEstimate]:
    """Test the estimates, which are one family: those of one column of a table."""
    p_values = adjust_p_values([paired_p_value(one.values) for one in estimates])
    return [replace(one, p=p) for one, p in zip(estimates, p_values, strict=True)]


def _contexts(grid: EffectGrid, fixed: Mapping[int, Sequence[str]]) -> Iterator[list[Levels]]:
    """Yield the cells of each context: one choice of the factors not in `fixed`, with all steps of those in `fixed`."""
    free = [(None,) if at in fixed else factor.levels for at, factor in enumerate(grid.factors)]
    steps = len(next(iter(fixed.values())))
    for chosen in product(*free):
        yield [
            tuple(fixed[at][step] if at in fixed else str(level) for at, level in enumerate(chosen))
            for step in range(steps)
        ]


def _estimate(scores: Scores, contexts: Sequence[Sequence[Levels]], weights: Sequence[int]) -> _EffectEstimate | None:
    """Return the weighted sum of the cells of a context for each seed, averaged over the contexts without a gap."""
    whole = [cells for cells in contexts if all(cell in scores for cell in cells)]
    shared = [set.intersection(*(set(scores[cell]) for cell in cells)) for cells in whole]
    whole = [cells for cells, seeds in zip(whole, shared, strict=True) if seeds]
    if not whole:
        return None
    common = set.intersection(*(seeds for seeds in shared if seeds))
    if not common:
        return None
    sums = [
        [sum(weight * scores[cell][seed] for weight, cell in zip(weights, cells, strict=True)) for cells in whole]
        for seed in sorted(common)
    ]
    return _EffectEstimate(tuple(float(np.mean(row)) for row in sums), len(whole))


def _effect(grid: EffectGrid, scores: Scores, at: int, level: str) -> _LevelEffect | None:
    factor = grid.factors[at]
    contexts = list(_contexts(grid, {at: (level, factor.baseline)}))
    estimate = _estimate(scores, contexts, (1, -1))
    if estimate is None:
        return None
    each = [alone.mean for cells in contexts if (alone := _estimate(scores, [cells], (1, -1)))]
    return _LevelEffect(factor.name, level, factor.baseline, estimate, len(contexts), min(each), max(each))


def _pairs(grid: EffectGrid, scores: Scores) -> Iterator[_PairEffect]:
    for first, second in combinations(range(len(grid.factors)), 2):
        one, other = grid.factors[first], grid.factors[second]
        for a, b in product(one.levels[1:], other.levels[1:]):
            # both, the first alone, the second alone, neither
            contexts = list(
                _contexts(
                    grid, {first: (a, a, one.baseline, one.baseline), second: (b, other.baseline, b, other.baseline)}
                )
            )
            gain = _estimate(scores, contexts, (1, 0, 0, -1))
            apart = _estimate(scores, contexts, (0, 1, 1, -2))
            surplus = _estimate(scores, contexts, (1, -1, -1, 1))
            if gain and apart and surplus:
                yield _PairEffect((a, b), gain, apart.mean, surplus)
