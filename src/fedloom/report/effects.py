"""Which part helped how much: the effects of a grid's levels, and of pairs of them.

Everything is a mean of differences between runs with the same seed that are alike but for the levels in question. A
difference counts only if all the combinations it needs have a result, so a hole in the grid leaves out pairs and
biases none. Standard errors are over seeds: other contexts are other questions, only other seeds are new evidence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np

from fedloom.report.grid import Cell, Factor, Grid
from fedloom.report.measure import ENOUGH, Group, Spread, final
from fedloom.report.words import plural, signed

Levels = tuple[str, ...]
Scores = Mapping[Levels, Mapping[str, float]]
"""The final result of each cell that has one, by seed."""


@dataclass(frozen=True)
class Estimate:
    """A mean difference over contexts, and how sure it is."""

    values: tuple[float, ...]
    """For each seed that all contexts have, the mean over contexts."""
    contexts: int

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def error(self) -> float | None:
        """The standard error of the mean over seeds; one seed has none, nor have seeds that agree to the last digit."""
        if len(self.values) < 2 or (spread := float(np.std(self.values, ddof=1))) < 1e-9:
            return None
        return spread / float(np.sqrt(len(self.values)))

    @property
    def clear(self) -> bool:
        """Whether enough seeds give a 95 % t-interval that leaves out zero."""
        if self.error is None or len(self.values) < ENOUGH:
            return False
        from scipy.special import stdtrit  # type: ignore[import-untyped, unused-ignore]  # scipy has no types

        return bool(abs(self.mean) > stdtrit(len(self.values) - 1, 0.975) * self.error)


@dataclass(frozen=True)
class Effect:
    """What one level does in place of its factor's baseline, all else equal."""

    factor: str
    level: str
    against: str
    estimate: Estimate
    possible: int
    """Contexts there are in the grid; those in which one of the two has no result do not count."""
    lowest: float
    highest: float
    """The difference in the context where it is least, and where it is largest, over seeds."""


@dataclass(frozen=True)
class Pair:
    """What two levels of different factors do together, against both baselines."""

    levels: tuple[str, str]
    gain: Estimate
    apart: float
    """What the two do each alone, with the other factor at its baseline, added up."""
    surplus: Estimate
    """The interaction: what they do together beyond that."""


@dataclass(frozen=True)
class Effects:
    """The analysis of one grid. Numbers are in units of `metric`; a loss is better when lower."""

    grid: Grid
    metric: str
    scores: Scores
    effects: tuple[Effect, ...]
    pairs: tuple[Pair, ...]
    """The best first."""

    @property
    def sign(self) -> int:
        """1 where more is better."""
        return 1 if self.metric == "accuracy" else -1

    @property
    def scale(self) -> tuple[float, int]:
        """The factor to show numbers with, and the digits: accuracies are in percent."""
        return (100.0, 2) if self.metric == "accuracy" else (1.0, 3)

    def spread(self, cell: Cell) -> Spread | None:
        """The result of a cell over its seeds."""
        values = self.scores.get(cell.levels)
        return Spread(tuple(values.values())) if values else None

    def effect_table(self) -> tuple[list[str], list[list[str]]]:
        """Column titles, and a row of text for each effect."""
        unit = "points" if self.metric == "accuracy" else "loss"
        titles = ["part", "in place of", f"effect, {unit}", "least to most", "in", "seeds"]
        rows = [
            [
                one.level,
                f"{one.against} ({one.factor})",
                self.show(one.estimate),
                f"{self._signed(one.lowest)} to {self._signed(one.highest)}" if one.estimate.contexts > 1 else "–",
                f"{one.estimate.contexts} of {plural(one.possible, 'pair')}",
                str(len(one.estimate.values)),
            ]
            for one in self.effects
        ]
        return titles, rows

    def pair_table(self, most: int | None = None) -> tuple[list[str], list[list[str]]]:
        """The same for pairs, the best first, `most` of them at most."""
        titles = ["together", "effect of both", "alone, added up", "beyond that", "in", "seeds"]
        rows = [
            [
                " + ".join(one.levels),
                self.show(one.gain),
                self._signed(one.apart),
                self.show(one.surplus),
                plural(one.gain.contexts, "context"),
                str(len(one.gain.values)),
            ]
            for one in self.pairs[:most]
        ]
        return titles, rows

    def as_data(self) -> dict[str, Any]:
        """All of it as plain data, in units of `metric`, for programs."""

        def plain(estimate: Estimate) -> dict[str, Any]:
            return {"mean": estimate.mean, "standard_error": estimate.error, "seeds": len(estimate.values)}

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

    def show(self, estimate: Estimate) -> str:
        """A difference with its standard error; a star where it is clear."""
        scale, digits = self.scale
        error = "" if estimate.error is None else f" ± {scale * estimate.error:.{digits}f}"
        return f"{self._signed(estimate.mean)}{error}{' *' if estimate.clear else ''}"

    def _signed(self, value: float) -> str:
        scale, digits = self.scale
        return signed(scale * value, digits)

    @property
    def sentence(self) -> str:
        """Which part helped most, factor by factor, claiming no more than the seeds show."""
        said = [text for factor in self.grid.factors if (text := self._about(factor))]
        return " ".join(said)

    def _about(self, factor: Factor) -> str:
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
        who = f"Of the {factor.name}s {best.level} helped most" if several else f"The {factor.name} {best.level} helped"
        said = f"{who}: {effect} against {factor.baseline}"
        if len(best.estimate.values) < ENOUGH:
            return f"{said}, with too few seeds to tell it from noise."
        return f"{said}{', clearly.' if best.estimate.clear else ', which is within noise.'}"

    def footnote(self) -> str:
        """How to read the tables."""
        several = any(len(one.estimate.values) > 1 for one in self.effects)
        said = ["An effect is the mean difference in final result to the baseline, all else equal and paired by seed."]
        if several:
            said.append("± is the standard error over seeds.")
        if any(one.estimate.clear for one in self.effects) or any(
            estimate.clear for one in self.pairs for estimate in (one.gain, one.surplus)
        ):
            said.append("* marks a 95 % t-interval that leaves out zero, each uncorrected.")
        if any(one.estimate.contexts < one.possible for one in self.effects):
            said.append("Levels with fewer pairs were tried in fewer contexts, so their effects do not compare freely.")
        return " ".join(said)


def analyse(grid: Grid, groups: Sequence[Group]) -> Effects:
    """The effects in `grid`, from the finished runs among `groups`."""
    metric = "accuracy" if any(group.metric == "accuracy" for group in groups) else "loss"
    by_method: dict[str, dict[str, float]] = {}
    for group in groups:
        runs = ((run.seed, final(run, metric)) for run in group.runs if run.finished)
        found = {seed: value for seed, value in runs if value is not None}
        if found:
            by_method[group.runs[0].method] = found
    scores = {
        cell.levels: by_method[cell.method] for cell in grid.cells if cell.refusal is None and cell.method in by_method
    }
    made = [
        effect
        for at, factor in enumerate(grid.factors)
        for level in factor.levels[1:]
        if (effect := _effect(grid, scores, at, level))
    ]
    sign = 1 if metric == "accuracy" else -1
    pairs = sorted(_pairs(grid, scores), key=lambda pair: -sign * pair.gain.mean)
    return Effects(grid, metric, scores, tuple(made), tuple(pairs))


def _contexts(grid: Grid, fixed: Mapping[int, Sequence[str]]) -> Iterator[list[Levels]]:
    """For each choice of the factors not in `fixed`: the cells that follow when those in `fixed` run in step."""
    free = [(None,) if at in fixed else factor.levels for at, factor in enumerate(grid.factors)]
    steps = len(next(iter(fixed.values())))
    for chosen in product(*free):
        yield [
            tuple(fixed[at][step] if at in fixed else str(level) for at, level in enumerate(chosen))
            for step in range(steps)
        ]


def _estimate(scores: Scores, contexts: Sequence[Sequence[Levels]], weights: Sequence[int]) -> Estimate | None:
    """The weighted sum of the cells of a context, seed by seed, mean over the contexts whose cells are all there."""
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
    return Estimate(tuple(float(np.mean(row)) for row in sums), len(whole))


def _effect(grid: Grid, scores: Scores, at: int, level: str) -> Effect | None:
    factor = grid.factors[at]
    contexts = list(_contexts(grid, {at: (level, factor.baseline)}))
    estimate = _estimate(scores, contexts, (1, -1))
    if estimate is None:
        return None
    each = [alone.mean for cells in contexts if (alone := _estimate(scores, [cells], (1, -1)))]
    return Effect(factor.name, level, factor.baseline, estimate, len(contexts), min(each), max(each))


def _pairs(grid: Grid, scores: Scores) -> Iterator[Pair]:
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
                yield Pair((a, b), gain, apart.mean, surplus)
