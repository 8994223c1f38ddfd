"""Ordinary training on one data set, to make the model that a federation starts from.

It is one client with all the samples at the plain engine, an epoch in place of a round; only that its optimiser lives
on from epoch to epoch, as in ordinary training. So it is exact as runs are: the same seed gives the same bits, and so
does a pretraining that was killed and went on.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
from fedloom.runs.callback import RunDescription, SilentCallback
from fedloom.runs.check_model import check_channels_last, check_forward_pass, make_checked_model
from fedloom.runs.checkpoints import Checkpoints
from fedloom.runs.directory import claimed
from fedloom.runs.out_of_memory import explain_out_of_memory
from fedloom.training.batches import Batch
from fedloom.training.context import TrainingContext
from fedloom.training.local_training import ClientStates, EngineContext
from fedloom.training.optimizers import Optimizer, make_optimizer
from fedloom.training.trainer import LocalSteps, LocalTrainer
from fedloom.utils.settings import validate_settings
from fedloom.utils.storage import Rhythm, write_safetensors
from fedloom.utils.system import available_cpu_count

NO_ROOM = "to train this network; use a smaller one, or a smaller batch"


@dataclass(frozen=True)
class PretrainResult:
    """A finished pretraining."""

    path: Path
    """The safetensors file: what `init` takes."""
    about: dict[str, Any]
    """What the file says about itself: network, data, classes, settings, accuracy, digest, command."""
    sha256: str
    """Of the file."""

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last epoch."""
        return float(self.about["accuracy"])

    @property
    def digest(self) -> str:
        """SHA-256 of the model's row."""
        return str(self.about["digest"])


class _PretrainCallback(Protocol):
    """Someone who watches a pretraining; `fedloom.runs.callback.Callback` says what each call means."""

    def begin(self, folder: Path, config: RunDescription, history: list[dict[str, Any]]) -> None: ...
    def note(self, text: str) -> None: ...
    def record(self, record: Mapping[str, Any]) -> None: ...
    def download(self, name: str, done: int, total: int) -> None: ...
    def wants_stop(self) -> bool: ...
    def end(self) -> None: ...


def pretrain(
    data: str, out: Path | str, model: str = "mlp", *, watcher: _PretrainCallback | None = None, **settings: Any
) -> PretrainResult:
    """Train `model` on the data set `data` in the ordinary way; writes the file `out`, for `init` to start from.

    `settings` are the fields of `Pretraining`. Called again with the same settings it goes on where it was stopped, or
    returns what is there; a file that something else made is never written over.
    """
    plan = validate_settings(PretrainConfig, {"data": data, "model": model, **settings})
    path, watcher = Path(out), watcher or SilentCallback()
    found = _finished(path, plan)
    work = path.with_name(f"{path.name}.unfinished")
    if found is None:
        with claimed(work):
            found = _finished(path, plan) or _train(path, work, plan, watcher)  # another process may have made it
    shutil.rmtree(work, ignore_errors=True)
    return found


def _train(path: Path, work: Path, plan: PretrainConfig, watcher: _PretrainCallback) -> PretrainResult:
    """Train to the end and write the file; checkpoints go to the folder `work`."""
    with explain_out_of_memory(plan.device, what=NO_ROOM):
        course = _Pretrainer(plan, watcher)
    try:
        with explain_out_of_memory(plan.device, what=NO_ROOM):
            about = course.train(Checkpoints(work / "checkpoints"), path)
            write_safetensors(path, course.tensors(), {"fedloom": json.dumps(about, sort_keys=True)})
    finally:
        course.close()
    return PretrainResult(path, about, initial_weights_sha256(path))


def _finished(path: Path, plan: PretrainConfig) -> PretrainResult | None:
    """The pretraining that is at `path` already; what was not made with the same settings is refused."""
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder; --out names the file to write.")
        if not path.exists():
            return None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}.") from error
    try:
        source = read_initial_weights(path)
        before = source.about.get("settings")
    except InputError:
        before = None
    if not isinstance(before, dict):
        raise InputError(f"{path} is there already and was not made by fedloom pretrain; choose another --out.")
    _same(before, plan, path)
    return PretrainResult(path, source.about, source.sha256)


def _same(before: Mapping[str, Any], plan: PretrainConfig, where: Path) -> None:
    for name, value in plan.stated().items():
        if before.get(name) != value:
            raise InputError(
                f"{where} is a pretraining with {name} {before.get(name)!r}, not {value!r}; choose another --out."
            )


class _Pretrainer:
    """Everything put together and tried; the engine must be closed."""

    def __init__(self, plan: PretrainConfig, watcher: _PretrainCallback) -> None:
        self.plan, self.watcher = plan, watcher
        device, streams, training = select_device(plan.device), RngStreams(plan.seed), plan.training()
        set_precision(device, "tf32", deterministic=True)  # the command in the file makes the same file again
        loaded = datasets.load_dataset(plan.data, progress=watcher.download)
        self.dataset = datasets.with_normalization(datasets.select_classes(loaded, plan.classes), plan.normalize)
        federation = _one_client(self.dataset)
        self.module = make_checked_model(plan.model, None, federation, streams, shared=True)
        choose_cudnn_heuristic(
            self.module, device, "tf32", deterministic=True
        )  # a run before may have, and then this says so
        images, spoilt = len(self.dataset.shape) == 3, check_channels_last(self.module)
        channels_last = plan.channels_last and images and (device.type != "cpu" or spoilt is None)
        self.layout = Layout.of(self.module, channels_last=channels_last)
        workshop = TrainingContext(
            module=self.module,
            layout=self.layout,
            criterion=F.cross_entropy,
            prepare=federation.prepare,
            training=training,
            streams=streams,
            classes=federation.classes,
            channels_last=channels_last,
            augment=datasets.make_augment(plan.augment),
        )
        check_forward_pass(workshop, federation)
        self.row = self.layout.read(self.module, device)
        self.optimizer: Optimizer = make_optimizer(training)
        self.homes = ClientStates({}, self.layout.dtype)
        self.history: list[dict[str, Any]] = []
        self.engine = SequentialEngine(EngineContext(workshop, federation, self._epoch, self.homes), device)
        torch.set_num_threads(plan.threads or available_cpu_count())

    def close(self) -> None:
        self.engine.close()

    def train(self, checkpoints: Checkpoints, path: Path) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if there is one; returns what the file shall say about itself."""
        self._load(checkpoints, path)
        self.watcher.begin(path, self.plan, [{"round": record["epoch"]} for record in self.history])
        try:
            rhythm = Rhythm(self.plan.checkpoint_seconds)
            for epoch in range(len(self.history), self.plan.epochs):
                record = self._train_epoch(epoch)
                self.history.append(record)
                self.watcher.record({"round": epoch + 1, **record})
                last, stop = epoch + 1 == self.plan.epochs, self.watcher.wants_stop()
                if not last and (stop or rhythm.due(checkpoints.seconds)):
                    checkpoints.save(epoch + 1, self._state(), self.homes)
                    rhythm.saved()
                if stop and not last:
                    raise RunStopped(f"stopped after epoch {epoch + 1}; go on with the same command.")
        finally:
            self.watcher.end()
        return self._about(path)

    def tensors(self) -> dict[str, Tensor]:
        """The model as a state dict, with frozen weights and all."""
        frozen = {k: v.detach().cpu().clone() for k, v in self.module.state_dict().items() if k in self.layout.frozen}
        return self.layout.state_dict(self.row.cpu()) | frozen

    def _epoch(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        """One epoch, with the optimiser of the epochs before."""
        bench.optimizer = self.optimizer

        def step(bench: LocalTrainer, batch: Batch) -> Tensor:
            loss = bench.loss(batch)
            bench.backward(loss)
            bench.descend()
            return loss

        yield LocalSteps(step, epochs=1)

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        (answer,) = self.engine.train(epoch, [ClientTask(0, self.row)])
        if isinstance(answer, ClientFailure):
            raise FedloomError(f"the pretraining failed in epoch {epoch + 1}: {answer.reason}.")
        if not self.layout.is_finite(answer.row):
            raise FedloomError(f"the model is not finite after epoch {epoch + 1}; try a smaller lr, or clip.")
        self.row.copy_(answer.row)
        score = self.engine.score(self.row)
        assert score is not None, "every data set that is known by name has a test set"
        return {"epoch": epoch + 1, "train_loss": answer.loss, "accuracy": score.accuracy, "loss": score.loss}

    def _state(self) -> dict[str, Any]:
        settings = self.plan.stated()
        return {"settings": settings, "row": self.row, "optimizer": vars(self.optimizer), "history": self.history}

    def _load(self, checkpoints: Checkpoints, path: Path) -> None:
        latest = checkpoints.load_latest(self.homes)
        for text in checkpoints.damaged:
            self.watcher.note(f"{text} Going on from the checkpoint before it.")
        if latest is None:
            return
        _, state = latest
        _same(state["settings"], self.plan, checkpoints.folder.parent)
        self.row.copy_(state["row"])
        for name, value in state["optimizer"].items():
            setattr(self.optimizer, name, value.to(self.row.device) if isinstance(value, Tensor) else value)
        self.history = state["history"]

    def _about(self, path: Path) -> dict[str, Any]:
        last = self.history[-1]
        return {
            "made_with": {"fedloom": __version__, "torch": torch.__version__, "numpy": np.__version__},
            "model": self.plan.model,
            "shape": list(self.dataset.shape),
            "classes": self.dataset.classes,
            "class_names": list(self.dataset.class_names),
            "data": self.plan.data,
            "seed": self.plan.seed,
            "accuracy": last["accuracy"],
            "loss": last["loss"],
            "history": self.history,
            "digest": model_digest(self.row),
            "command": self.plan.command(path.name),
            "settings": self.plan.stated(),
        }


def _one_client(dataset: Dataset) -> PartitionedDataset:
    """All training samples at one client."""
    everything = [np.arange(len(dataset.train))]
    return PartitionedDataset(
        dataset.train,
        everything,
        classes=dataset.classes,
        shape=dataset.shape,
        prepare=dataset.prepare,
        test=dataset.test,
        name=dataset.name,
    )
