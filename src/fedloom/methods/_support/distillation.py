"""Distillation on the server's data: models and steps, for FedDF and others.

Networks run in evaluation mode, as the global model does: batch norm uses the statistics in the row and does not change
them. The server's data may have another distribution, and their statistics would be wrong for the clients' data.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.evaluation import EVALUATION_BATCH_SIZE
from fedloom.core.layout import Layout, TensorKind
from fedloom.errors import FedloomError, InputError
from fedloom.methods.base import MethodContext
from fedloom.training.optimizers import Optimizer


class DistillationModel:
    """A network as a function of a row and a batch.

    It runs in evaluation mode: batch norm uses the statistics in the row and does not change them, and there is no
    dropout. So the function is deterministic and differentiable.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device) -> None:
        self.module = module.to(device).eval()
        self.trainable = layout.trainable
        # `split` has one gradient; many slices would have a whole row each, mostly zeros.
        self._parameters = [replace(entry, offset=0) for entry in layout.entries if entry.kind is TensorKind.PARAMETER]
        self._sizes = [entry.size for entry in self._parameters]
        self._buffers = [entry for entry in layout.entries if entry.kind is not TensorKind.PARAMETER]
        self._channels_last = any(entry.channels_last for entry in layout.entries)

    def __call__(self, weights: Tensor, x: Tensor, row: Tensor) -> Tensor:
        """Return the outputs for a batch with trainable parameters `weights` (flat) and all other tensors of `row`."""
        named: dict[str, Tensor] = {}
        for entry, piece in zip(self._parameters, torch.split(weights, self._sizes), strict=True):
            named.update(dict.fromkeys(entry.names, entry.view(piece)))
        for entry in self._buffers:
            named.update(dict.fromkeys(entry.names, entry.view(row)))
        if self._channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        output: Tensor = torch.func.functional_call(self.module, named, (x,))
        return output


MOST_PREPARED = 1 << 28
"""Maximal bytes of inputs to transform once and keep; larger data are transformed batch by batch."""


class DistillationData:
    """The server's data, and the network to run on them."""

    def __init__(self, context: MethodContext, method_name: str, *, needs_classes: bool = True) -> None:
        if context.server.data is None:
            raise InputError(f"{method_name} needs data on the server: choose them with --server-data.")
        if needs_classes and context.classes < 2:
            raise InputError(f"{method_name} distills classifiers, so it needs data with classes.")
        self.context, self.method_name = context, method_name
        self.samples = context.server.data
        self.network = DistillationModel(context.make_model(), context.layout, context.server.device)
        whole = self._ready(self.samples.x[:1])
        small = whole.nbytes * len(self) <= MOST_PREPARED
        self._x = self._ready(self.samples.x) if small else None
        if needs_classes and (shape := self.outputs(context.initial, torch.arange(1)).shape)[1:] != shape[1:2]:
            raise InputError(
                f"{method_name} needs one row of outputs for each input, not outputs of shape {tuple(shape)}."
            )

    def __len__(self) -> int:
        return len(self.samples)

    def _ready(self, x: Tensor) -> Tensor:
        x = self.context.transform(x)
        return x.to(self.context.layout.dtype) if x.is_floating_point() else x

    def inputs(self, index: Tensor) -> Tensor:
        """Return the network input at these positions."""
        if self._x is not None:
            return self._x.index_select(0, index)
        return self._ready(self.samples.x.index_select(0, index))

    @torch.no_grad()
    def outputs(self, row: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the outputs of the model in `row` for the samples at these positions (all by default)."""
        index = torch.arange(len(self)) if index is None else index
        weights = row[: self.network.trainable]
        pieces = torch.split(index.to(self.context.server.device), EVALUATION_BATCH_SIZE)
        return torch.cat([self.network(weights, self.inputs(piece), row) for piece in pieces])

    def batches(self, draw: np.random.Generator, size: int, index: Tensor | None = None) -> Iterator[Tensor]:
        """Yield every position once, in random order, in batches."""
        order = torch.from_numpy(draw.permutation(len(self) if index is None else len(index)))
        positions = order if index is None else index.cpu()[order]
        return iter(torch.split(positions.to(self.context.server.device), size or len(positions)))

    def distill(
        self, row: Tensor, index: Tensor, teacher: Tensor, optimizer: Optimizer, lr: float, t: float = 1
    ) -> None:
        """Take one step of the model in `row` towards the teacher's probabilities (one row per sample).

        The loss is KL(teacher || student) at temperature `t`.
        """
        weights = row[: self.network.trainable].detach().requires_grad_()
        loss = distillation_loss(teacher.index_select(0, index), self.network(weights, self.inputs(index), row) / t)
        (gradient,) = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            optimizer.step(weights, gradient, lr)

    def check(self, round: int, row: Tensor, rate: str) -> None:
        """Raise an error if the model is not finite; `rate` names the option to lower."""
        if not self.context.layout.is_finite(row):
            raise FedloomError(
                f"round {round + 1}: a model is not finite after {self.method_name}'s server training; lower {rate}."
            )


def distillation_loss(teacher_probabilities: Tensor, student_logits: Tensor) -> Tensor:
    """Return KL(teacher || softmax(logits)), the mean over the batch."""
    return F.kl_div(F.log_softmax(student_logits, dim=1), teacher_probabilities, reduction="batchmean")
