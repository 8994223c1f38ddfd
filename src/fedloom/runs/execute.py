"""Run, resume and verify runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor, nn

from fedloom.config import EXECUTION_SETTINGS, Config, make_config, replace_config
from fedloom.core.layout import model_digest
from fedloom.data import FederatedDataset
from fedloom.devices.selection import selects_only_gpus
from fedloom.engines.base import RemoteEngineFactory
from fedloom.engines.registry import find_registered_launcher
from fedloom.errors import FedloomError, InputError, RunStopped, TrainingDivergedError
from fedloom.models.initial_weights import initial_weights_sha256
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.callback import Callback, CallbackList, combine_callbacks
from fedloom.runs.config_file import merge_config_file
from fedloom.runs.directory import (
    RunDirectory,
    claim_directory,
    directory_name,
    parse_run_path,
    refuse_occupied_directory,
)
from fedloom.runs.extend import extend_run
from fedloom.runs.inputs import check_inputs, describe_machine, hash_built_run
from fedloom.runs.keyword_types import ExecutionSettings, ResumeSettings, RunSettings
from fedloom.runs.leftovers import name_cache_folder, remove_orphaned_rows, verification_folder
from fedloom.runs.loop import run_rounds
from fedloom.runs.out_of_memory import explain_out_of_memory, retry_with_fewer_slots
from fedloom.runs.resolve import (
    RunRequest,
    UserObjects,
    describe_user_objects,
    resolve_config,
    resolve_method_options,
    resolve_run,
)
from fedloom.runs.result import RunResult, read_result_model
from fedloom.training.context import Criterion
from fedloom.utils.run_files import METRICS_CHECKSUM, ROUNDS_READ
from fedloom.utils.storage import MODEL_FILE


def run(
    method: str | None = None,
    data: str | FederatedDataset | None = None,
    model: str | nn.Module | Callable[[], nn.Module] | None = None,
    *,
    config: Path | str | None = None,
    loss: Criterion | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    out: Path | str | None = None,
    runs: Path | str = "runs",
    callbacks: Sequence[Callback] = (),
    report: bool = True,
    **settings: Unpack[RunSettings],
) -> RunResult:
    """Run a method and return the finished run.

    Args:
        method: A method, or several joined by `+`. Options and training settings may stand behind a name, in place of
            those in other arguments: `fedprox:mu=0.1,lr=0.05`. By default "fedavg".
        data: The name of a data set, or your own `FederatedDataset`. By default "digits".
        model: The name of a network, your own module, whose weights are the initial ones, or a function that makes one.
            By default "mlp".
        config: A TOML file of settings, such as the `config.toml` of another run. Other arguments replace its values.
        loss: Called as `loss(output, targets)`; by default cross-entropy, and for a regression the mean squared error.
        options: Options by method, such as `{"fedprox": {"mu": 0.1}}`.
        out: The run directory; by default a new one in `runs`.
        runs: The parent of new run directories.
        callbacks: Watch and stop the run.
        report: Whether to write `report.html`.
        **settings: Fields of `Config`, such as `rounds=50`.

    Returns:
        The finished run.

    Raises:
        InputError: A setting or an object is invalid, or `out` is not empty. Nothing is written.
        RunStopped: A callback stopped the run; `resume` continues it.
        TrainingDivergedError: At least half of the updates were not finite, three rounds in a row.
        FedloomError: The run failed, for example because too few clients sent an update, memory ran out, or a callback
            raised an error.

    Example:
        run = fedloom.run("fedprox", data="digits", rounds=50, options={"fedprox": {"mu": 0.1}})
        print(run.accuracy, run.history[-1])
        network = run.model()
    """
    user_objects, described = describe_user_objects(
        "digits" if data is None else data, "mlp" if model is None else model, loss
    )
    values = {"method": method, "options": resolve_method_options(options), **settings}
    if config is None:
        values = {**described, **values, "method": "fedavg" if method is None else method}
    else:
        names = {key: value for key, value in (("data", data), ("model", model)) if value is not None}
        of_objects = {key: value for key, value in described.items() if key not in ("data", "model") or key in names}
        values = merge_config_file(config, {**of_objects, **values})
    request = resolve_run(resolve_config(values, user_objects), user_objects)
    return execute_run(request, out=out, runs=runs, callbacks=callbacks, report=report)


def execute_run(
    request: RunRequest,
    *,
    out: Path | str | None = None,
    runs: Path | str = "runs",
    callbacks: Sequence[Callback] = (),
    report: bool = True,
    initial_weights: Mapping[str, Tensor] | None = None,
    remote_engine: RemoteEngineFactory | None = None,
) -> RunResult:
    """Run a request in a folder that is locked against other processes.

    A request that cannot be built leaves no files behind. `initial_weights` replaces the file that `init` names.
    `remote_engine` replaces the engine of this machine.
    """
    place = parse_run_path(out) if out is not None else Path(runs) / directory_name(request.config)
    with (
        combine_callbacks(callbacks) as combined,
        claim_directory(place, refuse_occupied_directory, numbered=out is None) as path,
    ):
        return execute_in_directory(
            path,
            request,
            combined,
            report=report,
            initial_weights=initial_weights,
            remote_engine=remote_engine,
        )


def execute_in_directory(
    path: Path,
    request: RunRequest,
    callbacks: CallbackList,
    *,
    report: bool = True,
    initial_weights: Mapping[str, Tensor] | None = None,
    remote_engine: RemoteEngineFactory | None = None,
) -> RunResult:
    """Run a request in an empty folder that this process has claimed."""

    def attempt(slots: int | None) -> None:
        if slots is None:
            own = request.replace_settings(cache_dir=name_cache_folder(request.config))
            with _ready(own, path, callbacks, initial_weights, remote_engine) as built_run:
                _start(built_run, path, request, callbacks)
        else:
            directory = _changed(RunDirectory.open(path), {"slots": slots})
            weights = initial_weights if initial_weights is not None else _start_of(directory, callbacks)
            _go_on(directory, replace(request, config=directory.config), callbacks, remote_engine, weights)

    retry_with_fewer_slots(attempt, callbacks)
    return _finish(RunDirectory.open(path), request.user_objects, report)


def _start(built_run: BuiltRun, path: Path, request: RunRequest, callbacks: CallbackList) -> None:
    """Start a new run. In the `cache_dir` of the request, this run has a folder of its own."""
    # The config has the number of clients, even if the data define it.
    config = replace_config(built_run.config, cache_dir=request.config.cache_dir)
    if built_run.initial_weights is not None:
        config = replace_config(config, init_sha256=built_run.initial_weights.sha256)
    directory = RunDirectory.create(
        path,
        config,
        request.user_objects.names,
        built_run.report_values(),
        data_hashes=hash_built_run(built_run),
        machine=describe_machine(config.device),
        cache_dir=built_run.config.cache_dir,
    )
    _begin(directory, built_run, callbacks)
    _write_partition(directory, built_run)
    run_rounds(directory, built_run, callbacks, first_round=None)


def _write_partition(directory: RunDirectory, built_run: BuiltRun) -> None:
    directory.write_partition(built_run.rounds.label_counts, built_run.data.class_names, built_run.count_test_labels())


@contextmanager
def _ready(
    request: RunRequest,
    path: Path,
    callbacks: CallbackList,
    initial_weights: Mapping[str, Tensor] | None,
    remote_engine: RemoteEngineFactory | None,
) -> Iterator[BuiltRun]:
    """Build a run, and close it at the end."""
    device = request.config.device
    with _reaching(remote_engine, request, path) as reached_engine:
        with explain_out_of_memory(device):
            built_run = build_run(
                request, callbacks.on_download, initial_weights, callbacks.on_server_progress, reached_engine
            )
        with built_run.engine_closed(), explain_out_of_memory(device, built_run.engine):
            yield built_run


def resume(
    path: Path | str,
    *,
    data: FederatedDataset | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    loss: Criterion | None = None,
    callbacks: Sequence[Callback] = (),
    report: bool = True,
    remote_engine: RemoteEngineFactory | None = None,
    **changes: Unpack[ResumeSettings],
) -> RunResult:
    """Continue a run that was stopped or killed. The result has the same bits as without the interruption.

    A finished run is returned as it is. If its model file is missing, it is written again from the last checkpoint.
    With `rounds`, a finished run is extended to this total. Its digest is that of a run with as many rounds.

    Args:
        path: The run directory.
        data: The data, if the run was given an object.
        model: The model, if the run was given an object.
        loss: The loss, if the run was given one.
        callbacks: Watch and stop the run.
        report: Whether to write `report.html`.
        remote_engine: Creates the engine if the clients are elsewhere, such as Flower sites.
        **changes: Settings that do not change the result: `engine`, `workers`, `slots`, `nodes`, `deadline`,
            `checkpoint_seconds`, `keep_checkpoints`, and `device` from GPUs to other GPUs of the same kind. And
            `rounds` of a finished run, unless its method depends on their number.

    Returns:
        The finished run.

    Raises:
        InputError: `path` is not a run or is damaged, an object is missing, or a change would change the result.
        RunStopped: A callback stopped the run again.
        FedloomError: The run failed, or a callback raised an error.

    Example:
        run = fedloom.resume("runs/fedprox-digits-seed0-001", workers=4)
    """
    user_objects, directory = UserObjects(data, model, loss), RunDirectory.open(Path(path))
    finished = directory.summary() is not None and not directory.lacks_model() and changes.get("rounds") is None
    with (
        combine_callbacks(callbacks) as combined,
        nullcontext() if finished else directory.lock(),  # a finished run may be on a read-only disk
    ):
        return resume_in_directory(
            directory, user_objects, combined, report=report, remote_engine=remote_engine, **changes
        )


def resume_in_directory(
    directory: RunDirectory,
    user_objects: UserObjects,
    callbacks: CallbackList,
    *,
    report: bool = True,
    remote_engine: RemoteEngineFactory | None = None,
    **changes: Any,
) -> RunResult:
    """Resume a run whose folder this process has claimed."""
    _same_objects(directory, user_objects)
    rounds = changes.pop("rounds", None)
    _refuse_changes(directory.config, changes)
    _refuse_moving(directory, changes)
    if rounds is not None:
        directory = extend_run(directory, rounds)
    directory = _changed(directory, changes)
    summary = directory.summary()
    if summary is not None:
        if directory.lacks_model():
            _write_model_again(directory, user_objects, summary["digest"], callbacks, remote_engine)
        return _finish(directory, user_objects, report and not (directory.path / "report.html").exists())

    request = resolve_run(directory.config, user_objects)

    def attempt(slots: int | None) -> None:
        change = {} if slots is None else {"slots": slots}
        weights = _start_of(directory, callbacks)
        _go_on(_changed(directory, change), request.replace_settings(**change), callbacks, remote_engine, weights)

    retry_with_fewer_slots(attempt, callbacks)
    return _finish(directory, user_objects, report)


def _changed(directory: RunDirectory, changes: Mapping[str, Any]) -> RunDirectory:
    """Return the same run with changed settings."""
    if not changes:
        return directory
    return RunDirectory(
        directory.path, make_config({**directory.config.model_dump(), **changes}), directory.python_objects
    )


def _go_on(
    directory: RunDirectory,
    request: RunRequest,
    callbacks: CallbackList,
    remote_engine: RemoteEngineFactory | None,
    initial_weights: Mapping[str, Tensor] | None,
) -> None:
    """Continue a run from its last checkpoint. `initial_weights` are those that it read from a file, if it did."""
    own = request.replace_settings(cache_dir=directory.cache_dir)
    with _ready(own, directory.path, callbacks, initial_weights, remote_engine) as built_run:
        check_inputs(directory, hash_built_run(built_run), callbacks)
        _begin(directory, built_run, callbacks)
        latest = directory.checkpoints.load_latest(built_run.engine.client_states)
        for text in directory.checkpoints.damaged:
            if not built_run.rounds.repeatable:
                raise InputError(
                    f"{text} Rounds repeated with other noise would reveal more than epsilon accounts for."
                )
            callbacks.on_message(f"{text} Continuing from the checkpoint before it.")
        if latest is None:
            remove_orphaned_rows(directory)
            _write_partition(directory, built_run)
            directory.rewind(-1)
            run_rounds(directory, built_run, callbacks, first_round=None)
        else:
            first_round, state = latest
            built_run.load_state_dict(state["parts"])
            built_run.engine.load_state_dict(state["engine"])
            built_run.rounds.diverging.load_state_dict(state["divergence"])
            if state[ROUNDS_READ]:
                built_run.rounds.context.rounds_read.note()
            fault = directory.rewind(first_round, state["record"], state[METRICS_CHECKSUM])
            if fault is not None:
                callbacks.on_message(f"{fault} The rounds after the last checkpoint run again.")
            remove_orphaned_rows(directory)
            if first_round % built_run.config.eval_every and first_round < built_run.rounds.total:
                directory.remove_evaluation(first_round)
            del latest, state  # as large as all models of the server
            run_rounds(directory, built_run, callbacks, first_round=first_round)


def verify(
    path: Path | str,
    *,
    data: FederatedDataset | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    loss: Criterion | None = None,
    callbacks: Sequence[Callback] = (),
    **changes: Unpack[ExecutionSettings],
) -> tuple[str, str]:
    """Repeat a finished run from its config in a temporary folder, and return both digests.

    If the digests agree, `model.safetensors` is compared with the new one too, because it is what users deploy.

    Args:
        path: The run directory.
        data: The data, if the run was given an object.
        model: The model, if the run was given an object.
        loss: The loss, if the run was given one.
        callbacks: Watch and stop the repetition.
        **changes: Settings that do not change the result, as in `resume`.

    Returns:
        The digest of the run and the digest of the repetition. They are equal if the result is the same.

    Raises:
        InputError: The run has not finished or lacks its model file, an object is missing, a change would change the
            result, or the noise came from the operating system.
        RunStopped: A callback stopped the repetition.
        FedloomError: The digests agree, but `model.safetensors` is not the model of the run; or the repetition or a
            callback failed.

    Example:
        before, now = fedloom.verify("runs/fedprox-digits-seed0-001")
        assert before == now
    """
    directory, user_objects = RunDirectory.open(Path(path)), UserObjects(data, model, loss)
    _refuse_changes(directory.config, changes)
    _same_objects(directory, user_objects)
    result = RunResult(directory, user_objects)
    before, held = result.digest, _hash_model_file(result)
    if directory.config.noise_source == "system":
        raise InputError(
            f"{path} cannot be verified: its noise came from the operating system and cannot be drawn again."
        )
    with combine_callbacks(callbacks) as combined:
        now, file_now = _repeat(_changed(directory, changes), user_objects, combined)
    if before == now and held != file_now:
        raise FedloomError(
            f"{directory.path / MODEL_FILE} is not the model of the run: the repeated run has the same "
            "digest, but the file differs."
        )
    return before, now


def _repeat(directory: RunDirectory, user_objects: UserObjects, callbacks: CallbackList) -> tuple[str, str | None]:
    """Repeat a run in a temporary folder. Return its digest and the SHA-256 of its model file, if it has one."""
    initial_weights = _start_of(directory, callbacks)
    with verification_folder() as place:
        try:
            execute_run(
                resolve_run(directory.config, user_objects),
                out=place,
                callbacks=[callbacks],
                report=False,
                initial_weights=initial_weights,
            )
        except RunStopped:
            raise RunStopped(f"stopped; {directory.path} was not verified.") from None
        except TrainingDivergedError:  # the run that is verified may have diverged too
            pass
        again = RunResult(RunDirectory.open(place), user_objects)
        return again.digest, _hash_model_file(again)


def _hash_model_file(result: RunResult) -> str | None:
    """Return the SHA-256 of the model file of a finished run; None if the run has no global model."""
    if not result.has_global_model:
        return None
    read_result_model(result.path)
    return initial_weights_sha256(result.path / MODEL_FILE)


def _begin(directory: RunDirectory, built_run: BuiltRun, callbacks: CallbackList) -> None:
    """Report the notes of a run, and store its initial weights if they were read from a file just now."""
    for text in built_run.notes:
        callbacks.on_message(text)
    if built_run.initial_weights is not None:
        callbacks.on_message(built_run.initial_weights.describe())
        directory.write_initial_weights(built_run.initial_weights, built_run.model.state_dict())


def _start_of(directory: RunDirectory, callbacks: CallbackList) -> Mapping[str, Tensor] | None:
    """Return the initial weights that a run read from a file. Tell the callback if the file has changed or is gone."""
    initial_weights = directory.load_initial_weights()
    if initial_weights is not None and directory.config.init is not None:
        try:
            changed = initial_weights_sha256(Path(directory.config.init)) != directory.config.init_sha256
        except InputError:
            changed = True
        if changed:
            callbacks.on_message(
                f"{directory.config.init} is gone or has changed since the run started; the run uses its own copy "
                "of the initial weights."
            )
    return initial_weights


def _write_model_again(
    directory: RunDirectory,
    user_objects: UserObjects,
    expected_digest: str,
    callbacks: CallbackList,
    remote_engine: RemoteEngineFactory | None,
) -> None:
    """Restore the missing model file of a finished run from its last checkpoint, which holds the same model."""
    # There is no training, so no sites are started, and one GPU is enough.
    device = directory.config.device.split(",")[0]
    file, config = (
        directory.path / MODEL_FILE,
        replace_config(directory.config, engine="sequential", device=device, cache_dir=directory.cache_dir),
    )
    initial_weights = _start_of(directory, callbacks)
    request = resolve_run(config, user_objects)
    with _ready(request, directory.path, callbacks, initial_weights, remote_engine) as built_run:
        try:
            latest = directory.checkpoints.load_latest(built_run.engine.client_states)
        except InputError:  # all of them are damaged
            latest = None
        if latest is not None:
            built_run.load_state_dict(latest[1]["parts"])
        if latest is None or model_digest(built_run.rounds.global_model()) != expected_digest:
            raise InputError(
                f"{file} is gone, and so is the checkpoint after the last round, which could restore it; "
                f"run it again with the settings in {directory.path / 'config.toml'}."
            )
        directory.write_model(built_run.global_state_dict())
    callbacks.on_message(f"{file} was gone; it was written again from the last checkpoint.")


def _refuse_moving(directory: RunDirectory, changes: Mapping[str, Any]) -> None:
    """Reject a change from or to Flower: its sites store the client states, other engines use checkpoints."""
    before, after = directory.config.engine, changes.get("engine", directory.config.engine)
    if before != after and "flower" in (before, after):
        raise InputError(
            f"a run with engine {before!r} cannot continue with {after!r}: its client states are elsewhere."
        )


@contextmanager
def _reaching(
    remote_engine: RemoteEngineFactory | None, request: RunRequest, path: Path
) -> Iterator[RemoteEngineFactory | None]:
    """Yield the remote engine. If the engine needs sites and none are given, start them on this machine."""
    launcher = find_registered_launcher(request.config.engine) if remote_engine is None else None
    if launcher is None:
        yield remote_engine
        return
    with launcher(request, path) as started:
        yield started


def _refuse_changes(before: Config, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        # Any number of GPUs of one kind gives the same bits; a CPU gives others.
        if name in EXECUTION_SETTINGS or (
            name == "device" and selects_only_gpus(before.device) and selects_only_gpus(str(value))
        ):
            continue
        free = ", ".join(sorted(EXECUTION_SETTINGS))
        raise InputError(f"{name} would change the result; only {free} may be changed, and one GPU for another.")


def _same_objects(directory: RunDirectory, user_objects: UserObjects) -> None:
    missing = sorted(set(directory.python_objects) - set(user_objects.names))
    if missing:
        raise InputError(
            f"{directory.path} was run with {' and '.join(missing)} as Python objects; pass them again to "
            f"fedloom.resume or fedloom.verify({str(directory.path)!r}, "
            f"{', '.join(f'{name}=...' for name in missing)})."
        )
    surplus = sorted(set(user_objects.names) - set(directory.python_objects))
    if surplus:
        raise InputError(
            f"{directory.path} was run without {' and '.join(surplus)} as Python objects; do not pass them now."
        )


def _finish(directory: RunDirectory, user_objects: UserObjects, report: bool) -> RunResult:
    finished = RunResult(directory, user_objects)
    if report:
        finished.report()
    if finished.diverged is not None:
        raise TrainingDivergedError(f"{finished.diverged} (see {directory.path})")
    return finished
