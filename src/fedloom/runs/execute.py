"""fedloom from Python: run, resume and verify runs.

import fedloom
run = fedloom.run(method="fedprox", data="digits", rounds=50)
run.history            # a list of records, one a round: pandas.DataFrame(run.history)
run.model()            # an ordinary nn.Module with the deployed weights
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedloom.config import EXECUTION_SETTINGS, Config, make_config, replace_config
from fedloom.core.layout import model_digest
from fedloom.data import FederatedDataset
from fedloom.devices.selection import selects_only_gpus
from fedloom.engines.base import RemoteEngineFactory
from fedloom.engines.registry import find_launcher
from fedloom.errors import FedloomError, InputError, RunStopped
from fedloom.models.initial_weights import initial_weights_sha256
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.callback import Callback, SilentCallback
from fedloom.runs.directory import RunDirectory, claimed, name_of, parse_run_path, refuse_occupied
from fedloom.runs.loop import run_rounds
from fedloom.runs.out_of_memory import explain_out_of_memory, retry_with_fewer_slots
from fedloom.runs.resolve import UserObjects, describe_user_objects, resolve_method, resolve_method_options
from fedloom.runs.result import RunResult, check_model_file
from fedloom.training.context import Criterion
from fedloom.utils.storage import MODEL_FILE


def run(
    method: str = "fedavg",
    data: str | FederatedDataset = "digits",
    model: str | nn.Module | Callable[[], nn.Module] = "mlp",
    *,
    loss: Criterion | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    out: Path | str | None = None,
    runs: Path | str = "runs",
    watcher: Callback | None = None,
    report: bool = True,
    **settings: Any,
) -> RunResult:
    """Run a method and return the finished run.

    `data` and `model` are names or your own objects: a `Federation`, and a module (whose weights are the start) or
    something that makes one. `loss(output, targets)` is cross-entropy unless you give one. `options` are those of
    the methods, such as {"fedprox": {"mu": 0.1}}; `settings` are the fields of `Config`. The run's folder is `out`,
    or a new one in `runs`.
    """
    own, values = describe_user_objects(data, model, loss)
    values |= {"method": method, "options": resolve_method_options(options), **settings}
    return execute_run(make_config(values), own, out=out, runs=runs, watcher=watcher, report=report)


def execute_run(
    config: Config,
    own: UserObjects | None = None,
    *,
    out: Path | str | None = None,
    runs: Path | str = "runs",
    watcher: Callback | None = None,
    report: bool = True,
    start: Mapping[str, Tensor] | None = None,
    sites: RemoteEngineFactory | None = None,
) -> RunResult:
    """Run what a config says, in a folder that no other process uses meanwhile.

    If the config does not make sense, nothing is left behind. `start` takes the place of what `init` names. `sites`
    take that of an engine on this machine.
    """
    config = replace_config(config, options=resolve_method(config).stated())
    place = parse_run_path(out) if out is not None else Path(runs) / name_of(config)
    with claimed(place, refuse_occupied, numbered=out is None) as path:
        return execute_in(
            path, config, own or UserObjects(), watcher or SilentCallback(), report=report, start=start, sites=sites
        )


def execute_in(
    path: Path,
    config: Config,
    own: UserObjects,
    watcher: Callback,
    *,
    report: bool = True,
    start: Mapping[str, Tensor] | None = None,
    sites: RemoteEngineFactory | None = None,
) -> RunResult:
    """Run what a config says in an empty folder that this process has claimed."""

    def attempt(slots: int | None) -> None:
        if slots is None:
            with _ready(config, own, path, watcher, start, sites) as experiment:
                _start(experiment, path, own, watcher)
        else:
            folder = _changed(RunDirectory.open(path), {"slots": slots})
            _go_on(folder, own, watcher, sites, start if start is not None else _start_of(folder, watcher))

    retry_with_fewer_slots(attempt, watcher)
    return _finish(RunDirectory.open(path), own, report)


def _start(experiment: BuiltRun, path: Path, own: UserObjects, watcher: Callback) -> None:
    """Play a new run."""
    config = experiment.config  # where the data say how many clients there are, it now says so too
    if experiment.beginning is not None:
        config = replace_config(config, init_sha256=experiment.beginning.sha256)
    folder = RunDirectory.create(path, config, own.names, experiment.composition.use_server_data)
    _begin(folder, experiment, watcher)
    folder.write_partition(experiment.rounds.label_counts, experiment.class_names)
    run_rounds(folder, experiment, watcher, start=None)


@contextmanager
def _ready(
    config: Config,
    own: UserObjects,
    path: Path,
    watcher: Callback,
    start: Mapping[str, Tensor] | None,
    sites: RemoteEngineFactory | None,
) -> Iterator[BuiltRun]:
    """Everything a run needs, until it is over."""
    with _reaching(sites, config, own, path) as there:
        with explain_out_of_memory(config.device):
            experiment = build_run(config, own, watcher.download, start, watcher.work, there)
        with experiment.engine_closed(), explain_out_of_memory(config.device, experiment.engine):
            yield experiment


def resume(
    path: Path | str,
    *,
    data: FederatedDataset | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    loss: Criterion | None = None,
    watcher: Callback | None = None,
    report: bool = True,
    sites: RemoteEngineFactory | None = None,
    **changes: Any,
) -> RunResult:
    """Go on with a run that was stopped or killed; the result has the same bits as if it had not been.

    What the run was given as Python objects must be given again. `changes` may be settings that leave the result
    alone: engine, workers, checkpoint_seconds, keep_checkpoints. A finished run is returned as it is; if its model's
    file is gone, it is written again from the last checkpoint.
    """
    own, folder = UserObjects(data, model, loss), RunDirectory.open(Path(path))
    finished = folder.summary() is not None and (folder.path / MODEL_FILE).is_file()
    with nullcontext() if finished else folder.alone():  # a finished run may lie where nothing can be written
        return resume_in(folder, own, watcher or SilentCallback(), report=report, sites=sites, **changes)


def resume_in(
    folder: RunDirectory,
    own: UserObjects,
    watcher: Callback,
    *,
    report: bool = True,
    sites: RemoteEngineFactory | None = None,
    **changes: Any,
) -> RunResult:
    """Go on with a run whose folder this process has claimed."""
    _same_objects(folder, own)
    _refuse_changes(folder.config, changes)
    _refuse_moving(folder, changes)
    folder = _changed(folder, changes)
    summary = folder.summary()
    if summary is not None:
        if not (folder.path / MODEL_FILE).is_file():
            _write_model_again(folder, own, summary["digest"], watcher, sites)
        return _finish(folder, own, report and not (folder.path / "report.html").exists())

    def attempt(slots: int | None) -> None:
        changed = _changed(folder, {} if slots is None else {"slots": slots})
        _go_on(changed, own, watcher, sites, _start_of(changed, watcher))

    retry_with_fewer_slots(attempt, watcher)
    return _finish(folder, own, report)


def _changed(folder: RunDirectory, changes: Mapping[str, Any]) -> RunDirectory:
    """The same run, to be carried out in another way."""
    if not changes:
        return folder
    return RunDirectory(folder.path, make_config({**folder.config.model_dump(), **changes}), folder.own)


def _go_on(
    folder: RunDirectory,
    own: UserObjects,
    watcher: Callback,
    sites: RemoteEngineFactory | None,
    taken: Mapping[str, Tensor] | None,
) -> None:
    """Play what is left of a run, from its last checkpoint on. `taken` is the start, where it came from a file."""
    with _ready(folder.config, own, folder.path, watcher, taken, sites) as experiment:
        _begin(folder, experiment, watcher)
        latest = folder.checkpoints.load_latest(experiment.engine.homes)
        for text in folder.checkpoints.damaged:
            if not experiment.rounds.repeatable:
                raise InputError(f"{text} Rounds played again with other noise would reveal more than was accounted.")
            watcher.note(f"{text} Going on from the checkpoint before it.")
        if latest is None:
            folder.write_partition(experiment.rounds.label_counts, experiment.class_names)
            folder.rewind(-1)
            run_rounds(folder, experiment, watcher, start=None)
        else:
            start, state = latest
            experiment.load(state["parts"])
            experiment.engine.load(state.get("engine", {}))
            folder.rewind(start, state["record"])
            run_rounds(folder, experiment, watcher, start=start)


def verify(
    path: Path | str,
    *,
    data: FederatedDataset | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    loss: Criterion | None = None,
    watcher: Callback | None = None,
    **changes: Any,
) -> tuple[str, str]:
    """Run a finished run again from its config, elsewhere; returns (digest then, digest now).

    Where these agree, `model.safetensors` of the run is held against the new one too: it is what people deploy.
    `changes` may be settings that leave the result alone, as in `resume`.
    """
    folder, own = RunDirectory.open(Path(path)), UserObjects(data, model, loss)
    _refuse_changes(folder.config, changes)
    _same_objects(folder, own)
    before = RunResult(folder, own).digest
    check_model_file(folder.path)
    held = initial_weights_sha256(folder.path / MODEL_FILE)
    if folder.config.noise_source == "system":
        raise InputError(f"{path} cannot be verified: its noise came from the system and is not drawn again.")
    config = make_config({**folder.config.model_dump(), **changes})
    start = _start_of(folder, watcher or SilentCallback())
    with tempfile.TemporaryDirectory(prefix="fedloom-verify-") as place:
        try:
            again = execute_run(config, own, out=Path(place) / "run", watcher=watcher, report=False, start=start)
        except RunStopped:
            raise RunStopped(f"stopped; {path} was not verified.") from None
        if before == again.digest and held != initial_weights_sha256(again.path / MODEL_FILE):
            raise FedloomError(
                f"{folder.path / MODEL_FILE} is not the model that the run made: run again, it gave the same digest, "
                "but the file holds something else."
            )
        return before, again.digest


def _begin(folder: RunDirectory, experiment: BuiltRun, watcher: Callback) -> None:
    """Say what there is to know about the data, and note down what the start was taken from, if it was just now."""
    for text in experiment.notes:
        watcher.note(text)
    if experiment.beginning is not None:
        watcher.note(experiment.beginning.sentence())
        folder.write_beginning(experiment.beginning, experiment.module.state_dict())


def _start_of(folder: RunDirectory, watcher: Callback) -> Mapping[str, Tensor] | None:
    """The start that a run took from a file; a word where that file has changed since, or is gone."""
    start = folder.start()
    if start is not None and folder.config.init is not None:
        try:
            changed = initial_weights_sha256(Path(folder.config.init)) != folder.config.init_sha256
        except InputError:
            changed = True
        if changed:
            watcher.note(
                f"{folder.config.init} is gone or has changed since the run began; going on with the run's own copy of "
                "what it started from."
            )
    return start


def _write_model_again(
    folder: RunDirectory, own: UserObjects, expected: str, watcher: Callback, sites: RemoteEngineFactory | None
) -> None:
    """The last checkpoint of a finished run holds the same model as the file that is gone."""
    # Nobody is trained, so no sites are started, and one GPU of several is enough.
    device = folder.config.device.split(",")[0]
    file, config = folder.path / MODEL_FILE, replace_config(folder.config, engine="plain", device=device)
    taken = _start_of(folder, watcher)
    with _ready(config, own, folder.path, watcher, taken, sites) as experiment:
        try:
            latest = folder.checkpoints.load_latest(experiment.engine.homes)
        except InputError:  # all of them are damaged
            latest = None
        if latest is not None:
            experiment.load(latest[1]["parts"])
        if latest is None or model_digest(experiment.rounds.deployed()) != expected:
            raise InputError(
                f"{file} is gone, and so is the checkpoint after the last round, from which it could be written again; "
                f"{folder.path / 'config.toml'} says how the run is made anew."
            )
        folder.write_model(experiment.deployed())
    watcher.note(f"{file} was gone; it was written again from the last checkpoint.")


def _refuse_moving(folder: RunDirectory, changes: Mapping[str, Any]) -> None:
    """What clients keep lies with the sites in one case and in the checkpoints in the other."""
    before, after = folder.config.engine, changes.get("engine", folder.config.engine)
    if before != after and "flower" in (before, after):
        raise InputError(f"a run of the engine {before!r} cannot go on with {after!r}: its clients are elsewhere.")


@contextmanager
def _reaching(
    sites: RemoteEngineFactory | None, config: Config, own: UserObjects, path: Path
) -> Iterator[RemoteEngineFactory | None]:
    """The sites of a run whose clients are elsewhere; where nobody brings any, they are started on this machine."""
    launcher = find_launcher(config.engine) if sites is None else None
    if launcher is None:
        yield sites
        return
    with launcher(config, own, path) as started:
        yield started


def _refuse_changes(before: Config, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        # GPUs of one kind give the same bits, whichever and however many they are; a CPU gives others.
        if name in EXECUTION_SETTINGS or (
            name == "device" and selects_only_gpus(before.device) and selects_only_gpus(str(value))
        ):
            continue
        free = ", ".join(sorted(EXECUTION_SETTINGS))
        raise InputError(f"{name} would change the result; only {free} may be changed, and one GPU for another.")


def _same_objects(folder: RunDirectory, own: UserObjects) -> None:
    missing = sorted(set(folder.own) - set(own.names))
    if missing:
        raise InputError(
            f"{folder.path} was run from Python with {' and '.join(missing)} of its own; go on from Python too, with "
            f"fedloom.resume or fedloom.verify({str(folder.path)!r}, {', '.join(f'{name}=...' for name in missing)})."
        )
    surplus = sorted(set(own.names) - set(folder.own))
    if surplus:
        raise InputError(f"{folder.path} was run without {' and '.join(surplus)} of its own, so none can be given now.")


def _finish(folder: RunDirectory, own: UserObjects, report: bool) -> RunResult:
    finished = RunResult(folder, own)
    if report:
        finished.report()
    return finished
