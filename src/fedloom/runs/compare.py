"""Compare methods over seeds, with the same clients, batches and initial models for all methods.

A grid of methods combines each server with each client and each refiner. Combinations that cannot run are left out with
a reason.

    fedavg,fedcross,scaffold x sgd,fedprox x none,dynafed

`fedavg`, `sgd` and `none` are the defaults: FedAvg's server, its local training, and no refiner. The default is the
baseline of a list that contains it; otherwise the first name is.
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
from fedloom.report import (
    ComparisonRecord,
    ComparisonTable,
    GridEffects,
    analyze_effects,
    read_run_record,
    write_report_page,
)
from fedloom.report import make_comparison_table as tabulate
from fedloom.report.effects import FILE as GRID_FILE
from fedloom.report.effects import EffectCell, EffectFactor, EffectGrid
from fedloom.runs.build import build_run
from fedloom.runs.callback import Callback
from fedloom.runs.comparison_command import comparison_to_command
from fedloom.runs.concurrent import run_concurrently
from fedloom.runs.directory import RunDirectory, claim_directory, is_run_directory, parse_run_path
from fedloom.runs.execute import execute_run, resume
from fedloom.runs.resolve import (
    UserObjects,
    describe_user_objects,
    record_partition_hash,
    resolve_method,
    resolve_method_options,
    resolve_server_data,
)
from fedloom.runs.result import RunResult
from fedloom.training.context import Criterion
from fedloom.utils.formatting import format_plural
from fedloom.utils.storage import write_atomically

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
        lists = [[name.strip() for name in text.split(",")] for text in re.split(r"\s+[x×]\s+", grid.strip())]
    else:
        lists = [[names] if isinstance(names, str) else list(names) for names in grid]
    if not 2 <= len(lists) <= len(PLAIN):
        raise InputError(
            "a grid is servers x clients or servers x clients x refiners, such as 'fedavg,fedcross x sgd,fedprox', "
            f"not {grid!r}."
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
    named = [known[name] for factor in factors for name in factor.levels if name in known]
    config = resolve_server_data(
        config, user_objects or UserObjects(), [ComposedMethod("", tuple(named), {})]
    )  # as in all its runs
    with build_run(
        replace_config(config, method="fedavg", options={}, engine="sequential"), user_objects, progress
    ).engine_closed() as built_run:
        context = built_run.rounds.context

    def cell(levels: tuple[str, ...]) -> EffectCell:
        chosen = [name for factor, name in zip(factors, levels, strict=True) if name != PLAIN[factor.name]]
        method = "+".join(chosen) or "fedavg"
        try:
            composed_method = compose(method)
        except IncompatibleMethods as error:
            return EffectCell(levels, method, str(error))
        composed_method = compose(method, _options_of_methods(composed_method, options or {}))
        try:
            parts = composed_method.build(context)
            if config.clip_update is not None:
                check_private_method(composed_method, parts, context.layout)
        except InputError as error:
            return EffectCell(levels, method, f"{method!r} cannot be run: {error}")
        return EffectCell(levels, method)

    effect_grid = EffectGrid(factors, tuple(cell(levels) for levels in product(*(factor.levels for factor in factors))))
    if not effect_grid.methods:
        raise InputError(f"no combination of the grid can be run; the first: {effect_grid.cells[0].refusal}")
    return effect_grid


def _options_of_methods(composed_method: ComposedMethod, options: Given) -> dict[str, dict[str, Any]]:
    """Return the options of the methods that are part of `composed_method`."""
    return {name: dict(values) for name, values in options.items() if name in composed_method.resolved_options()}


MOST_SEEDS = 10_000
"""More seeds are a typo; planning them would take minutes without any output."""


@dataclass(frozen=True)
class ComparisonResult:
    """A finished comparison.

    Example:
        compared = fedloom.compare(["fedavg", "scaffold"], seeds=2, rounds=3)
        print(compared.table.headline, compared.path / "report.html")
    """

    path: Path
    """The folder with the runs and `report.html`."""
    runs: tuple[RunResult, ...]
    """The runs: for each method one per seed."""
    table: ComparisonTable
    """Means over the seeds and differences between the methods."""
    effects: GridEffects | None = None
    """The effect of each part of a grid; None without a grid."""

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
    concurrent_runs: int = 1,
    callback: Callback | None = None,
    report: bool = True,
    **settings: Any,
) -> ComparisonResult:
    """Run several methods with several seeds, and write one report.

    All settings are checked before the first run starts. If `out` holds a stopped comparison, its finished runs stay
    and the rest is run.

    Args:
        methods: Names of methods, such as `["fedavg", "fedprox+swa"]`.
        seeds: Number of seeds for each method, counted from the setting `seed`.
        data: As in `run`.
        model: As in `run`.
        grid: Servers, clients and optional refiners to combine, in place of `methods`: a text such as
            "fedavg,fedcross x sgd,fedprox x none,dynafed", or a list of lists. Combinations that cannot run are left
            out; `effects.grid.refused` of the result has the reasons. The report shows the effect of each part.
        loss: As in `run`.
        options: Options by method, as in `run`. A run gets the options of its methods.
        out: The folder of the comparison; by default a new one in `runs`.
        runs: The parent of new folders.
        target: Test accuracy from 0 to 1; the report counts the rounds to reach it. By default 90 % of the best
            result. A target that guessing reaches is not counted.
        concurrent_runs: Number of runs that share a GPU at a time, if one alone does not fill it (`device="cuda"`).
        callback: Watches and stops the runs.
        report: Whether to write `report.html` for the comparison and for each run.
        **settings: Fields of `Config`, the same for all runs.

    Returns:
        The runs, a table of their results and, for a grid, the effects of its parts.

    Raises:
        InputError: An argument or a setting is invalid, or `out` holds runs with other settings.
        RunStopped: The callback stopped the comparison. Call `compare` with the same `out` to continue.
        FedloomError: A run failed.

    Example:
        compared = fedloom.compare(["fedavg", "scaffold"], seeds=3, data="digits", rounds=20, out="comparison")
        print(compared.table.headline)
    """
    if isinstance(methods, str) or not all(isinstance(name, str) for name in methods or ()):
        raise InputError(f"methods must be a list of names, such as ['fedavg', 'scaffold'], not {methods!r}.")
    for name, value, kind in (
        ("seeds", seeds, int),
        ("concurrent_runs", concurrent_runs, int),
        ("target", target, int | float),
    ):
        if not isinstance(value, kind) and (name, value) != ("target", None):
            raise InputError(f"{name} must be a {'whole ' if kind is int else ''}number, not {value!r}.")
    if not 1 <= seeds <= MOST_SEEDS:
        raise InputError(f"seeds must be from 1 to {MOST_SEEDS:,}, not {seeds}.")
    if concurrent_runs < 1:
        raise InputError(f"concurrent_runs must be 1 or more, not {concurrent_runs}.")
    if target is not None and not 0 < target <= 1:
        raise InputError(f"target is an accuracy between 0 and 1, not {target}.")
    if (grid is None) == (not methods):
        raise InputError("give either methods to compare or a grid, and not both.")
    user_objects, described = describe_user_objects(data, model, loss)
    options = resolve_method_options(options)
    if grid is not None and not isinstance(grid, EffectGrid):
        grid = plan_comparison_grid(grid, options, described | settings, user_objects, callback)
    plans = _plans(grid.methods if grid else methods, seeds, options or {}, described | settings, user_objects)
    if concurrent_runs > 1 and plans[0][1].device == "cpu":
        raise InputError(
            f"concurrent_runs is {concurrent_runs}, but one run keeps all cores of a CPU busy; leave it out."
        )
    place = parse_run_path(out) if out is not None else Path(runs) / f"compare-{plans[0][1].data_name}"
    with claim_directory(place, _refuse_run, numbered=out is None) as path:
        command = None  # Python objects have none
        if not user_objects.names:
            command = comparison_to_command(methods, grid, seeds, target, options, described | settings)
        finished = _run_all(path, plans, user_objects, grid, command, concurrent_runs, callback, report)
        records = [read_run_record(run.path) for run in finished]
        if report:
            write_report_page(records, path / "report.html", target=target, grid=grid, command=command)
    table = tabulate(records, target)
    return ComparisonResult(path, tuple(finished), table, analyze_effects(grid, table.groups) if grid else None)


def _refuse_run(path: Path) -> None:
    if is_run_directory(path):
        raise InputError(f"{path} is a run, and its report would be overwritten; choose another --out.")


def _run_all(
    path: Path,
    plans: Sequence[tuple[str, Config]],
    user_objects: UserObjects,
    grid: EffectGrid | None,
    command: str | None,
    concurrent_runs: int,
    callback: Callback | None,
    report: bool,
) -> list[RunResult]:
    """Run or resume all runs of a comparison in its folder; finished ones stay."""
    places = [(path / f"{name}-seed{config.seed}", config) for name, config in plans]
    for place, config in places:
        if is_run_directory(place):
            _same_plan(place, config)
    if grid is not None:
        write_atomically(path / GRID_FILE, grid.to_json().encode())
    ComparisonRecord(tuple(place.name for place, _ in places), command).write(path)

    def run(place: Path, config: Config, callback: Callback | None) -> RunResult:
        if is_run_directory(place):
            return resume(
                place,
                data=user_objects.data,
                model=user_objects.model,
                loss=user_objects.loss,
                callback=callback,
                report=report,
            )
        return execute_run(config, user_objects, out=place, callback=callback, report=report)

    finished = []
    try:
        if concurrent_runs > 1:
            planned_runs = [(place, config, partial(run, place, config)) for place, config in places]
            return run_concurrently(planned_runs, min(concurrent_runs, len(planned_runs)), callback, path)
        for place, config in places:
            if callback is not None and callback.should_stop():
                raise RunStopped("stopped between two runs")
            finished.append(run(place, config, callback))
    except RunStopped:
        raise RunStopped(f"stopped; continue with the same command and --out {path}") from None
    return finished


def plan_comparison_grid(
    grid: str | Sequence[Sequence[str]],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    user_objects: UserObjects | None = None,
    callback: Callback | None = None,
) -> EffectGrid:
    """Return the grid that `compare` would run, and tell the callback which combinations are left out."""
    for file in (settings or {}).get("imports", ()):
        import_file(file)
    effect_grid = _make_grid(
        grid, make_config(settings or {}), options, user_objects, callback.on_download if callback else None
    )
    for reason in effect_grid.refused.values():
        if callback is not None:
            callback.on_message(f"left out: {reason}")
    return effect_grid


def _plans(
    names: Sequence[str],
    seeds: int,
    options: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    user_objects: UserObjects,
) -> list[tuple[str, Config]]:
    """Return a config for each method and seed, with the options of the methods of that run."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise InputError(f"{twice!r} is named twice; each method is compared once.")
    for file in settings.get("imports", ()):
        import_file(file)
    base = make_config(settings)
    if base.init is not None and base.init_sha256 is None:  # the same file for all runs, even if it changes meanwhile
        base = replace_config(base, init_sha256=initial_weights_sha256(Path(base.init)))
    # The server's data are taken from the clients. If one run needs them, all runs get them, for a fair comparison.
    base = resolve_server_data(record_partition_hash(base), user_objects, [compose(name) for name in names])
    used: set[str] = set()
    plans = []
    for name in names:
        composed_method = compose(name)
        used |= set(composed_method.resolved_options())
        config = replace_config(base, method=name, options=_options_of_methods(composed_method, options))
        config = replace_config(config, options=resolve_method(config).resolved_options())
        plans += [(name, replace_config(config, seed=config.seed + seed)) for seed in range(seeds)]
    for method in options:
        if method not in used:
            known = "" if method in known_methods() else " (there is no such method)"
            raise InputError(f"options of {method!r} were given, but it takes no part in the comparison{known}.")
    return plans


def _same_plan(place: Path, config: Config) -> None:
    before = RunDirectory.open(place).config.model_dump(exclude=EXECUTION_SETTINGS)
    now = config.model_dump(exclude=EXECUTION_SETTINGS)
    if config.clients is None:  # the run has recorded their number
        del now["clients"]
    for key, value in now.items():
        if before[key] != value:
            raise InputError(
                f"{place} holds a run with {key} {before[key]!r}, not {value!r}; choose another --out to start anew."
            )
