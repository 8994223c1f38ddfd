"""LocalTrainer: a client's model, gradient and samples, and its training steps.

A `Client` (methods/base.py) works with the trainer and yields `LocalSteps`. An engine owns the trainers and runs these
steps. Nothing here depends on methods or processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.config import TrainingConfig
from fedloom.core.evaluation import EVALUATION_BATCH_SIZE, EvaluationResult, evaluation_slices
from fedloom.core.layout import TensorKind, scatter_columns
from fedloom.core.tasks import ClientTask, TaskMemory
from fedloom.data import Samples
from fedloom.devices.cuda_runtime import cuda_foreach_copy_
from fedloom.devices.precision import set_autotune
from fedloom.models.layers.recurrent import split_recurrent_layers
from fedloom.training.batches import Batch, BatchSlice, EpochBatches, Positions
from fedloom.training.context import OPTIMIZER_PREFIX, PERSONAL_KEY, Criterion, Step, TrainingContext
from fedloom.training.mixed_precision import apply_mixed_precision
from fedloom.training.module_buffers import ModuleBuffers
from fedloom.training.optimizers import Optimizer, StatefulOptimizer, clip_gradient_, make_optimizer


@dataclass(frozen=True)
class LocalSteps:
    """Training steps for the engine to run; `Client.train` yields them.

    Without `epochs` or `steps`, the settings of the run decide. With `steps`, training continues in the current epoch,
    so the batches are the same however you split the training. Otherwise a new epoch starts.

    Example:
        yield LocalSteps(self.training_step)
        yield LocalSteps(self.distillation_step, steps=10)
    """

    step: "Step"
    """Called as `step(trainer, batch)`; returns the loss. It must use only tensors of the trainer, because an engine
    may interleave clients, or capture the step once and replay it."""
    epochs: int | None = None
    """Number of epochs."""
    steps: int | None = None
    """Number of steps; it takes precedence over `epochs`."""


__all__ = ["Batch", "Criterion", "LocalSteps", "LocalTrainer", "Step", "TrainingContext"]

LARGE_GRADIENT = 4 << 20
"""Bytes of a gradient that is copied parameter by parameter on a CPU. This saves memory, and time if the gradient is
larger than the cache. For small networks it takes longer."""

CHUNK_BYTES = 8 << 20
"""Bytes of input to gather and normalize at once: whole epochs of small clients, so that not every batch pays the
overhead, and a part of the epoch of large ones."""


class LocalTrainer:
    """Everything that belongs to one client in training; the methods of a `Client` get it as `trainer`.

    An engine calls `start_task`, `run_steps` and `finish_task`; the rest is for clients.

    Attributes:
        layout: The layout of the models.
        config: The settings of local training; change them with `use_config`.
        device: The device of all tensors here.
        module: The network, whose tensors are views into the bound row.
        round: The present round, from 0.
        client_id: The client.
        first_visit: Whether this client trains for the first time.
        steps: Number of steps since the start or the last `restart`.

    Example:
        def adjust_gradient(self, trainer: LocalTrainer) -> None:
            trainer.gradient.add_(trainer.weights - trainer.received[: trainer.layout.trainable], alpha=0.01)
    """

    row: Tensor
    """The model in training, which the client returns."""
    weights: Tensor
    """The trainable parameters, a view of `row`."""
    gradient: Tensor
    """The flat gradient of the trainable parameters after `backward`."""
    received: Tensor
    """The model as received. Do not change it."""
    extras: Mapping[str, Tensor]
    """Tensors received with the model. Do not change them."""
    client_state: dict[str, Tensor]
    """Tensors that this client keeps between rounds, zeros at first. Change them in place."""
    uploads: dict[str, Tensor]
    """Tensors that the client returns with the model, zeros at first. Fill them in place."""
    scratch: dict[str, Any]
    """Values that a `Client` needs between steps; empty for each client."""
    optimizer: Optimizer
    """The optimizer of `optimizer_step`; a `Client` may assign its own."""
    _stateful_optimizer: StatefulOptimizer
    """The last optimizer that `new_optimizer` created."""
    validation: Samples
    """Samples held out from training, the same in every round; empty unless the run or the method needs them."""

    def __init__(self, context: TrainingContext, device: torch.device | str = "cpu") -> None:
        self.layout = context.layout
        self.config = context.config
        self.device = torch.device(device)
        self._context = context
        self.module = apply_mixed_precision(
            split_recurrent_layers(context.model.to(self.device), self.device), self.device, context.numerics.autocast
        )
        self.module_buffers = ModuleBuffers(self.module, context.layout, context.initial_buffers or {}, self.device)
        self._augment = context.numerics.augment
        self._norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm)]
        self.gradient = torch.zeros(self.layout.trainable, dtype=self.layout.dtype, device=self.device)
        self._slices = self.layout.views(self.gradient)
        self._frees_gradients = self.device.type == "cpu" and self.gradient.nbytes >= LARGE_GRADIENT
        sizes = [entry.size for entry in self.layout.entries if entry.kind is TensorKind.PARAMETER]
        self._flat = torch.split(self.gradient, sizes)
        self._bound: Tensor | None = None
        self._buffers: dict[str, Tensor] = {}
        named = dict(self.module.named_parameters(remove_duplicate=False))
        self._parameters = [named[e.name] for e in self.layout.entries if e.kind is TensorKind.PARAMETER]

    def start_task(self, task: ClientTask, memory: TaskMemory, samples: Samples) -> None:
        """Start the training of one client: `memory.row` becomes its model, with the values of `task.row`.

        Args:
            task: The client, the round, the model and the extras.
            memory: Memory for the result, with the client state.
            samples: The client's training samples, as they are stored.
        """
        self.round, self.client_id, self.first_visit = task.round, task.client_id, memory.first_visit
        self.config = self._context.config
        self._set_lr(self.config.lr_at(task.round))
        self.row, self.client_state, self.uploads = memory.row, memory.client_state, memory.uploads
        self.received = task.row.to(self.device)
        self.extras = {name: tensor.to(self.device) for name, tensor in task.extras.items()}
        self.weights = self.row[: self.layout.trainable]
        self.scratch = {}
        self._load_samples(samples)
        self.restart()

    def _load_samples(self, samples: Samples) -> None:
        """Load the client's samples and split off those for validation."""
        samples = Samples(samples.x.to(self.device), samples.y.to(self.device))
        used, held = self._split(len(samples))
        self._samples, self.validation = (
            (samples.take(used), samples.take(held)) if len(held) else (samples, samples[:0])
        )

    def _split(self, count: int) -> tuple[Positions, Positions]:
        """Return the indices of samples for training, at least one, and for validation."""
        held = min(int(self.config.validation * count + 0.5), max(0, count - 1))
        if not held:
            return np.arange(count), np.arange(0)
        order = self._context.rng_streams.numpy("validation", client_id=self.client_id).permutation(count)
        return np.sort(order[held:]), np.sort(order[:held])

    def restart(self) -> None:
        """Go back to the received model, with a new optimizer and the same batches again."""
        rng_streams = self._context.rng_streams
        self.steps = 0
        self._order = rng_streams.numpy("batches", self.round, self.client_id)
        self._epoch: EpochBatches | None = None
        self._chunk: tuple[Positions, int, Batch] | None = None
        if self._augment:
            self._noise = self._new_noise()
        self._losses: list[tuple[Tensor, int]] = []
        self.module_buffers.forget()  # otherwise `bind` gathers old buffers into the new model
        self.row.copy_(self.received)
        if self._context.client.personal_columns and not self.first_visit:
            scatter_columns(self.row, self._context.client.personal_columns, self.client_state[PERSONAL_KEY])
        self.bind(self.row)
        self.module_buffers.renew()
        self.module.train()
        self.new_optimizer()
        self.load_optimizer_state()

    def _new_noise(self) -> torch.Generator:
        """Return the generator of augmentation for this client and round."""
        return self._context.rng_streams.pytorch("augment", self.round, self.client_id, self.device)

    def finish_task(self) -> None:
        """End the training: estimate batch-norm statistics if set, and store optimizer state and personal columns."""
        self.module_buffers.gather()  # code after the last step may have assigned buffers
        if self.config.statistics == "estimated":
            self.update_batch_norm_statistics()
        self.save_optimizer_state()
        if self._context.client.personal_columns:
            self.client_state[PERSONAL_KEY].copy_(
                torch.cat([self.row[columns] for columns in self._context.client.personal_columns])
            )
            for columns in self._context.client.personal_columns:
                self.row[columns] = self.received[columns]

    def save_optimizer_state(self) -> None:
        """Store the optimizer state in the client state, if the settings say so."""
        if self._context.config.keep_optimizer:
            state = self._stateful_optimizer.state_dict(self.weights)
            for name in self._optimizer_state_names() & state.keys():  # other settings may have less state
                self.client_state[f"{OPTIMIZER_PREFIX}{name}"].copy_(state[name])

    def load_optimizer_state(self) -> None:
        """Load the optimizer state from the client state, if the settings say so."""
        if self._context.config.keep_optimizer:
            self._stateful_optimizer.load_state_dict(
                {name: self.client_state[f"{OPTIMIZER_PREFIX}{name}"] for name in self._optimizer_state_names()}
            )

    def _optimizer_state_names(self) -> set[str]:
        return set(make_optimizer(self._context.config).state_shapes(0))

    @property
    def num_examples(self) -> int:
        """Return the number of training samples of this client."""
        return len(self._data)

    @property
    def _data(self) -> Samples:
        """Return the training samples of this client."""
        return self._samples

    @property
    def mean_loss(self) -> float:
        """Return the mean training loss over the last epoch; NaN if there was no step."""
        if not self._losses:
            return float("nan")
        losses, sizes = zip(*self._losses, strict=True)
        weights = torch.tensor(sizes, dtype=losses[0].dtype, device=self.device)
        return float(torch.stack(losses) @ weights) / float(sum(sizes))

    def bind(self, row: Tensor) -> None:
        """Let `module` compute with another model. Bind `trainer.row` again before the next step.

        Args:
            row: A model in flat form, on this device.
        """
        self.module_buffers.gather()
        self.layout.bind(self.module, row)
        self.module_buffers.hold()
        self._bound = row

    def new_optimizer(self) -> None:
        """Create a new optimizer from the settings, without momentum of earlier steps."""
        made = make_optimizer(self.config)
        if self.device.type != "cpu":
            made.allocate_state(self.weights)  # as captured steps need it: all engines on a GPU round alike
        self.optimizer = self._stateful_optimizer = made

    def use_config(self, config: TrainingConfig) -> None:
        """Continue with other training settings, a new optimizer and a new epoch.

        Args:
            config: The settings, for example `trainer.config.model_copy(update={"lr": 0.1})`.
        """
        self.config = config
        self._set_lr(config.lr_at(self.round))
        self._epoch = None
        self.new_optimizer()

    @property
    def lr(self) -> float:
        """The learning rate of this round; a `Client` may change it between `LocalSteps`."""
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._set_lr(lr)

    def _set_lr(self, lr: float) -> None:
        self._lr = lr
        self._rate: float | Tensor = lr
        if self.device.type != "cpu":  # a tensor, as captured steps need it: all engines on a GPU round alike
            self._rate = torch.tensor(lr, dtype=self.layout.dtype, device=self.device)

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Return a tensor for use in steps, with the dtype of the model.

        All clients share its memory, so that an engine can capture a step once and replay it. It holds the values of
        the last client; they are zeros only in a new tensor.

        Args:
            name: The name of the tensor; the same name and shape give the same memory.
            shape: Its shape.
        """
        kept = self._buffers.get(name)
        if kept is None or kept.shape != shape:
            kept = self._buffers[name] = torch.zeros(shape, dtype=self.layout.dtype, device=self.device)
        return kept

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the bound model on a batch.

        Args:
            batch: Network inputs and targets.
        """
        return self._context.criterion(self.module(batch.x), batch.y)

    def backward(self, loss: Tensor) -> None:
        """Write the gradient of `loss` with respect to the bound model's parameters into `gradient`.

        Args:
            loss: A scalar. Parameters that it does not depend on get a gradient of zero.
        """
        if self._frees_gradients and all(parameter.grad is None for parameter in self._parameters):
            self._backward_by_parameter(loss)
            return
        parts = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        if all(part is not None for part in parts):
            if self.device.type == "cpu":
                torch._foreach_copy_(self._slices, parts)
            else:
                cuda_foreach_copy_(self._flat, self._in_row(parts))  # same result, faster on a GPU
            return
        for target, part in zip(self._slices, parts, strict=True):  # None for a layer that the loss does not depend on
            target.zero_() if part is None else target.copy_(part)

    def _backward_by_parameter(self, loss: Tensor) -> None:
        """Copy the gradient of each parameter as soon as it is computed, so that all of them never exist twice."""
        slices = {id(parameter): part for parameter, part in zip(self._parameters, self._slices, strict=True)}

        def move(parameter: Tensor) -> None:
            assert parameter.grad is not None, "autograd calls this with a gradient"
            slices.pop(id(parameter)).copy_(parameter.grad)
            parameter.grad = None

        hooks = [
            parameter.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]
            for parameter in self._parameters
        ]
        try:
            torch.autograd.backward(loss, inputs=self._parameters)
        finally:
            for hook in hooks:
                hook.remove()
        for part in slices.values():  # of a layer that the loss does not depend on
            part.zero_()

    def _in_row(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the parameters in the order and memory format of a row."""
        orders = (entry.channels_last for entry in self.layout.entries if entry.kind is TensorKind.PARAMETER)
        both = zip(parts, orders, strict=True)
        return [(part.permute(0, 2, 3, 1) if last else part).reshape(-1) for part, last in both]

    def optimizer_step(self) -> None:
        """Clip `gradient` if `--clip` is set, and let the optimizer change `weights`."""
        if self.config.clip is not None:
            clip_gradient_(self.gradient, self.config.clip)
        self.optimizer.step(self.weights, self.gradient, self._rate)

    def run_steps(self, local_steps: LocalSteps) -> None:
        """Run these steps. Batches are drawn from the stream of (seed, round, client).

        Args:
            local_steps: The steps, which a `Client` yielded.
        """
        for batch_slice in self._batch_slices(local_steps):
            if batch_slice.starts_epoch:
                self._losses.clear()
            loss = self._step(local_steps.step, self._load_batch(batch_slice))
            self.steps += 1
            self._losses.append((loss.detach(), len(batch_slice)))

    def _step(self, step: Step, batch: Batch) -> Tensor:
        if self.device.type == "cuda":
            set_autotune(len(batch) == self.config.batch_size)
        # Batch norm has no statistics of one sample, so it uses its running statistics.
        resting = [norm for norm in self._norms if norm.training] if len(batch) == 1 else []
        for norm in resting:
            norm.eval()
        try:
            return step(self, batch)
        finally:  # a failed capture is followed by an eager step
            self.module_buffers.gather()
            for norm in resting:
                norm.train()

    def num_steps(self, local_steps: LocalSteps) -> int:
        """Return how many steps these `LocalSteps` take on this client.

        Args:
            local_steps: Steps with a number of epochs or of steps, or neither: then the settings decide.
        """
        if not self.num_examples:
            return 0
        epochs, steps = local_steps.epochs, local_steps.steps
        if epochs is None and steps is None:
            epochs, steps = self.config.epochs, self.config.steps
        return steps if steps is not None else ceil(self.num_examples / self._batch_size()) * (epochs or 0)

    def _batch_size(self) -> int:
        return min(self.config.batch_size or self.num_examples, self.num_examples)

    def _batch_slices(self, local_steps: LocalSteps) -> Iterator[BatchSlice]:
        """Yield the batches of these `LocalSteps`, as indices of samples."""
        if local_steps.steps is None:
            self._epoch = None
        for _ in range(self.num_steps(local_steps)):
            if self._epoch is None or self._epoch.exhausted:
                self._epoch = EpochBatches(self._order.permutation(self.num_examples), self._batch_size())
            yield self._epoch.next()

    def _load_batch(self, batch_slice: BatchSlice) -> Batch:
        """Return a batch. Several batches are gathered and transformed at once."""
        size = self._batch_size()
        sample_bytes = self._data.x[:1].numel() * 4
        # Augmentation runs batch by batch, so that its draws do not depend on the size of a chunk.
        chunk = size * (1 if self._augment else max(1, CHUNK_BYTES // max(1, size * sample_bytes)))
        start = batch_slice.low - batch_slice.low % chunk
        if self._chunk is None or self._chunk[0] is not batch_slice.order or self._chunk[1] != start:
            taken = torch.from_numpy(batch_slice.order[start : start + chunk]).to(self.device)
            self._chunk = (batch_slice.order, start, self._transformed(self._data.take(taken)))
        batch = self._chunk[2]
        return Batch(
            batch.x[batch_slice.low - start : batch_slice.high - start],
            batch.y[batch_slice.low - start : batch_slice.high - start],
        )

    def _transformed(self, samples: Samples) -> Batch:
        x = samples.x
        if self._augment is not None:
            x = self._augment(x, self._noise)
        return Batch(self._context.data.transform(x, channels_last=self._context.numerics.channels_last), samples.y)

    @torch.no_grad()
    def update_batch_norm_statistics(self) -> None:
        """Estimate the running statistics of batch norm in `row` from this client's training samples.

        The result is the mean of the statistics of a few batches of about equal size, weighted by their samples. All
        other modules are in evaluation mode, and there is no augmentation. With fewer than two samples nothing changes.
        """
        norms = [norm for norm in self._norms if norm.running_mean is not None]
        if not norms or self.num_examples < 2:
            return
        before = (self._bound, [(module, module.training) for module in self.module.modules()])
        self.bind(self.row)
        counters = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        counts, momenta = [counter.clone() for counter in counters], [norm.momentum for norm in norms]
        self.module.eval()
        for norm in norms:
            norm.train()
        # Shuffled: samples are often sorted by class, and a batch of one class has too small a variance.
        order = self._context.rng_streams.numpy("statistics", self.round, self.client_id).permutation(self.num_examples)
        seen = 0
        try:
            for part in np.array_split(order, ceil(self.num_examples / EVALUATION_BATCH_SIZE)):
                seen += len(part)
                for norm in norms:
                    norm.momentum = len(part) / seen  # 1 for the first batch, which replaces the old statistics
                x = self._data.take(torch.from_numpy(part).to(self.device)).x
                self.module(self._context.data.transform(x, channels_last=self._context.numerics.channels_last))
        finally:  # after an error the next client uses the same network
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        for counter, count in zip(counters, counts, strict=True):  # they count training batches
            counter.copy_(count)
        self._resume(*before)

    def _resume(self, row: Tensor | None, modes: list[tuple[nn.Module, bool]]) -> None:
        """Restore the bound row and the training modes."""
        if row is not None:
            self.bind(row)
        for module, training in modes:
            module.training = training

    @torch.no_grad()
    def evaluate(self, row: Tensor, samples: Samples) -> EvaluationResult:
        """Evaluate a model on at most `EVALUATION_BATCH_SIZE` samples. Training may continue afterwards.

        Args:
            row: A model in flat form.
            samples: Samples as they are stored.

        Returns:
            The result, with the mean loss and the number of correct samples of each class.
        """
        before = (self._bound, [(module, module.training) for module in self.module.modules()])
        self.bind(row)
        self.module.eval()
        x = self._context.data.transform(samples.x.to(self.device), channels_last=self._context.numerics.channels_last)
        y = samples.y.to(self.device)
        with self.module_buffers.untouched():
            output = self.module(x)
        loss = float(self._context.criterion(output, y)) * len(samples)
        classes = self._context.data.classes
        correct_per_class = np.zeros(classes, dtype=np.int64)
        count_per_class = np.zeros(classes, dtype=np.int64)
        is_correct = torch.zeros(0, dtype=torch.bool)
        if classes:
            is_correct = output.argmax(dim=1) == y
            count_per_class = torch.bincount(y, minlength=classes).cpu().numpy()
            correct_per_class = torch.bincount(y[is_correct], minlength=classes).cpu().numpy()
        self._resume(*before)
        return EvaluationResult(loss, len(samples), correct_per_class, count_per_class, is_correct.cpu().numpy())

    def validate(self, row: Tensor) -> EvaluationResult:
        """Evaluate a model on the validation samples, or on the training samples if there are none.

        Args:
            row: A model in flat form.

        Returns:
            The result; its `loss` and `accuracy` are means over the samples.
        """
        samples = self.validation if len(self.validation) else self._data
        nothing = np.zeros(self._context.data.classes, dtype=np.int64)
        pieces = (self.evaluate(row, samples[chunk]) for chunk in evaluation_slices(samples))
        return sum(pieces, start=EvaluationResult(0.0, 0, nothing, nothing))
