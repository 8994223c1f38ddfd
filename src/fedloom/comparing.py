"""Comparing methods over seeds: the same clients, batches and initial models for all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.api import by_method, describe, execute, resume
from fedloom.bench import Criterion
from fedloom.config import RESULT_FREE, Config, make_config
from fedloom.data import Federation
from fedloom.errors import InputError
from fedloom.finished import Run
from fedloom.folder import RunFolder, claimed, is_run, named_folder
from fedloom.grids import make_grid, options_of
from fedloom.initial import checksum
from fedloom.methods import compose, import_file
from fedloom.methods import methods as known_methods
from fedloom.report import Comparison, Effects, Grid, analyse, read_run, write_report
from fedloom.report import compare as tabulate
from fedloom.report.grid import FILE as GRID_FILE
from fedloom.report.words import plural
from fedloom.request import Own, check, pin_partition, replace_config, with_server_data
from fedloom.storage import write_atomically
from fedloom.together import carry_out
from fedloom.watching import Stopped, Watcher

MOST_SEEDS = 10_000
"""More is a slip of the hand, and would be planned for minutes before anything is seen to happen."""


@dataclass(frozen=True)
class Compared:
    """A finished comparison."""

    path: Path
    """The folder that holds the runs and `report.html`."""
    runs: tuple[Run, ...]
    table: Comparison
    effects: Effects | None = None
    """Which part of a grid helped how much."""

    def __repr__(self) -> str:
        return f"<{plural(len(self.runs), 'run')} in {self.path}: {self.table.headline}>"


def compare(
    methods: Sequence[str] = (),
    seeds: int = 1,
    data: str | Federation = "digits",
    model: str | nn.Module | Callable[[], nn.Module] = "mlp",
    *,
    grid: str | Sequence[Sequence[str]] | Grid | None = None,
    loss: Criterion | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    out: Path | str | None = None,
    runs: Path | str = "runs",
    target: float | None = None,
    at_once: int = 1,
    watcher: Watcher | None = None,
    report: bool = True,
    **settings: Any,
) -> Compared:
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
    own, described = describe(data, model, loss)
    options = by_method(options)
    if grid is not None and not isinstance(grid, Grid):
        grid = plan_grid(grid, options, described | settings, own, watcher)
    plans = _plans(grid.methods if grid else methods, seeds, options or {}, described | settings, own)
    if at_once > 1 and plans[0][1].device == "cpu":
        raise InputError(f"at_once is {at_once}, but runs share a GPU only: on a CPU one run keeps all cores busy.")
    place = named_folder(out) if out is not None else Path(runs) / f"compare-{plans[0][1].data_name}"
    with claimed(place, _refuse_run, numbered=out is None) as path:
        done = _run_all(path, plans, own, grid, at_once, watcher, report)
        records = [read_run(run.path) for run in done]
        if report:
            write_report(records, path / "report.html", target=target, grid=grid)
    table = tabulate(records, target)
    return Compared(path, tuple(done), table, analyse(grid, table.groups) if grid else None)


def _refuse_run(path: Path) -> None:
    if is_run(path):
        raise InputError(f"{path} is a run, whose report would be written over; choose another --out.")


def _run_all(
    path: Path,
    plans: Sequence[tuple[str, Config]],
    own: Own,
    grid: Grid | None,
    at_once: int,
    watcher: Watcher | None,
    report: bool,
) -> list[Run]:
    """Carry out the runs of a comparison in its folder; those that have finished already are kept."""
    places = [(path / f"{name}-seed{config.seed}", config) for name, config in plans]
    for place, config in places:
        if is_run(place):
            _same_plan(place, config)
    if grid is not None:
        write_atomically(path / GRID_FILE, grid.to_json().encode())

    def run(place: Path, config: Config, eye: Watcher | None) -> Run:
        if is_run(place):
            return resume(place, data=own.data, model=own.model, loss=own.loss, watcher=eye, report=report)
        return execute(config, own, out=place, watcher=eye, report=report)

    done = []
    try:
        if at_once > 1:
            jobs = [(place, config, partial(run, place, config)) for place, config in places]
            return carry_out(jobs, min(at_once, len(jobs)), watcher, path)
        for place, config in places:
            if watcher is not None and watcher.wants_stop():
                raise Stopped("stopped between two runs")
            done.append(run(place, config, watcher))
    except Stopped:
        raise Stopped(f"stopped; go on with the same command and --out {path}") from None
    return done


def plan_grid(
    given: str | Sequence[Sequence[str]],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    own: Own | None = None,
    watcher: Watcher | None = None,
) -> Grid:
    """The grid that `compare` would run with these options and settings; what is left out is told to the watcher."""
    for file in (settings or {}).get("imports", ()):
        import_file(file)
    grid = make_grid(given, make_config(settings or {}), options, own, watcher.download if watcher else None)
    for reason in grid.refused.values():
        if watcher is not None:
            watcher.note(f"left out: {reason}")
    return grid


def _plans(
    names: Sequence[str],
    seeds: int,
    options: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    own: Own,
) -> list[tuple[str, Config]]:
    """A config for each method and seed; options of a method go to the runs that it takes part in."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise InputError(f"{twice!r} is named twice; each method is compared once.")
    for file in settings.get("imports", ()):
        import_file(file)
    base = make_config(settings)
    if base.init is not None and base.init_sha256 is None:  # one file for all runs, also for those still to come
        base = replace_config(base, init_sha256=checksum(Path(base.init)))
    # What the server holds is missing at the clients: so that it is in all runs, if one needs it.
    base = with_server_data(pin_partition(base), own, [compose(name) for name in names])
    used: set[str] = set()
    plans = []
    for name in names:
        composition = compose(name)
        used |= set(composition.stated())
        config = replace_config(base, method=name, options=options_of(composition, options))
        config = replace_config(config, options=check(config).stated())
        plans += [(name, replace_config(config, seed=config.seed + seed)) for seed in range(seeds)]
    for method in options:
        if method not in used:
            known = "" if method in known_methods() else " (there is no such method)"
            raise InputError(f"options of {method!r} were given, but it takes no part in the comparison{known}.")
    return plans


def _same_plan(place: Path, config: Config) -> None:
    before = RunFolder.open(place).config.model_dump(exclude=RESULT_FREE)
    now = config.model_dump(exclude=RESULT_FREE)
    if config.clients is None:  # the run has counted them
        del now["clients"]
    for key, value in now.items():
        if before[key] != value:
            raise InputError(
                f"{place} holds a run with {key} {before[key]!r}, not {value!r}; choose another --out to start anew."
            )
