"""Comparing methods over seeds: the same clients, batches and initial models for all of them.

Grids of methods: every server with every local and every refiner, and a reason for each that cannot be run.

    fedavg,fedcross,scaffold x sgd,fedprox x none,dynafed

`fedavg`, `sgd` and `none` are what a run has when no method brings the part: FedAvg's server, its plain local training,
no refiner. Where a list has that name it is the baseline, else the first name is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.config import EXECUTION_SETTINGS, Config, make_config, replace_config
from fedloom.data import FederatedDataset
from fedloom.data.cache import Progress
from fedloom.errors import InputError, RunStopped, unknown_name_error
from fedloom.methods import ComposedMethod, Method, compose, import_file, methods
from fedloom.methods import methods as known_methods
from fedloom.methods.composition import IncompatibleMethods
from fedloom.models.initial_weights import initial_weights_sha256
from fedloom.privacy import check_private_method
from fedloom.report import ComparisonTable, GridEffects, analyze_effects, read_run_record, write_report_page
from fedloom.report import make_comparison_table as tabulate
from fedloom.report.effects import FILE as GRID_FILE
from fedloom.report.effects import EffectCell, EffectFactor, EffectGrid
from fedloom.runs.build import build_run
from fedloom.runs.callback import Callback
from fedloom.runs.concurrent import run_concurrently
from fedloom.runs.directory import RunDirectory, claimed, is_run_directory, parse_run_path
from fedloom.runs.execute import execute_run, resume
from fedloom.runs.resolve import (
    UserObjects,
    add_server_data,
    describe_user_objects,
    record_partition_hash,
    resolve_method,
    resolve_method_options,
)
from fedloom.runs.result import RunResult
from fedloom.training.context import Criterion
from fedloom.utils.formatting import format_plural
from fedloom.utils.storage import write_atomically

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


def _parse_grid(given: str | Sequence[Sequence[str]]) -> tuple[EffectFactor, ...]:
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
                raise unknown_name_error(factor, name, {plain, *fitting})
            if not FITS[factor](known[name]):
                raise InputError(
                    f"{name} brings a {' and a '.join(known[name].parts)}, so it does not belong among the {factor}s "
                    f"of a grid; the plain one there is {plain!r}."
                )
        baseline = plain if plain in names else names[0]
        factors.append(EffectFactor(factor, (baseline, *(name for name in names if name != baseline))))
    return tuple(factors)


def _make_grid(
    given: str | Sequence[Sequence[str]],
    config: Config,
    options: Given | None = None,
    own: UserObjects | None = None,
    progress: Progress | None = None,
) -> EffectGrid:
    """The grid on the task that `config` describes, with every combination that cannot be run named and explained.

    Refused are parts that clash, and parts that say themselves that they cannot work together or on this task. What
    is wrong without any method (a data set that is not there, an option that no method has) is an error as always.
    """
    factors = _parse_grid(given)
    known = methods()
    named = [known[name] for factor in factors for name in factor.levels if name in known]
    config = add_server_data(
        config, own or UserObjects(), [ComposedMethod("", tuple(named), {})]
    )  # as all its runs have it
    with build_run(
        replace_config(config, method="fedavg", options={}, engine="plain"), own, progress
    ).engine_closed() as e:
        context = e.rounds.context

    def cell(levels: tuple[str, ...]) -> EffectCell:
        chosen = [name for factor, name in zip(factors, levels, strict=True) if name != PLAIN[factor.name]]
        method = "+".join(chosen) or "fedavg"
        try:
            composition = compose(method)
        except IncompatibleMethods as error:
            return EffectCell(levels, method, str(error))
        composition = compose(method, _options_of_methods(composition, options or {}))
        try:
            parts = composition.build(context)
            if config.clip_update is not None:
                check_private_method(composition, parts, context.layout)
        except InputError as error:
            return EffectCell(levels, method, f"{method!r} cannot be run: {error}")
        return EffectCell(levels, method)

    grid = EffectGrid(factors, tuple(cell(levels) for levels in product(*(factor.levels for factor in factors))))
    if not grid.methods:
        raise InputError(f"no combination of the grid can be run; the first: {grid.cells[0].refusal}")
    return grid


def _options_of_methods(composition: ComposedMethod, options: Given) -> dict[str, dict[str, Any]]:
    """Those of the options that are for methods that take part."""
    return {name: dict(values) for name, values in options.items() if name in composition.stated()}


MOST_SEEDS = 10_000
"""More is a slip of the hand, and would be planned for minutes before anything is seen to happen."""


@dataclass(frozen=True)
class ComparisonResult:
    """A finished comparison."""

    path: Path
    """The folder that holds the runs and `report.html`."""
    runs: tuple[RunResult, ...]
    table: ComparisonTable
    effects: GridEffects | None = None
    """Which part of a grid helped how much."""

    def __repr__(self) -> str:
        return f"<{format_plural(len(self.runs), 'run')} in {self.path}: {self.table.headline}>"


def compare(
    methods: Sequence[str] = (),
    seeds: int = 1,
    data: str | FederatedDataset = "digits",
    model: str | nn.Module | Callable[[], nn.Module] = "mlp",
    *,
    grid: str | Sequence[Sequence[str]] | EffectGrid | None = None,
    loss: Criterion | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    out: Path | str | None = None,
    runs: Path | str = "runs",
    target: float | None = None,
    at_once: int = 1,
    watcher: Callback | None = None,
    report: bool = True,
    **settings: Any,
) -> ComparisonResult:
    """Run each method with each of `seeds` seeds (from the setting `seed` on), and write one report.

    `data`, `model`, `loss`, `options` and `settings` are those of `fedloom.run`; options of a method go to the runs it
    takes part in. `target` is the accuracy whose reaching is timed. Everything is checked before the first run
    starts.

    In place of `methods`, a `grid` such as "fedavg,fedcross x sgd,fedprox x none,dynafed" (or a list of lists) names
    servers, locals and perhaps refiners, and all combinations are run; those that cannot be are left out with the
    reason (`Compared.effects.grid.refused`). The report then shows which part helped how much.

    `at_once` runs share a GPU at a time, where one alone does not fill it (`device="cuda"`).

    With an `out` that holds a comparison already, finished runs are kept and the rest is done: a comparison
    that was stopped goes on.
    """
    if isinstance(methods, str) or not all(isinstance(name, str) for name in methods or ()):
        raise InputError(f"methods must be a list of names, such as ['fedavg', 'scaffold'], not {methods!r}.")
    for name, value, kind in (("seeds", seeds, int), ("at_once", at_once, int), ("target", target, int | float)):
        if not isinstance(value, kind) and (name, value) != ("target", None):
            raise InputError(f"{name} must be a {'whole ' if kind is int else ''}number, not {value!r}.")
    if not 1 <= seeds <= MOST_SEEDS:
        raise InputError(f"seeds must be from 1 to {MOST_SEEDS:,}, not {seeds}.")
    if at_once < 1:
        raise InputError(f"at_once must be 1 or more, not {at_once}.")
    if target is not None and not 0 < target <= 1:
        raise InputError(f"target is an accuracy between 0 and 1, not {target}.")
    if (grid is None) == (not methods):
        raise InputError("name the methods to compare, or a grid of them: one of the two.")
    own, described = describe_user_objects(data, model, loss)
    options = resolve_method_options(options)
    if grid is not None and not isinstance(grid, EffectGrid):
        grid = plan_comparison_grid(grid, options, described | settings, own, watcher)
    plans = _plans(grid.methods if grid else methods, seeds, options or {}, described | settings, own)
    if at_once > 1 and plans[0][1].device == "cpu":
        raise InputError(f"at_once is {at_once}, but runs share a GPU only: on a CPU one run keeps all cores busy.")
    place = parse_run_path(out) if out is not None else Path(runs) / f"compare-{plans[0][1].data_name}"
    with claimed(place, _refuse_run, numbered=out is None) as path:
        done = _run_all(path, plans, own, grid, at_once, watcher, report)
        records = [read_run_record(run.path) for run in done]
        if report:
            write_report_page(records, path / "report.html", target=target, grid=grid)
    table = tabulate(records, target)
    return ComparisonResult(path, tuple(done), table, analyze_effects(grid, table.groups) if grid else None)


def _refuse_run(path: Path) -> None:
    if is_run_directory(path):
        raise InputError(f"{path} is a run, whose report would be written over; choose another --out.")


def _run_all(
    path: Path,
    plans: Sequence[tuple[str, Config]],
    own: UserObjects,
    grid: EffectGrid | None,
    at_once: int,
    watcher: Callback | None,
    report: bool,
) -> list[RunResult]:
    """Carry out the runs of a comparison in its folder; those that have finished already are kept."""
    places = [(path / f"{name}-seed{config.seed}", config) for name, config in plans]
    for place, config in places:
        if is_run_directory(place):
            _same_plan(place, config)
    if grid is not None:
        write_atomically(path / GRID_FILE, grid.to_json().encode())

    def run(place: Path, config: Config, eye: Callback | None) -> RunResult:
        if is_run_directory(place):
            return resume(place, data=own.data, model=own.model, loss=own.loss, watcher=eye, report=report)
        return execute_run(config, own, out=place, watcher=eye, report=report)

    done = []
    try:
        if at_once > 1:
            jobs = [(place, config, partial(run, place, config)) for place, config in places]
            return run_concurrently(jobs, min(at_once, len(jobs)), watcher, path)
        for place, config in places:
            if watcher is not None and watcher.wants_stop():
                raise RunStopped("stopped between two runs")
            done.append(run(place, config, watcher))
    except RunStopped:
        raise RunStopped(f"stopped; go on with the same command and --out {path}") from None
    return done


def plan_comparison_grid(
    given: str | Sequence[Sequence[str]],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    own: UserObjects | None = None,
    watcher: Callback | None = None,
) -> EffectGrid:
    """The grid that `compare` would run with these options and settings; what is left out is told to the watcher."""
    for file in (settings or {}).get("imports", ()):
        import_file(file)
    grid = _make_grid(given, make_config(settings or {}), options, own, watcher.download if watcher else None)
    for reason in grid.refused.values():
        if watcher is not None:
            watcher.note(f"left out: {reason}")
    return grid


def _plans(
    names: Sequence[str],
    seeds: int,
    options: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    own: UserObjects,
) -> list[tuple[str, Config]]:
    """A config for each method and seed; options of a method go to the runs that it takes part in."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise InputError(f"{twice!r} is named twice; each method is compared once.")
    for file in settings.get("imports", ()):
        import_file(file)
    base = make_config(settings)
    if base.init is not None and base.init_sha256 is None:  # one file for all runs, also for those still to come
        base = replace_config(base, init_sha256=initial_weights_sha256(Path(base.init)))
    # What the server holds is missing at the clients: so that it is in all runs, if one needs it.
    base = add_server_data(record_partition_hash(base), own, [compose(name) for name in names])
    used: set[str] = set()
    plans = []
    for name in names:
        composition = compose(name)
        used |= set(composition.stated())
        config = replace_config(base, method=name, options=_options_of_methods(composition, options))
        config = replace_config(config, options=resolve_method(config).stated())
        plans += [(name, replace_config(config, seed=config.seed + seed)) for seed in range(seeds)]
    for method in options:
        if method not in used:
            known = "" if method in known_methods() else " (there is no such method)"
            raise InputError(f"options of {method!r} were given, but it takes no part in the comparison{known}.")
    return plans


def _same_plan(place: Path, config: Config) -> None:
    before = RunDirectory.open(place).config.model_dump(exclude=EXECUTION_SETTINGS)
    now = config.model_dump(exclude=EXECUTION_SETTINGS)
    if config.clients is None:  # the run has counted them
        del now["clients"]
    for key, value in now.items():
        if before[key] != value:
            raise InputError(
                f"{place} holds a run with {key} {before[key]!r}, not {value!r}; choose another --out to start anew."
            )
