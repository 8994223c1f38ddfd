"""Grids of methods: every server with every local and every refiner, and a reason for each that cannot be run.

    fedavg,fedcross,scaffold x sgd,fedprox x none,dynafed

`fedavg`, `sgd` and `none` are what a run has when no method brings the part: FedAvg's server, its plain local training,
no refiner. Where a list has that name it is the baseline, else the first name is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from fedloom.config import Config
from fedloom.data.download import Progress
from fedloom.errors import InputError, unknown
from fedloom.experiment import build
from fedloom.methods import Composition, Method, compose, methods
from fedloom.methods.catalogue import Clash
from fedloom.privacy import refuse_unfit
from fedloom.report.grid import Cell, Factor, Grid
from fedloom.request import Own, replace_config, with_server_data

Given = Mapping[str, Mapping[str, Any]]

PLAIN = {"server": "fedavg", "local": "sgd", "refiner": "none"}
"""The factors in their order, and the level of each that brings nothing."""

FITS: dict[str, Callable[[Method], bool]] = {
    # SCAFFOLD's companion lives on the server: by it the method counts as one, though its mean is FedAvg's.
    "server": lambda method: method.server is not None or method.companion is not None,
    "local": lambda method: method.local is not None and method.server is None,
    "refiner": lambda method: method.refiner is not None and method.server is None,
}
"""Which methods may stand in which list."""


def parse(given: str | Sequence[Sequence[str]]) -> tuple[Factor, ...]:
    """The factors of a grid such as `fedavg,fedcross x sgd,fedprox`, as text or as a list of lists."""
    if isinstance(given, str):
        lists = [[name.strip() for name in text.split(",")] for text in re.split(r"\s+[x×]\s+", given.strip())]
    else:
        lists = [[names] if isinstance(names, str) else list(names) for names in given]
    if not 2 <= len(lists) <= len(PLAIN):
        raise InputError(
            "a grid is servers x locals or servers x locals x refiners, such as 'fedavg,fedcross x sgd,fedprox', "
            f"not {given!r}."
        )
    known = methods()
    factors = []
    for names, (factor, plain) in zip(lists, PLAIN.items(), strict=False):
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"{name!r} is named twice among the {factor}s of the grid.")
            if name == plain:
                continue
            if name not in known:
                fitting = [one.name for one in known.values() if FITS[factor](one)]
                raise unknown(factor, name, {plain, *fitting})
            if not FITS[factor](known[name]):
                raise InputError(
                    f"{name} brings a {' and a '.join(known[name].parts)}, so it does not belong among the {factor}s "
                    f"of a grid; the plain one there is {plain!r}."
                )
        baseline = plain if plain in names else names[0]
        factors.append(Factor(factor, (baseline, *(name for name in names if name != baseline))))
    return tuple(factors)


def make_grid(
    given: str | Sequence[Sequence[str]],
    config: Config,
    options: Given | None = None,
    own: Own | None = None,
    progress: Progress | None = None,
) -> Grid:
    """The grid on the task that `config` describes, with every combination that cannot be run named and explained.

    Refused are parts that clash, and parts that say themselves that they cannot work together or on this task. What
    is wrong without any method (a data set that is not there, an option that no method has) is an error as always.
    """
    factors = parse(given)
    known = methods()
    named = [known[name] for factor in factors for name in factor.levels if name in known]
    config = with_server_data(config, own or Own(), [Composition("", tuple(named), {})])  # as all its runs have it
    with build(replace_config(config, method="fedavg", options={}, engine="plain"), own, progress).engine_closed() as e:
        context = e.rounds.context

    def cell(levels: tuple[str, ...]) -> Cell:
        chosen = [name for factor, name in zip(factors, levels, strict=True) if name != PLAIN[factor.name]]
        method = "+".join(chosen) or "fedavg"
        try:
            composition = compose(method)
        except Clash as error:
            return Cell(levels, method, str(error))
        composition = compose(method, options_of(composition, options or {}))
        try:
            parts = composition.build(context)
            if config.clip_update is not None:
                refuse_unfit(composition, parts, context.layout)
        except InputError as error:
            return Cell(levels, method, f"{method!r} cannot be run: {error}")
        return Cell(levels, method)

    grid = Grid(factors, tuple(cell(levels) for levels in product(*(factor.levels for factor in factors))))
    if not grid.methods:
        raise InputError(f"no combination of the grid can be run; the first: {grid.cells[0].refusal}")
    return grid


def options_of(composition: Composition, options: Given) -> dict[str, dict[str, Any]]:
    """Those of the options that are for methods that take part."""
    return {name: dict(values) for name, values in options.items() if name in composition.stated()}
