"""The bench a client works at: its row, its gradient, its samples, and how to take a step.

A `Local` (see methods/base.py) works on these and yields `Pass`es, "run these epochs with this step"; an engine owns
the benches and runs the passes. Nothing here knows methods or processes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.data import Augment, Prepare, Samples
from fedloom.exchange import Shapes
from fedloom.optim import Optimizer, clip_
from fedloom.rows import Kind, Layout
from fedloom.streams import Streams
from fedloom.training import Training

Criterion = Callable[[Tensor, Tensor], Tensor]
"""A loss: (output of the network, targets) -> mean over the batch."""

CHUNK_BYTES = 8 << 20
"""How much input is gathered and normalised in one go: whole epochs of small clients, so that the cost of doing so
is not paid by every batch, and never the whole of a large one."""

STAYS = "@stays"
"""The name under which a client keeps the columns of the model that stay with it."""

SCORE_BATCH = 500
"""Samples scored at once. Fixed, because the rounding of a sum depends on it."""


@dataclass(frozen=True)
class Batch:
    """One prepared mini-batch."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return self.y.shape[0]


@dataclass(frozen=True)
class Pass:
    """A stretch of local training: these epochs or steps (by default the run's own) with this step.

    `step(bench, batch)` returns the loss. It works only on what lies on the bench, so that an engine may
    interleave many clients, or record the step once and replay it.
    """

    step: Callable[["Bench", Batch], Tensor]
    epochs: int | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Workshop:
    """What all benches of a run have in common."""

    module: nn.Module
    layout: Layout
    criterion: Criterion
    prepare: Prepare
    training: Training
    streams: Streams
    classes: int = 0
    channels_last: bool = False
    augment: Augment | None = None
    uploads: Shapes = field(default_factory=dict)
    """Tensors that clients send up beside their model."""
    home: Shapes = field(default_factory=dict)
    """Tensors that each client keeps between rounds."""
    stays_home: Sequence[slice] = ()
    """Columns of the model that do not travel; each client keeps its own, as the tensor STAYS of its home."""


class Bench:
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

    def __init__(self, shop: Workshop, device: torch.device | str = "cpu") -> None:
        self.layout = shop.layout
        self.training = shop.training
        self.device = torch.device(device)
        self._shop = shop
        self.module = shop.module.to(self.device)
        self._augment = shop.augment
        self._norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm)]
        self.gradient = torch.zeros(self.layout.trainable, dtype=self.layout.dtype, device=self.device)
        self._slices = self.layout.views(self.gradient)
        self._bound: Tensor | None = None
        named = dict(self.module.named_parameters(remove_duplicate=False))
        self._parameters = [named[e.name] for e in self.layout.entries if e.kind is Kind.PARAMETER]

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
        self.lr = self.training.lr_at(round)
        self.row, self.received, self.extras, self.home, self.uploads = row, received, extras, home, uploads
        self.weights = row[: self.layout.trainable]
        self.scratch = {}
        self._data = Samples(samples.x.to(self.device), samples.y.to(self.device))
        self.restart()

    def restart(self) -> None:
        """Go back to the received model, with a new optimiser and the same batches to come."""
        streams = self._shop.streams
        self.steps = 0
        self._order = streams.numpy("batches", self.round, self.client)
        if self._augment:
            self._noise = streams.pytorch("augment", self.round, self.client, self.device)
        self._losses: list[tuple[Tensor, int]] = []
        self.row.copy_(self.received)
        if self._shop.stays_home and not self.first_visit:
            self._own_columns(self.row, self.home[STAYS])
        self.bind(self.row)
        self.module.train()
        self.new_optimizer()

    def finish(self) -> None:
        """Keep at home what stays there, and send back the received values in its place."""
        if self._shop.stays_home:
            self.home[STAYS].copy_(torch.cat([self.row[columns] for columns in self._shop.stays_home]))
            for columns in self._shop.stays_home:
                self.row[columns] = self.received[columns]

    def _own_columns(self, row: Tensor, values: Tensor) -> None:
        start = 0
        for columns in self._shop.stays_home:
            size = columns.stop - columns.start
            row[columns] = values[start : start + size]
            start += size

    @property
    def samples(self) -> int:
        """How many samples this client trains on."""
        return len(self._data)

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
        self.layout.bind(self.module, row)
        self._bound = row

    def new_optimizer(self) -> None:
        """Forget momentum and moments."""
        self.optimizer = self.training.make_optimizer()

    def loss(self, batch: Batch) -> Tensor:
        """The loss of the bound model on a batch."""
        return self._shop.criterion(self.module(batch.x), batch.y)

    def backward(self, loss: Tensor) -> None:
        """Put the gradient of `loss` with respect to the bound model's weights into `gradient`."""
        parts = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        if all(part is not None for part in parts):
            torch._foreach_copy_(self._slices, parts)
            return
        for target, part in zip(self._slices, parts, strict=True):  # a layer that took no part has no gradient
            target.zero_() if part is None else target.copy_(part)

    def descend(self) -> None:
        """Clip `gradient` if asked to, and take the optimiser's step with it on `weights`."""
        if self.training.clip is not None:
            clip_(self.gradient, self.training.clip)
        self.optimizer.step(self.weights, self.gradient, self.lr)

    def run(self, piece: Pass) -> None:
        """Run one pass. Batches are drawn from the stream of (seed, round, client)."""
        for batch in self._batches(piece):
            # Batch norm cannot take statistics of one sample: it uses those it has.
            resting = [norm for norm in self._norms if norm.training] if len(batch) == 1 else []
            for norm in resting:
                norm.eval()
            loss = piece.step(self, batch)
            for norm in resting:
                norm.train()
            self.steps += 1
            self._losses.append((loss.detach(), len(batch)))

    def _batches(self, piece: Pass) -> Iterator[Batch]:
        count = self.samples
        if not count:
            return
        size = min(self.training.batch_size or count, count)
        per_epoch = ceil(count / size)
        if piece.steps is None and piece.epochs is None:
            piece = Pass(piece.step, self.training.epochs, self.training.steps)
        left = piece.steps if piece.steps is not None else per_epoch * (piece.epochs or 0)
        sample_bytes = self._data.x[:1].numel() * 4
        # Augmentation draws batch by batch, so that its draws do not depend on how much is prepared at once.
        chunk = size * (1 if self._augment else max(1, CHUNK_BYTES // max(1, size * sample_bytes)))
        while left > 0:
            order = torch.from_numpy(self._order.permutation(count)).to(self.device)
            self._losses.clear()
            for start in range(0, count, chunk):
                if left <= 0:
                    return
                taken = self._prepared(self._data.take(order[start : start + chunk]))
                for low in range(0, len(taken), size):
                    if left <= 0:
                        return
                    yield Batch(taken.x[low : low + size], taken.y[low : low + size])
                    left -= 1

    def _prepared(self, samples: Samples) -> Batch:
        x = samples.x
        if self._augment is not None:
            x = self._augment(x, self._noise)
        return Batch(self._shop.prepare(x, channels_last=self._shop.channels_last), samples.y)

    @torch.no_grad()
    def score(self, row: Tensor, samples: Samples) -> "Score":
        """How the model in `row` does on at most SCORE_BATCH samples. Training may go on afterwards as before."""
        before = self._bound
        modes = [(module, module.training) for module in self.module.modules()]
        self.bind(row)
        self.module.eval()
        x = self._shop.prepare(samples.x.to(self.device), channels_last=self._shop.channels_last)
        y = samples.y.to(self.device)
        output = self.module(x)
        loss = float(self._shop.criterion(output, y)) * len(samples)
        classes = self._shop.classes
        hits = np.zeros(classes, dtype=np.int64)
        seen = np.zeros(classes, dtype=np.int64)
        if classes:
            right = output.argmax(dim=1) == y
            seen = torch.bincount(y, minlength=classes).cpu().numpy()
            hits = torch.bincount(y[right], minlength=classes).cpu().numpy()
        if before is not None:
            self.bind(before)
        for module, training in modes:
            module.training = training
        return Score(loss, len(samples), hits, seen)


@dataclass(frozen=True)
class Score:
    """Test results that can be added up: sums, and hits by class."""

    loss_sum: float
    count: int
    hits: np.ndarray
    seen: np.ndarray

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.loss_sum + other.loss_sum,
            self.count + other.count,
            self.hits + other.hits,
            self.seen + other.seen,
        )

    @property
    def loss(self) -> float:
        return self.loss_sum / self.count

    @property
    def accuracy(self) -> float | None:
        """The share of samples that were classified rightly; None when there are no classes."""
        return float(self.hits.sum() / self.seen.sum()) if self.seen.sum() else None


def score_chunks(test: Samples) -> list[slice]:
    """How a test set is cut, always alike: engines may score the pieces anywhere and add them up in this order."""
    return [slice(low, low + SCORE_BATCH) for low in range(0, len(test), SCORE_BATCH)]
