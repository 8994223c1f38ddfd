"""The bench a client works at: its row, its gradient, its samples, and how to take a step.

A `Local` (see methods/base.py) works on these and yields `Pass`es, "run these epochs with this step"; an engine owns
the benches and runs the passes. Nothing here knows methods or processes.
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
from fedloom.data import Samples
from fedloom.devices.cuda_runtime import foreach_copy_
from fedloom.devices.precision import set_autotune
from fedloom.models.layers.recurrent import split_recurrent_layers
from fedloom.training.batches import Batch, BatchSlice, EpochBatches, Positions
from fedloom.training.context import OPTIMIZER_PREFIX, PERSONAL_KEY, Criterion, Step, TrainingContext
from fedloom.training.mixed_precision import apply_mixed_precision
from fedloom.training.module_buffers import ModuleBuffers
from fedloom.training.optimizers import Optimizer, StatefulOptimizer, clip_gradient_, make_optimizer


@dataclass(frozen=True)
class LocalSteps:
    """A stretch of local training: these epochs or steps (by default the run's own) with this step.

    Epochs begin anew; steps go on in the epoch that the steps before them left, so that a training may be cut into
    passes of some steps and see the same batches.
    `step(bench, batch)` returns the loss. It works only on what lies on the bench, so that an engine may
    interleave many clients, or record the step once and replay it.
    """

    step: "Step"
    epochs: int | None = None
    steps: int | None = None


__all__ = ["Batch", "Criterion", "LocalSteps", "LocalTrainer", "Step", "TrainingContext"]

CHUNK_BYTES = 8 << 20
"""How much input is gathered and normalised in one go: whole epochs of small clients, so that the cost of doing so
is not paid by every batch, and never the whole of a large one."""


class LocalTrainer:
    """One client's place of work. `begin` lays out the work of one client; the rest is for `Local`s."""

    row: Tensor
    """The model being trained; it is what the client sends back."""
    weights: Tensor
    """Its trainable part, a view."""
    gradient: Tensor
    """The gradient of the weights at the last `backward`, flat."""
    received: Tensor
    """The model as it came. Not to be changed."""
    extras: Mapping[str, Tensor]
    """What came beside the model. Not to be changed."""
    home: dict[str, Tensor]
    """What this client keeps between rounds, zeros at first; change it in place."""
    uploads: dict[str, Tensor]
    """What goes back beside the model, zeros at first; fill it in place."""
    scratch: dict[str, Any]
    """Room for what a `Local` needs between its steps; empty for each client."""
    optimizer: Optimizer
    """What `descend` steps with; a `Local` may put its own here."""
    _steady: StatefulOptimizer
    """The one that was made here last."""
    validation: Samples
    """What is held out of this client's training, the same in every round; empty unless the run or method asks."""

    def __init__(self, shop: TrainingContext, device: torch.device | str = "cpu") -> None:
        self.layout = shop.layout
        self.training = shop.training
        self.device = torch.device(device)
        self._shop = shop
        self.module = apply_mixed_precision(
            split_recurrent_layers(shop.module.to(self.device), self.device), self.device, shop.autocast
        )
        self.network_buffers = ModuleBuffers(self.module, shop.layout, shop.fresh or {}, self.device)
        self._augment = shop.augment
        self._norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm)]
        self.gradient = torch.zeros(self.layout.trainable, dtype=self.layout.dtype, device=self.device)
        self._slices = self.layout.views(self.gradient)
        sizes = [entry.size for entry in self.layout.entries if entry.kind is TensorKind.PARAMETER]
        self._flat = torch.split(self.gradient, sizes)
        self._bound: Tensor | None = None
        self._buffers: dict[str, Tensor] = {}
        named = dict(self.module.named_parameters(remove_duplicate=False))
        self._parameters = [named[e.name] for e in self.layout.entries if e.kind is TensorKind.PARAMETER]

    def begin(
        self,
        round: int,
        client: int,
        samples: Samples,
        row: Tensor,
        received: Tensor,
        extras: Mapping[str, Tensor],
        home: dict[str, Tensor],
        uploads: dict[str, Tensor],
        first_visit: bool,
    ) -> None:
        """Lay out the work of one client; `row` becomes the model it trains, starting at `received`."""
        self.round, self.client, self.first_visit = round, client, first_visit
        self.training = self._shop.training
        self._set_rate(self.training.lr_at(round))
        self.row, self.received, self.extras, self.home, self.uploads = row, received, extras, home, uploads
        self.weights = row[: self.layout.trainable]
        self.scratch = {}
        self._bring(samples)
        self.restart()

    def _bring(self, samples: Samples) -> None:
        """Have the client's samples at hand, those to train on and those that are held out."""
        samples = Samples(samples.x.to(self.device), samples.y.to(self.device))
        used, held = self._split(len(samples))
        self._brought, self.validation = (
            (samples.take(used), samples.take(held)) if len(held) else (samples, samples[:0])
        )

    def _split(self, count: int) -> tuple[Positions, Positions]:
        """Which samples are trained on and which are held out. One at least is left to train on."""
        held = min(int(self.training.validation * count + 0.5), max(0, count - 1))
        if not held:
            return np.arange(count), np.arange(0)
        order = self._shop.streams.numpy("validation", client=self.client).permutation(count)
        return np.sort(order[held:]), np.sort(order[:held])

    def restart(self) -> None:
        """Go back to the received model, with a new optimiser and the same batches to come."""
        streams = self._shop.streams
        self.steps = 0
        self._order = streams.numpy("batches", self.round, self.client)
        self._epoch: EpochBatches | None = None
        self._chunk: tuple[Positions, int, Batch] | None = None
        if self._augment:
            self._noise = self._new_noise()
        self._losses: list[tuple[Tensor, int]] = []
        self.network_buffers.forget()  # or it would be gathered below, into the model that has just come
        self.row.copy_(self.received)
        if self._shop.stays_home and not self.first_visit:
            scatter_columns(self.row, self._shop.stays_home, self.home[PERSONAL_KEY])
        self.bind(self.row)
        self.network_buffers.renew()
        self.module.train()
        self.new_optimizer()
        self.recall_optimizer()

    def _new_noise(self) -> torch.Generator:
        """What augmentation draws from, for this client and round."""
        return self._shop.streams.pytorch("augment", self.round, self.client, self.device)

    def finish(self) -> None:
        """The training is over: estimate statistics if the run asks for it, and keep at home what stays there."""
        self.network_buffers.gather()  # the last word may have been said between passes
        if self.training.statistics == "estimated":
            self.estimate_statistics()
        self.keep_optimizer()
        if self._shop.stays_home:
            self.home[PERSONAL_KEY].copy_(torch.cat([self.row[columns] for columns in self._shop.stays_home]))
            for columns in self._shop.stays_home:
                self.row[columns] = self.received[columns]

    def keep_optimizer(self) -> None:
        """Keep at home what the optimiser knows now, where the run asks for it."""
        if self._shop.training.keep_optimizer:
            known = self._steady.known(self.weights)
            for name in self._remembered() & known.keys():  # with other settings at last it may know less
                self.home[f"{OPTIMIZER_PREFIX}{name}"].copy_(known[name])

    def recall_optimizer(self) -> None:
        """Go on with what was kept there: a new optimiser with the run's own settings begins so."""
        if self._shop.training.keep_optimizer:
            self._steady.recall({name: self.home[f"{OPTIMIZER_PREFIX}{name}"] for name in self._remembered()})

    def _remembered(self) -> set[str]:
        return set(make_optimizer(self._shop.training).remembers(0))

    @property
    def samples(self) -> int:
        """How many samples this client trains on."""
        return len(self._data)

    @property
    def _data(self) -> Samples:
        """What this client trains on."""
        return self._brought

    @property
    def mean_loss(self) -> float:
        """Mean training loss over the last epoch that was run; NaN when none was."""
        if not self._losses:
            return float("nan")
        losses, sizes = zip(*self._losses, strict=True)
        weights = torch.tensor(sizes, dtype=losses[0].dtype, device=self.device)
        return float(torch.stack(losses) @ weights) / float(sum(sizes))

    def bind(self, row: Tensor) -> None:
        """Let the module compute with the model in `row`."""
        self.network_buffers.gather()
        self.layout.bind(self.module, row)
        self.network_buffers.hold()
        self._bound = row

    def new_optimizer(self) -> None:
        """Forget momentum and moments."""
        made = make_optimizer(self.training)
        if self.device.type != "cpu":
            made.settle(self.weights)  # as steps that are recorded need it: all engines on a GPU round alike
        self.optimizer = self._steady = made

    def adopt(self, training: TrainingConfig) -> None:
        """Train this client from here on with other settings, and a new optimiser."""
        self.training = training
        self._set_rate(training.lr_at(self.round))
        self._epoch = None
        self.new_optimizer()

    @property
    def lr(self) -> float:
        """The learning rate; a `Local` may change it between passes."""
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self._set_rate(lr)

    def _set_rate(self, lr: float) -> None:
        self._lr = lr
        self._rate: float | Tensor = lr
        if self.device.type != "cpu":  # a tensor, as in steps that are recorded: all engines on a GPU round alike
            self._rate = torch.tensor(lr, dtype=self.layout.dtype, device=self.device)

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Room for a tensor that steps use, in the model's type; it holds what the last client left there.

        It is the same memory for every client, so that an engine can record a step once and replay it.
        """
        kept = self._buffers.get(name)
        if kept is None or kept.shape != shape:
            kept = self._buffers[name] = torch.zeros(shape, dtype=self.layout.dtype, device=self.device)
        return kept

    def loss(self, batch: Batch) -> Tensor:
        """The loss of the bound model on a batch."""
        return self._shop.criterion(self.module(batch.x), batch.y)

    def backward(self, loss: Tensor) -> None:
        """Put the gradient of `loss` with respect to the bound model's weights into `gradient`."""
        parts = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        if all(part is not None for part in parts):
            if self.device.type == "cpu":
                torch._foreach_copy_(self._slices, parts)
            else:
                foreach_copy_(self._flat, self._in_row(parts))  # the same, but better spread over a GPU
            return
        for target, part in zip(self._slices, parts, strict=True):  # a layer that took no part has no gradient
            target.zero_() if part is None else target.copy_(part)

    def _in_row(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The parameters' gradients as they lie in a row, one after the other."""
        orders = (entry.channels_last for entry in self.layout.entries if entry.kind is TensorKind.PARAMETER)
        both = zip(parts, orders, strict=True)
        return [(part.permute(0, 2, 3, 1) if last else part).reshape(-1) for part, last in both]

    def descend(self) -> None:
        """Clip `gradient` if asked to, and take the optimiser's step with it on `weights`."""
        if self.training.clip is not None:
            clip_gradient_(self.gradient, self.training.clip)
        self.optimizer.step(self.weights, self.gradient, self._rate)

    def run(self, piece: LocalSteps) -> None:
        """Run one pass. Batches are drawn from the stream of (seed, round, client)."""
        for cut in self._cuts(piece):
            if cut.first:
                self._losses.clear()
            loss = self._step(piece.step, self._fetch(cut))
            self.steps += 1
            self._losses.append((loss.detach(), len(cut)))

    def _step(self, step: Step, batch: Batch) -> Tensor:
        set_autotune(len(batch) == self.training.batch_size)
        # Batch norm cannot take statistics of one sample: it uses those it has.
        resting = [norm for norm in self._norms if norm.training] if len(batch) == 1 else []
        for norm in resting:
            norm.eval()
        try:
            return step(self, batch)
        finally:  # a step that could not be recorded is done again, and so are others after it
            self.network_buffers.gather()
            for norm in resting:
                norm.train()

    def length(self, piece: LocalSteps) -> int:
        """How many steps a pass takes on this client."""
        if not self.samples:
            return 0
        epochs, steps = piece.epochs, piece.steps
        if epochs is None and steps is None:
            epochs, steps = self.training.epochs, self.training.steps
        return steps if steps is not None else ceil(self.samples / self._batch_size()) * (epochs or 0)

    def _batch_size(self) -> int:
        return min(self.training.batch_size or self.samples, self.samples)

    def _cuts(self, piece: LocalSteps) -> Iterator[BatchSlice]:
        """The batches of a pass, as positions of samples."""
        if piece.steps is None:
            self._epoch = None
        for _ in range(self.length(piece)):
            if self._epoch is None or self._epoch.over:
                self._epoch = EpochBatches(self._order.permutation(self.samples), self._batch_size())
            yield self._epoch.next()

    def _fetch(self, cut: BatchSlice) -> Batch:
        """The samples of a batch, prepared; they are gathered some batches at a time."""
        size = self._batch_size()
        sample_bytes = self._data.x[:1].numel() * 4
        # Augmentation draws batch by batch, so that its draws do not depend on how much is prepared at once.
        chunk = size * (1 if self._augment else max(1, CHUNK_BYTES // max(1, size * sample_bytes)))
        start = cut.low - cut.low % chunk
        if self._chunk is None or self._chunk[0] is not cut.order or self._chunk[1] != start:
            taken = torch.from_numpy(cut.order[start : start + chunk]).to(self.device)
            self._chunk = (cut.order, start, self._prepared(self._data.take(taken)))
        batch = self._chunk[2]
        return Batch(batch.x[cut.low - start : cut.high - start], batch.y[cut.low - start : cut.high - start])

    def _prepared(self, samples: Samples) -> Batch:
        x = samples.x
        if self._augment is not None:
            x = self._augment(x, self._noise)
        return Batch(self._shop.prepare(x, channels_last=self._shop.channels_last), samples.y)

    @torch.no_grad()
    def estimate_statistics(self) -> None:
        """Estimate batch norm's running statistics of `row` anew, from this client's samples as they are.

        They become the mean, weighted by samples, of the statistics of a few batches of about equal size; all other
        modules compute as in a test. With fewer than two samples there is nothing to estimate from.
        """
        norms = [norm for norm in self._norms if norm.running_mean is not None]
        if not norms or self.samples < 2:
            return
        before = (self._bound, [(module, module.training) for module in self.module.modules()])
        self.bind(self.row)
        counters = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        counts, momenta = [counter.clone() for counter in counters], [norm.momentum for norm in norms]
        self.module.eval()
        for norm in norms:
            norm.train()
        # Shuffled: clients often hold their samples by class, and a batch of one class has too small a variance.
        order = self._shop.streams.numpy("statistics", self.round, self.client).permutation(self.samples)
        seen = 0
        try:
            for part in np.array_split(order, ceil(self.samples / EVALUATION_BATCH_SIZE)):
                seen += len(part)
                for norm in norms:
                    norm.momentum = len(part) / seen  # 1 for the first, which so replaces what was there
                x = self._data.take(torch.from_numpy(part).to(self.device)).x
                self.module(self._shop.prepare(x, channels_last=self._shop.channels_last))
        finally:  # a network that raises is used again, for the next client
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        for counter, count in zip(counters, counts, strict=True):  # they count batches of training
            counter.copy_(count)
        self._resume(*before)

    def _resume(self, row: Tensor | None, modes: list[tuple[nn.Module, bool]]) -> None:
        """Go back to training as it was before."""
        if row is not None:
            self.bind(row)
        for module, training in modes:
            module.training = training

    @torch.no_grad()
    def score(self, row: Tensor, samples: Samples) -> EvaluationResult:
        """Evaluate the model in `row` on at most EVALUATION_BATCH_SIZE samples. Training may go on afterwards."""
        before = (self._bound, [(module, module.training) for module in self.module.modules()])
        self.bind(row)
        self.module.eval()
        x = self._shop.prepare(samples.x.to(self.device), channels_last=self._shop.channels_last)
        y = samples.y.to(self.device)
        with self.network_buffers.untouched():
            output = self.module(x)
        loss = float(self._shop.criterion(output, y)) * len(samples)
        classes = self._shop.classes
        hits = np.zeros(classes, dtype=np.int64)
        seen = np.zeros(classes, dtype=np.int64)
        right = torch.zeros(0, dtype=torch.bool)
        if classes:
            right = output.argmax(dim=1) == y
            seen = torch.bincount(y, minlength=classes).cpu().numpy()
            hits = torch.bincount(y[right], minlength=classes).cpu().numpy()
        self._resume(*before)
        return EvaluationResult(loss, len(samples), hits, seen, right.cpu().numpy())

    def validate(self, row: Tensor) -> EvaluationResult:
        """How the model in `row` does on the validation samples, or on the training ones where none are held out."""
        samples = self.validation if len(self.validation) else self._data
        nothing = np.zeros(self._shop.classes, dtype=np.int64)
        pieces = (self.score(row, samples[chunk]) for chunk in evaluation_slices(samples))
        return sum(pieces, start=EvaluationResult(0.0, 0, nothing, nothing))
