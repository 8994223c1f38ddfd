"""Run all rounds: record each one, save checkpoints, stop on request."""

import time
from contextlib import suppress
from typing import Any

import torch

from fedloom.config import replace_config
from fedloom.errors import RunStopped
from fedloom.report import read_run_record
from fedloom.report.protocol import describe_protocol
from fedloom.runs.build import BuiltRun
from fedloom.runs.callback import CallbackList
from fedloom.runs.directory import RunDirectory
from fedloom.runs.metrics import HELD_OUT_KEYS, RESULT_KEYS, summarize_run_metrics
from fedloom.utils.run_files import METRICS_CHECKSUM, ROUNDS_READ
from fedloom.utils.storage import StorageWriteSchedule


def run_rounds(directory: RunDirectory, built_run: BuiltRun, callbacks: CallbackList, first_round: int | None) -> None:
    """Run the remaining rounds from `first_round`, with checkpoints; None: a new run, which evaluates first."""
    config, rounds = built_run.config, built_run.rounds
    go_on = f"continue with: fedloom resume {directory.path}"
    callbacks.on_run_start(directory.path, replace_config(config, rounds=rounds.total), directory.history())
    try:
        if callbacks.failure is not None:
            raise RunStopped(f"stopped before the first round; {go_on}")
        if first_round is None:
            _record(directory, callbacks, rounds.initial_record())
        saver = _Saver(directory, built_run)
        should_stop = _never if saver.every_round else callbacks.should_stop
        rounds.context.server.partial_results.keep_in(
            directory.path / "partial", config.checkpoint_seconds, should_stop, go_on, callbacks.on_message
        )
        rounds.check = callbacks.check
        # A run that diverged and was killed before it wrote its summary has no rounds left.
        total = rounds.total if rounds.diverging.message is None else 0
        for round in range(first_round or 0, total):
            record = rounds.run_round(round)
            last = round + 1 == total or rounds.diverging.message is not None
            saver.save_if_due(record, last)
            _record(directory, callbacks, record)
            if callbacks.should_stop() and not last:
                saver.save_now(record)
                raise RunStopped(f"stopped after round {round + 1}; {go_on}")
            if last:
                break
        _write_result(directory, built_run)
    except KeyboardInterrupt:
        directory.checkpoints.cancel()
        raise
    finally:
        try:
            with suppress(Exception):  # a finished run has no error here; a failed one reports its own
                directory.checkpoints.wait_until_written()
        finally:
            callbacks.on_run_end()


class _Saver:
    """Write what a round leaves: artifacts, and a checkpoint when one is due."""

    def __init__(self, directory: RunDirectory, built_run: BuiltRun) -> None:
        self._directory, self._built_run = directory, built_run
        # A round that cannot be repeated is saved before its models are sent; otherwise it would be revealed twice.
        self.every_round = built_run.engine.checkpoint_every_round or not built_run.rounds.repeatable
        self._schedule = StorageWriteSchedule(built_run.config.checkpoint_seconds)
        self._written_artifacts: set[str] = set()
        self._saved_round = -1

    def save_if_due(self, record: dict[str, Any], last: bool) -> None:
        """Save the state after a round, at least after the last one, and add the time to the record."""
        began, built_run, checkpoints = time.perf_counter(), self._built_run, self._directory.checkpoints
        for name, tensors in built_run.rounds.artifacts().items():
            if name not in self._written_artifacts:
                self._directory.write_artifact(name, tensors)
                self._written_artifacts.add(name)
        checkpoints.wait_until_written(wait=False)
        if last or self.every_round or self._schedule.due(checkpoints.write_seconds):
            self._save(record, None if last or self.every_round else _beside(built_run))
            _spent(record, time.perf_counter() - began)

    def save_now(self, record: dict[str, Any]) -> None:
        """Save the state after this round, unless that is done, and return when it is on the disk."""
        if self._saved_round == record["round"]:
            self._directory.checkpoints.wait_until_written()
            return
        began = time.perf_counter()
        # The checkpoint holds the checksum of the lines before the record, which then gets the time of the checkpoint.
        self._directory.rewind(record["round"] - 1)
        self._save(record, None)
        _spent(record, time.perf_counter() - began)
        self._directory.append_record(record)

    def _save(self, record: dict[str, Any], background_device: torch.device | None) -> None:
        # The record is in the checkpoint too: after a crash in between, metrics.jsonl gets it on resume.
        self._directory.sync_metrics()
        built_run, checkpoints = self._built_run, self._directory.checkpoints
        state = {
            "parts": built_run.state_dict(),
            "record": record,
            METRICS_CHECKSUM: self._directory.metrics_checksum,
            "engine": built_run.engine.state_dict(),
            ROUNDS_READ: built_run.rounds.context.rounds_read.noted,
            "divergence": built_run.rounds.diverging.state_dict(),
        }
        self._saved_round = record["round"]
        checkpoints.save(self._saved_round, state, built_run.engine.client_states, background_device=background_device)
        self._schedule.saved()


def _write_result(directory: RunDirectory, built_run: BuiltRun) -> None:
    """Write the model and the summary of a run after its last round."""
    config, rounds = built_run.config, built_run.rounds
    digest = rounds.digest()
    if rounds.has_global_model:
        directory.write_model(built_run.global_state_dict())
    metrics = summarize_run_metrics(directory.history(), config.result_window)
    summary = {
        "method": config.method,
        **({"variant": config.variant} if config.variant else {}),
        "data": config.data,
        "seed": config.seed,
        **metrics,
        "protocol": describe_protocol(read_run_record(directory.path)),
        **_without_result(metrics, rounds.diverging.message),
        "run": str(directory.path),
        "digest": digest,
        **({} if rounds.has_global_model else {"global_model": False}),
    }
    rounds.context.server.partial_results.clear()
    directory.write_summary(summary, rounds_read=rounds.context.rounds_read.noted)


def _without_result(metrics: dict[str, Any], reason: str | None) -> dict[str, Any]:
    """Return what the summary of a diverged run says in place of its result."""
    if reason is None:
        return {}
    return {"diverged": reason, **{key: None for key in (*RESULT_KEYS, *HELD_OUT_KEYS) if key in metrics}}


def _beside(built_run: BuiltRun) -> torch.device | None:
    """Return the device for background checkpoints: a GPU, because it leaves the CPU free; otherwise None.

    Models in a `cache_dir` are not copied, and the next rounds may overwrite them.
    """
    device = built_run.engine.device
    return device if device.type == "cuda" and not built_run.config.cache_dir else None


def _never() -> bool:
    return False


def _record(directory: RunDirectory, callbacks: CallbackList, record: dict[str, Any]) -> None:
    directory.append_record(record)
    callbacks.on_round_end(record)


def _spent(record: dict[str, Any], seconds: float) -> None:
    record["seconds"]["checkpoint"] = round(seconds, 6)
    record["seconds"]["total"] = round(record["seconds"]["total"] + seconds, 6)
