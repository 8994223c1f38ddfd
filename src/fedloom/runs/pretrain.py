"""Pretraining: ordinary training that makes initial weights for federated runs.

The sequential engine trains one client with all samples, one epoch per round. The optimizer keeps its state from epoch
to epoch, as in ordinary training. The same seed gives the same bits, also after a crash and a restart.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom import data as datasets
from fedloom._version import __version__
from fedloom.config import PretrainConfig
from fedloom.core.layout import Layout, model_digest
from fedloom.core.rng import RngStreams
from fedloom.core.tasks import ClientFailure, ClientTask
from fedloom.data import Dataset, PartitionedDataset
from fedloom.devices.precision import choose_cudnn_heuristic, set_precision
from fedloom.devices.selection import select_device
from fedloom.engines.sequential import SequentialEngine
from fedloom.errors import FedloomError, InputError, RunStopped
from fedloom.models.initial_weights import initial_weights_sha256, read_initial_weights
from fedloom.runs.callback import Callback, CallbackList, combine_callbacks
from fedloom.runs.check_model import check_channels_last, check_forward_pass, make_checked_model
from fedloom.runs.checkpoints import Checkpoints
from fedloom.runs.directory import claim_directory
from fedloom.runs.keyword_types import PretrainSettings
from fedloom.runs.out_of_memory import explain_out_of_memory
from fedloom.training.batches import Batch
from fedloom.training.context import ClientProgram, Numerics, TrainingContext
from fedloom.training.optimizers import Optimizer, make_optimizer
from fedloom.training.trainer import LocalSteps, LocalTrainer
from fedloom.utils.checksums import has_safetensors_checksum
from fedloom.utils.settings import validate_settings
from fedloom.utils.storage import WriteSchedule, write_checked_safetensors
from fedloom.utils.system import available_cpu_count

NO_ROOM = "to train this network; use a smaller one, or a smaller batch"


@dataclass(frozen=True)
class PretrainResult:
    """A finished pretraining.

    Example:
        made = fedloom.pretrain("digits", "start.safetensors", epochs=3)
        print(made.accuracy, made.metadata["command"])
        run = fedloom.run("fedavg", init=str(made.path), init_sha256=made.sha256)
    """

    path: Path
    """The safetensors file, for the setting `init`."""
    metadata: dict[str, Any]
    """Content of the file's header: network, data, classes, settings, accuracy, digest, command."""
    sha256: str
    """SHA-256 of the file."""

    @property
    def accuracy(self) -> float:
        """Return the test accuracy after the last epoch."""
        return float(self.metadata["accuracy"])

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the model's row."""
        return str(self.metadata["digest"])


def pretrain(
    data: str,
    out: Path | str,
    model: str = "mlp",
    *,
    callbacks: Sequence[Callback] = (),
    **settings: Unpack[PretrainSettings],
) -> PretrainResult:
    """Train a network on one data set in the ordinary way, and write it to a file for the setting `init`.

    A second call with the same settings continues a stopped pretraining, or returns the finished one. Other files are
    never overwritten.

    Args:
        data: The name of a data set.
        out: The safetensors file to write.
        model: The name of a network.
        callbacks: Watch and stop the pretraining; rounds are epochs.
        **settings: Fields of `PretrainConfig`, such as `epochs=20`.

    Returns:
        The finished pretraining.

    Raises:
        InputError: A setting is invalid, or `out` exists and was not made with these settings.
        RunStopped: A callback stopped the pretraining; the same call continues it.
        FedloomError: The training failed, for example because the model is not finite, or a callback raised an error.

    Example:
        made = fedloom.pretrain("digits", "start.safetensors", classes="0-4", epochs=3)
        run = fedloom.run("fedavg", classes="5-9", init="start.safetensors", new_head=True)
    """
    config = validate_settings(PretrainConfig, {"data": data, "model": model, **settings})
    path = Path(out)
    with combine_callbacks(callbacks) as combined:
        result = _finished(path, config)
        work = path.with_name(f"{path.name}.unfinished")
        if result is None:
            with claim_directory(work):  # another process may have made it meanwhile
                result = _finished(path, config) or _train(path, work, config, combined)
    shutil.rmtree(work, ignore_errors=True)
    return result


def _train(path: Path, work: Path, config: PretrainConfig, callbacks: CallbackList) -> PretrainResult:
    """Train and write the file; checkpoints go to the folder `work`."""
    with explain_out_of_memory(config.device, work=NO_ROOM):
        pretrainer = _Pretrainer(config, callbacks)
    try:
        with explain_out_of_memory(config.device, work=NO_ROOM):
            metadata = pretrainer.train(Checkpoints(work / "checkpoints"), path)
            write_checked_safetensors(path, pretrainer.state_dict(), {"fedloom": json.dumps(metadata, sort_keys=True)})
    finally:
        pretrainer.close()
    return PretrainResult(path, metadata, initial_weights_sha256(path))


def _finished(path: Path, config: PretrainConfig) -> PretrainResult | None:
    """Return the finished pretraining at `path`, if any. Raise an InputError for other files or settings."""
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder; --out names the file to write.")
        if not path.exists():
            return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}.") from error
    try:
        weights_file = read_initial_weights(path)
        before = weights_file.metadata.get("settings")
    except InputError:
        if has_safetensors_checksum(path.read_bytes()):  # the file is damaged
            raise
        before = None
    if not isinstance(before, dict):
        raise InputError(f"{path} is there already and was not made by fedloom pretrain; choose another --out.")
    _same(before, config, path)
    return PretrainResult(path, weights_file.metadata, weights_file.sha256)


def _same(before: Mapping[str, Any], config: PretrainConfig, where: Path) -> None:
    for name, value in config.result_settings().items():
        if before.get(name) != value:
            raise InputError(
                f"{where} is a pretraining with {name} {before.get(name)!r}, not {value!r}; choose another --out."
            )


class _Pretrainer:
    """Model, data, optimizer and engine of a pretraining. The caller must close it."""

    def __init__(self, config: PretrainConfig, callbacks: CallbackList) -> None:
        self.config, self.callbacks = config, callbacks
        device, rng_streams = select_device(config.device), RngStreams(config.seed)
        training_config = config.training_config()
        set_precision(device, "tf32", deterministic=True)  # so the command in the file reproduces the file
        loaded = datasets.load_dataset(config.data, progress=callbacks.on_download)
        self.dataset = datasets.with_normalization(datasets.select_classes(loaded, config.classes), config.normalize)
        federated_data = _one_client(self.dataset)
        self.model = make_checked_model(config.model, None, federated_data, rng_streams, share_frozen=True)
        choose_cudnn_heuristic(
            self.model, device, "tf32", deterministic=True
        )  # warns if an earlier run in this process has already chosen
        images, spoilt = len(self.dataset.shape) == 3, check_channels_last(self.model)
        channels_last = config.channels_last and images and (device.type != "cpu" or spoilt is None)
        self.layout = Layout.of(self.model, channels_last=channels_last)
        training_context = TrainingContext(
            model=self.model,
            layout=self.layout,
            criterion=F.cross_entropy,
            config=training_config,
            rng_streams=rng_streams,
            data=federated_data,
            client=ClientProgram(self._epoch),
            numerics=Numerics(channels_last=channels_last, augment=datasets.make_augment(config.augment)),
        )
        check_forward_pass(training_context)
        self.row = self.layout.read(self.model, device)
        self.optimizer: Optimizer = make_optimizer(training_config)
        self.history: list[dict[str, Any]] = []
        self.engine = SequentialEngine(training_context, device)
        torch.set_num_threads(config.threads or available_cpu_count())

    def close(self) -> None:
        self.engine.close()

    def train(self, checkpoints: Checkpoints, path: Path) -> dict[str, Any]:
        """Train from the last checkpoint, if any, to the end. Return the metadata of the file."""
        self._load_checkpoint(checkpoints, path)
        self.callbacks.on_run_start(path, self.config, [{"round": record["epoch"]} for record in self.history])
        try:
            if self.callbacks.failure is not None:
                raise RunStopped("stopped before the first epoch; continue with the same command.")
            schedule = WriteSchedule(self.config.checkpoint_seconds)
            for epoch in range(len(self.history), self.config.epochs):
                record = self._train_epoch(epoch)
                self.history.append(record)
                self.callbacks.on_round_end({"round": epoch + 1, **record})
                last, stop = epoch + 1 == self.config.epochs, self.callbacks.should_stop()
                if not last and (stop or schedule.due(checkpoints.write_seconds)):
                    checkpoints.save(epoch + 1, self._checkpoint_state(), self.engine.client_states)
                    schedule.saved()
                if stop and not last:
                    raise RunStopped(f"stopped after epoch {epoch + 1}; continue with the same command.")
        finally:
            self.callbacks.on_run_end()
        return self._metadata(path)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model as a state dict, with the frozen weights."""
        frozen = {k: v.detach().cpu().clone() for k, v in self.model.state_dict().items() if k in self.layout.frozen}
        return self.layout.state_dict(self.row.cpu()) | frozen

    def _epoch(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        """Train one epoch with the optimizer of the earlier epochs."""
        trainer.optimizer = self.optimizer

        def step(trainer: LocalTrainer, batch: Batch) -> Tensor:
            loss = trainer.loss(batch)
            trainer.backward(loss)
            trainer.optimizer_step()
            return loss

        yield LocalSteps(step, epochs=1)

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        (answer,) = self.engine.train([ClientTask(0, self.row, round=epoch)])
        if isinstance(answer, ClientFailure):
            raise FedloomError(f"the pretraining failed in epoch {epoch + 1}: {answer.reason}.")
        if not self.layout.is_finite(answer.row):
            raise FedloomError(f"the model is not finite after epoch {epoch + 1}; try a smaller lr, or clip.")
        self.row.copy_(answer.row)
        result = self.engine.evaluate(self.row)
        assert result is not None, "every data set that is known by name has a test set"
        return {"epoch": epoch + 1, "train_loss": answer.loss, "accuracy": result.accuracy, "loss": result.loss}

    def _checkpoint_state(self) -> dict[str, Any]:
        settings = self.config.result_settings()
        return {"settings": settings, "row": self.row, "optimizer": vars(self.optimizer), "history": self.history}

    def _load_checkpoint(self, checkpoints: Checkpoints, path: Path) -> None:
        latest = checkpoints.load_latest(self.engine.client_states)
        for text in checkpoints.damaged:
            self.callbacks.on_message(f"{text} Continuing from the checkpoint before it.")
        if latest is None:
            return
        _, state = latest
        _same(state["settings"], self.config, checkpoints.folder.parent)
        self.row.copy_(state["row"])
        for name, value in state["optimizer"].items():
            setattr(self.optimizer, name, value.to(self.row.device) if isinstance(value, Tensor) else value)
        self.history = state["history"]

    def _metadata(self, path: Path) -> dict[str, Any]:
        last = self.history[-1]
        return {
            "versions": {"fedloom": __version__, "torch": torch.__version__, "numpy": np.__version__},
            "model": self.config.model,
            "shape": list(self.dataset.shape),
            "classes": self.dataset.classes,
            "class_names": list(self.dataset.class_names),
            "data": self.config.data,
            "seed": self.config.seed,
            "accuracy": last["accuracy"],
            "loss": last["loss"],
            "history": self.history,
            "digest": model_digest(self.row),
            "command": self.config.to_command(path.name),
            "settings": self.config.result_settings(),
        }


def _one_client(dataset: Dataset) -> PartitionedDataset:
    """Return a federated data set with all training samples at one client."""
    everything = [np.arange(len(dataset.train))]
    return PartitionedDataset(
        dataset.train,
        everything,
        classes=dataset.classes,
        shape=dataset.shape,
        transform=dataset.transform,
        test=dataset.test,
        name=dataset.name,
    )
