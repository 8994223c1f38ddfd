"""Compare methods over seeds, with the same clients and batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from fedloom.config import EXECUTION_SETTINGS, Config, make_config, replace_config
from fedloom.core.rng import RngStreams
from fedloom.data import FederatedDataset
from fedloom.data.cache import Progress
from fedloom.errors import InputError, RunStopped, TrainingDivergedError
from fedloom.methods import methods as known_methods
from fedloom.methods.variants import parse_method_variant, variant_folder_name
from fedloom.models.initial_weights import initial_weights_sha256
from fedloom.report import (
    ComparisonRecord,
    ComparisonTable,
    GridEffects,
    analyze_effects,
    read_run_record,
    write_report_page,
)
from fedloom.report import make_comparison_table as tabulate
from fedloom.report.comparison_record import FILE as COMPARISON_FILE
from fedloom.report.effects import FILE as GRID_FILE
from fedloom.report.effects import EffectGrid
from fedloom.runs.build import build_run
from fedloom.runs.callback import Callback, CallbackList, combine_callbacks
from fedloom.runs.comparison_command import comparison_to_command
from fedloom.runs.concurrent import run_concurrently
from fedloom.runs.directory import RunDirectory, claim_directory, is_run_directory, parse_run_path
from fedloom.runs.execute import execute_run, resume
from fedloom.runs.grids import plan_comparison_grid
from fedloom.runs.keyword_types import RunSettings
from fedloom.runs.load_data import load_run_data
from fedloom.runs.resolve import (
    PARTITION_BY_SEED,
    RunRequest,
    UserObjects,
    describe_user_objects,
    import_method_files,
    make_data_by_seed,
    make_variant_config,
    resolve_method_options,
    resolve_run,
    select_method_options,
)
from fedloom.runs.result import RunResult
from fedloom.training.context import Criterion
from fedloom.utils.formatting import format_plural

MOST_SEEDS = 10_000
"""More seeds are a typo; planning them would take minutes without any output."""
CHECKED = {"model", "init", "augment", "clip_update"}
"""Settings of a row that only a built run can check. An error must come before the first run, not after it."""


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
    data: str | FederatedDataset | Callable[[int], FederatedDataset] = "digits",
    model: str | nn.Module | Callable[[], nn.Module] = "mlp",
    *,
    grid: str | Sequence[Sequence[str]] | EffectGrid | None = None,
    loss: Criterion | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    out: Path | str | None = None,
    runs: Path | str = "runs",
    target: float | None = None,
    concurrent_runs: int = 1,
    callbacks: Sequence[Callback] = (),
    report: bool = True,
    **settings: Unpack[RunSettings],
) -> ComparisonResult:
    """Run several methods with several seeds, and write one report.

    Checks all settings before the first run. Finished runs of a stopped comparison in `out` stay; the rest is run.

    Args:
        methods: Names of methods, such as `["fedavg", "fedprox+swa"]`. Options and training settings of one row stand
            behind its name, in place of those in other arguments: `["fedavg", "fedavg:lr=0.03", "fedprox:mu=0.1"]`.
        seeds: Number of seeds for each method, counted from the setting `seed`.
        data: As in `run`, or a function from a seed to a `FederatedDataset`, called once for each seed. One
            `FederatedDataset` gives all seeds the same clients.
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
        callbacks: Watch and stop the runs. They watch concurrent runs as one.
        report: Whether to write `report.html` for the comparison and for each run.
        **settings: Fields of `Config`, the same for all runs.

    Returns:
        The runs, a table of their results and, for a grid, the effects of its parts. Diverged runs have no result.

    Raises:
        InputError: An argument or a setting is invalid, or `out` holds runs with other settings.
        RunStopped: A callback stopped the comparison. Call `compare` with the same `out` to continue.
        FedloomError: A run failed, or a callback raised an error.

    Example:
        compared = fedloom.compare(["fedavg", "scaffold"], seeds=3, data="digits", rounds=20, out="comparison")
        print(compared.table.headline)
    """
    _check_arguments(methods, seeds, grid, target, concurrent_runs)
    user_objects, described = _describe_user_objects(data, model, loss, seeds, settings.get("seed", 0))
    values, options = {**described, **settings}, resolve_method_options(options)
    with combine_callbacks(callbacks) as combined:
        plan = _make_plan(methods, grid, seeds, target, options, values, user_objects, combined)
        return _run_plan(plan, out, runs, concurrent_runs, combined, report)


def _check_arguments(methods: Any, seeds: Any, grid: Any, target: Any, concurrent_runs: Any) -> None:
    """Reject arguments of `compare` that no setting of a run covers."""
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


def _describe_user_objects(
    data: str | FederatedDataset | Callable[[int], FederatedDataset],
    model: str | nn.Module | Callable[[], nn.Module],
    loss: Criterion | None,
    seeds: int,
    seed: Any,
) -> tuple[UserObjects, dict[str, Any]]:
    """Return the user's Python objects and the settings that follow from them. Data may differ from seed to seed."""
    first_seed = make_config({"seed": seed}).seed
    data_by_seed = make_data_by_seed(data, seeds, first_seed)
    user_objects, described = describe_user_objects(data_by_seed[first_seed] if data_by_seed else data, model, loss)
    if not data_by_seed:
        return user_objects, described
    return replace(user_objects, data_by_seed=data_by_seed), described | {"partition": PARTITION_BY_SEED}


@dataclass(frozen=True)
class _Plan:
    """What a comparison runs and reports."""

    rows: list[tuple[str, RunRequest]]
    """Label and request of each method and seed."""
    grid: EffectGrid | None
    target: float | None
    command: str | None
    """The command that repeats the comparison; None with Python objects, which no command can hold."""


def _make_plan(
    methods: Sequence[str],
    grid: str | Sequence[Sequence[str]] | EffectGrid | None,
    seeds: int,
    target: float | None,
    options: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    user_objects: UserObjects,
    callbacks: CallbackList,
) -> _Plan:
    """Check all settings and return what to run."""
    if grid is not None and not isinstance(grid, EffectGrid):
        grid = plan_comparison_grid(grid, options, settings, user_objects, [callbacks])
    rows = _plans(grid.methods if grid else methods, seeds, options, settings, user_objects, callbacks.on_download)
    command = None
    if not user_objects.names:
        command = comparison_to_command(methods, grid, seeds, target, options, settings)
    return _Plan(rows, grid, target, command)


def _refuse_run(path: Path) -> None:
    if is_run_directory(path):
        raise InputError(f"{path} is a run, and its report would be overwritten; choose another --out.")


def _run_plan(
    plan: _Plan, out: Path | str | None, runs: Path | str, concurrent_runs: int, callbacks: CallbackList, report: bool
) -> ComparisonResult:
    """Run a comparison in its folder, and write the report about all runs."""
    config, grid = plan.rows[0][1].config, plan.grid
    if concurrent_runs > 1 and config.device == "cpu":
        raise InputError(
            f"concurrent_runs is {concurrent_runs}, but one run keeps all cores of a CPU busy; leave it out."
        )
    place = parse_run_path(out) if out is not None else Path(runs) / f"compare-{config.data_name}"
    with claim_directory(place, _refuse_run, numbered=out is None) as path:
        finished = _run_all(path, plan, concurrent_runs, callbacks, report)
        records = [read_run_record(run.path) for run in finished]
        if report:
            write_report_page(records, path / "report.html", target=plan.target, grid=grid, command=plan.command)
    table = tabulate(records, plan.target)
    return ComparisonResult(path, tuple(finished), table, analyze_effects(grid, table.groups) if grid else None)


def _run_all(path: Path, plan: _Plan, concurrent_runs: int, callbacks: CallbackList, report: bool) -> list[RunResult]:
    """Run or resume all runs of a comparison in its folder; finished ones stay."""
    places = [(path / f"{variant_folder_name(label)}-seed{one.config.seed}", one) for label, one in plan.rows]
    for place, request in places:
        if is_run_directory(place):
            _same_plan(place, request.config)
    if plan.grid is not None:
        plan.grid.write(path)
    ComparisonRecord(tuple(place.name for place, _ in places), plan.command).write(path)

    def run(place: Path, request: RunRequest, callback: Callback) -> RunResult:
        try:
            return run_or_resume(place, request, callback)
        except TrainingDivergedError as error:
            callback.on_message(f"{place.name}: {error}")
            return RunResult(RunDirectory.open(place), request.user_objects)

    def run_or_resume(place: Path, request: RunRequest, callback: Callback) -> RunResult:
        objects = request.user_objects
        if is_run_directory(place):
            return resume(
                place,
                data=objects.data,
                model=objects.model,
                loss=objects.loss,
                callbacks=[callback],
                report=report,
            )
        return execute_run(request, out=place, callbacks=[callback], report=report)

    finished = []
    try:
        if concurrent_runs > 1:
            planned_runs = [(place, request.config, partial(run, place, request)) for place, request in places]
            return run_concurrently(planned_runs, min(concurrent_runs, len(planned_runs)), callbacks, path)
        for place, request in places:
            if callbacks.should_stop():
                raise RunStopped("stopped between two runs")
            finished.append(run(place, request, callbacks))
    except RunStopped:
        raise RunStopped(f"stopped; continue with the same command and --out {path}") from None
    finally:
        if not any(is_run_directory(place) for place, _ in places):  # no run could begin
            for name in (GRID_FILE, COMPARISON_FILE):
                (path / name).unlink(missing_ok=True)
    return finished


def _plans(
    names: Sequence[str],
    seeds: int,
    options: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    user_objects: UserObjects,
    progress: Progress | None = None,
) -> list[tuple[str, RunRequest]]:
    """Return label and request of each row and seed, with the options of the methods of that run."""
    import_method_files(settings)
    variants = [parse_method_variant(name) for name in names]
    rows: list[RunRequest] = []
    for variant in variants:
        values = {**settings, "options": select_method_options(variant.name, options)}
        rows.append(resolve_run(make_variant_config(values, variant, user_objects), user_objects))
    # The server's data are taken from the clients. If one run needs them, all runs get them, for a fair comparison.
    server_data = next((row.config.server_data for row in rows if row.config.server_data is not None), None)
    hash_file = cache(initial_weights_sha256)
    plans: list[tuple[str, RunRequest]] = []
    labels: dict[str, str] = {}
    for request, variant in zip(rows, variants, strict=True):
        request = request.replace_settings(server_data=server_data)
        init = request.config.init
        if init is not None and request.config.init_sha256 is None:
            # one file for all runs, even if it changes meanwhile
            request = request.replace_settings(init_sha256=hash_file(Path(init)))
        config = request.config
        if config.held_out_clients is not None:  # the data decide whether this method can be scored on them
            load_run_data(request, RngStreams(config.seed), progress)
        if CHECKED & variant.settings.keys():
            plain = replace_config(config, method="fedavg", options={}, engine="sequential")
            build_run(resolve_run(plain, user_objects), progress).engine.close()
        chosen = sorted(method.name for method in request.method.methods)
        row = repr((chosen, sorted(config.model_dump(exclude={"method", "variant"}).items())))
        if row in labels:
            same = "named twice" if labels[row] == config.label else f"the same as {labels[row]!r} here"
            raise InputError(f"{config.label!r} is {same}; each method is compared once.")
        labels[row] = config.label
        plans += [(config.label, request.replace_seed(config.seed + seed)) for seed in range(seeds)]
    used = {name for one in rows for name in one.method.resolved_options()}
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
    for settings in (before, now):  # a file of settings cannot hold None
        settings["options"] = {
            method: {name: value for name, value in options.items() if value is not None}
            for method, options in settings["options"].items()
        }
    for key, value in now.items():
        if before[key] != value:
            raise InputError(f"{place} holds a run with {key} {before[key]!r}, not {value!r}; choose another --out.")
