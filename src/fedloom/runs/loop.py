"""The rounds of a run, one after the other: each is recorded, and saved when a checkpoint is due."""

import time
from contextlib import suppress
from typing import Any

import torch

from fedloom.config import replace_config
from fedloom.core.layout import model_digest
from fedloom.errors import RunStopped
from fedloom.runs.build import BuiltRun
from fedloom.runs.callback import Callback
from fedloom.runs.directory import RunDirectory
from fedloom.runs.metrics import summarize_run_metrics
from fedloom.utils.storage import Rhythm


def run_rounds(folder: RunDirectory, experiment: BuiltRun, watcher: Callback, start: int | None) -> None:
    """Play the rounds that are left, from `start` (None: from the very beginning), saving as they go."""
    config, rounds = experiment.config, experiment.rounds
    watcher.begin(folder.path, replace_config(config, rounds=rounds.total), folder.history())
    try:
        if start is None:
            _record(folder, watcher, rounds.initial_record())
        rhythm, checkpoints = Rhythm(config.checkpoint_seconds), folder.checkpoints
        go_on = f"go on with: fedloom resume {folder.path}"
        # What cannot be played again is saved before anybody is sent it, or it would be revealed twice.
        always = experiment.engine.saves_every_round or not rounds.repeatable
        wants_stop = _never if always else watcher.wants_stop
        rounds.context.drafts.keep_in(folder.path / "draft", config.checkpoint_seconds, wants_stop, go_on)
        rounds.check = watcher.check
        shown: set[str] = set()
        for round in range(start or 0, rounds.total):
            record = rounds.play(round)
            began = time.perf_counter()
            for name, tensors in experiment.exhibits().items():
                if name not in shown:
                    folder.write_exhibit(name, tensors)
                    shown.add(name)
            last = round + 1 == rounds.total
            stop = watcher.wants_stop()
            checkpoints.settle(wait=False)
            if last or stop or always or rhythm.due(checkpoints.seconds):
                # The record is in the checkpoint too: if we die in between, metrics.jsonl gets it when the run goes on.
                folder.sync_metrics()
                state = {"parts": experiment.state(), "record": record, "engine": experiment.engine.state()}
                beside = None if last or stop or always else _beside(experiment)
                checkpoints.save(round + 1, state, experiment.engine.homes, beside=beside)
                rhythm.saved()
                _spent(record, time.perf_counter() - began)
            _record(folder, watcher, record)
            if stop and not last:
                raise RunStopped(f"stopped after round {round + 1}; {go_on}")
        deployed = rounds.deployed()
        folder.write_model(experiment.deployed())
        summary = {
            "method": config.method,
            "data": config.data,
            "seed": config.seed,
            **summarize_run_metrics(folder.history()),
            "run": str(folder.path),
            "digest": model_digest(deployed),
        }
        rounds.context.drafts.clear()
        folder.write_summary(summary)
    except KeyboardInterrupt:
        folder.checkpoints.abandon()
        raise
    finally:
        try:
            with suppress(Exception):  # a run that goes on has settled it; one that failed has told of another reason
                folder.checkpoints.settle()
        finally:
            watcher.end()


def _beside(experiment: BuiltRun) -> torch.device | None:
    """Where a checkpoint is copied to be written beside the next rounds: on a GPU, which leaves a processor to spare.

    Models that lie in a `cache_dir` are not copied, and may be written over by the next rounds.
    """
    device = experiment.engine.device
    return device if device.type == "cuda" and not experiment.config.cache_dir else None


def _never() -> bool:
    return False


def _record(folder: RunDirectory, watcher: Callback, record: dict[str, Any]) -> None:
    folder.append(record)
    watcher.record(record)


def _spent(record: dict[str, Any], seconds: float) -> None:
    record["seconds"]["checkpoint"] = round(seconds, 6)
    record["seconds"]["total"] = round(record["seconds"]["total"] + seconds, 6)
