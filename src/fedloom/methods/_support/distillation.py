"""What FedDF, FedBE, ABAVG and FedLAW have in common: models that compute on the server's data.

Networks compute as the deployed model does, in evaluation mode: batch norm uses the statistics in the row and leaves
them alone. The server's data may come from elsewhere, and statistics of them would be wrong for the clients' data.
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


class FunctionalModel:
    """A network as a function of a row and a batch.

    It computes as the deployed model does, in evaluation mode: batch norm uses the statistics in the row and leaves
    them alone, and there is no dropout. So the function is the same each time, and has derivatives.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device) -> None:
        self.module = module.to(device).eval()
        self.trainable = layout.trainable
        # Split in one go: the gradients of many slices would each be a whole row of zeros around a few numbers.
        self._parameters = [replace(entry, offset=0) for entry in layout.entries if entry.kind is TensorKind.PARAMETER]
        self._sizes = [entry.size for entry in self._parameters]
        self._buffers = [entry for entry in layout.entries if entry.kind is not TensorKind.PARAMETER]
        self._channels_last = any(entry.channels_last for entry in layout.entries)

    def __call__(self, weights: Tensor, x: Tensor, row: Tensor) -> Tensor:
        """The outputs for a batch with trainable parameters `weights` (flat), and all other tensors from `row`."""
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
"""Bytes of inputs that are made ready once and kept; more than that is made ready batch by batch."""


class DistillationData:
    """The server's data, and the network on them."""

    def __init__(self, context: MethodContext, method: str, *, classifies: bool = True) -> None:
        if context.server_data is None:
            raise InputError(f"{method} needs data on the server: name some with --server-data.")
        if classifies and context.classes < 2:
            raise InputError(f"{method} compares what classifiers say, so it needs data with classes.")
        self.context, self.method = context, method
        self.samples = context.server_data
        self.network = FunctionalModel(context.make_module(), context.layout, context.device)
        whole = self._ready(self.samples.x[:1])
        small = whole.nbytes * len(self) <= MOST_PREPARED
        self._x = self._ready(self.samples.x) if small else None
        if classifies and (shape := self.outputs(context.initial, torch.arange(1)).shape)[1:] != shape[1:2]:
            raise InputError(f"{method} needs one row of outputs for each input, not outputs of shape {tuple(shape)}.")

    def __len__(self) -> int:
        return len(self.samples)

    def _ready(self, x: Tensor) -> Tensor:
        x = self.context.prepare(x)
        return x.to(self.context.layout.dtype) if x.is_floating_point() else x

    def inputs(self, index: Tensor) -> Tensor:
        """Network input at these positions."""
        if self._x is not None:
            return self._x.index_select(0, index)
        return self._ready(self.samples.x.index_select(0, index))

    @torch.no_grad()
    def outputs(self, row: Tensor, index: Tensor | None = None) -> Tensor:
        """What the model in `row` says of the samples at these positions, by default of all."""
        index = torch.arange(len(self)) if index is None else index
        weights = row[: self.network.trainable]
        pieces = torch.split(index.to(self.context.device), EVALUATION_BATCH_SIZE)
        return torch.cat([self.network(weights, self.inputs(piece), row) for piece in pieces])

    def batches(self, draw: np.random.Generator, size: int, index: Tensor | None = None) -> Iterator[Tensor]:
        """Every position once, in a random order, by batches."""
        order = torch.from_numpy(draw.permutation(len(self) if index is None else len(index)))
        positions = order if index is None else index.cpu()[order]
        return iter(torch.split(positions.to(self.context.device), size or len(positions)))

    def distil(
        self, row: Tensor, index: Tensor, teacher: Tensor, optimizer: Optimizer, lr: float, t: float = 1
    ) -> None:
        """One step of the model in `row` towards the teacher's probabilities, one row of them for each sample.

        The loss is KL(teacher || student) at temperature `t`.
        """
        weights = row[: self.network.trainable].detach().requires_grad_()
        loss = distillation_loss(teacher.index_select(0, index), self.network(weights, self.inputs(index), row) / t)
        (gradient,) = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            optimizer.step(weights, gradient, lr)

    def check(self, round: int, row: Tensor, rate: str) -> None:
        """End the run where the model has become useless, with a word on what to lower."""
        if not self.context.layout.is_finite(row):
            raise FedloomError(
                f"round {round + 1}: a model is not finite after {self.method}'s work on the server; lower {rate}."
            )


def distillation_loss(teacher: Tensor, logits: Tensor) -> Tensor:
    """KL(teacher || softmax(logits)), mean over the batch."""
    return F.kl_div(F.log_softmax(logits, dim=1), teacher, reduction="batchmean")
