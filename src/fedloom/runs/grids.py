"""Plan a grid of methods: each server with each client and each refiner.

Combinations that cannot run are left out, with a reason.

    fedavg,fedcross,scaffold x sgd,fedprox x none,dynafed

`fedavg`, `sgd` and `none` are the defaults: FedAvg's server, its local training, and no refiner. The default is the
baseline of a list that contains it; otherwise the first name is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

from fedloom.config import Config, make_config
from fedloom.data.cache import Progress
from fedloom.errors import InputError, unknown_name_error
from fedloom.methods import ComposedMethod, Method, compose, methods
from fedloom.methods.composition import IncompatibleMethods
from fedloom.methods.variants import MethodVariant, parse_method_variant, split_variant_list
from fedloom.privacy import check_private_method
from fedloom.report.effects import EffectCell, EffectFactor, EffectGrid
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.callback import Callback, combine_callbacks
from fedloom.runs.resolve import (
    UserObjects,
    import_method_files,
    make_variant_config,
    resolve_run,
    resolve_server_data,
    select_method_options,
)

Given = Mapping[str, Mapping[str, Any]]

PLAIN = {"server": "fedavg", "client": "sgd", "refiner": "none"}
"""The factors in their order, each with its default level."""

FITS: dict[str, Callable[[Method], bool]] = {
    # SCAFFOLD's extras live on the server, so it counts as a server, although its mean is FedAvg's.
    "server": lambda method: method.server is not None or method.extras is not None,
    "client": lambda method: method.client is not None and method.server is None,
    "refiner": lambda method: method.refiner is not None and method.server is None,
}
"""Which methods each list accepts."""


def _parse_grid(grid: str | Sequence[Sequence[str]]) -> tuple[EffectFactor, ...]:
    """Parse a grid such as `fedavg,fedcross x sgd,fedprox`, given as text or as a list of lists."""
    if isinstance(grid, str):
        lists = [split_variant_list(text) for text in re.split(r"\s+[x×]\s+", grid.strip())]
    else:
        lists = [[names] if isinstance(names, str) else list(names) for names in grid]
    if not 2 <= len(lists) <= len(PLAIN):
        raise InputError(
            "a grid is servers x clients or servers x clients x refiners, such as 'fedavg,fedcross x sgd,fedprox', "
            f"not {grid!r}."
        )
    known = methods()
    factors = []
    for texts, (factor, plain) in zip(lists, PLAIN.items(), strict=False):
        if behind := [text for text in texts if text.startswith(f"{plain}:") and plain not in known]:
            raise InputError(f"{plain!r} stands for no method, so nothing can stand behind it, as in {behind[0]!r}.")
        variants = [parse_method_variant(text) for text in texts]
        names = [variant.label for variant in variants]
        for level, name in zip(names, (variant.name for variant in variants), strict=True):
            if names.count(level) > 1:
                raise InputError(f"{level!r} is named twice among the {factor}s of the grid.")
            if name == plain:
                continue
            if name not in known:
                fitting = [one.name for one in known.values() if FITS[factor](one)]
                raise unknown_name_error(factor, name, {plain, *fitting})
            if not FITS[factor](known[name]):
                raise InputError(
                    f"{name} provides a {' and a '.join(known[name].parts)}, so it cannot be one of the {factor}s of a "
                    f"grid; the default there is {plain!r}."
                )
        baseline = plain if plain in names else names[0]
        factors.append(EffectFactor(factor, (baseline, *(name for name in names if name != baseline))))
    return tuple(factors)


def _make_grid(
    grid: str | Sequence[Sequence[str]],
    config: Config,
    options: Given | None = None,
    user_objects: UserObjects | None = None,
    progress: Progress | None = None,
) -> EffectGrid:
    """Build the grid for the data and network of `config`, with a reason for each combination that cannot run.

    These are combinations of incompatible parts, and of parts that reject each other or this task. What is wrong with
    any method (a missing data set, an unknown option) is an error as usual.
    """
    factors = _parse_grid(grid)
    known = methods()
    names = [parse_method_variant(level).name for factor in factors for level in factor.levels]
    named = [known[name] for name in names if name in known]
    objects, built_runs = user_objects or UserObjects(), dict[str, BuiltRun]()
    config = resolve_server_data(config, objects, ComposedMethod("", tuple(named), {}))  # as in all its runs

    def built_run_with(settings: Mapping[str, Any]) -> BuiltRun:
        """Build a run with these settings of a variant, once for all cells that have them."""
        if (key := repr(sorted(settings.items()))) not in built_runs:
            variant = MethodVariant("fedavg", {}, settings, "fedavg")
            planned = make_variant_config({**config.model_dump(), "engine": "sequential"}, variant, objects)
            built_runs[key] = stack.enter_context(build_run(resolve_run(planned, objects), progress).engine_closed())
        return built_runs[key]

    def cell(levels: tuple[str, ...]) -> EffectCell:
        chosen = [name for factor, name in zip(factors, levels, strict=True) if name != PLAIN[factor.name]]
        method = "+".join(chosen) or "fedavg"
        try:
            variant = parse_method_variant(method)
        except InputError as error:  # each level is valid alone: two of them set the same
            return EffectCell(levels, method, f"{method!r} cannot be run: {error}")
        method, of_methods = variant.label, select_method_options(variant.name, options or {})
        try:
            composed_method = compose(variant.name, variant.merge_options(of_methods))
        except IncompatibleMethods as error:
            return EffectCell(levels, method, str(error))
        built_run = built_run_with(variant.settings)
        try:
            parts = composed_method.build(built_run.rounds.context)
            if built_run.config.clip_update is not None:
                check_private_method(composed_method, parts, built_run.layout)
        except InputError as error:
            return EffectCell(levels, method, f"{method!r} cannot be run: {error}")
        return EffectCell(levels, method)

    with ExitStack() as stack:
        cells = tuple(cell(levels) for levels in product(*(factor.levels for factor in factors)))
    effect_grid = EffectGrid(factors, cells)
    if not effect_grid.methods:
        raise InputError(f"no combination of the grid can be run; the first: {effect_grid.cells[0].refusal}")
    return effect_grid


def plan_comparison_grid(
    grid: str | Sequence[Sequence[str]],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    user_objects: UserObjects | None = None,
    callbacks: Sequence[Callback] = (),
) -> EffectGrid:
    """Return the grid that `compare` would run, and tell the callbacks which combinations are left out."""
    import_method_files(settings or {})
    with combine_callbacks(callbacks) as combined:
        effect_grid = _make_grid(grid, make_config(settings or {}), options, user_objects, combined.on_download)
        for reason in effect_grid.refused.values():
            combined.on_message(f"left out: {reason}")
        return effect_grid
