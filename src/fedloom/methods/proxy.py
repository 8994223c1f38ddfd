"""What FedDF, FedBE, ABAVG and FedLAW have in common: models that compute on the server's data.

Networks compute as the deployed model does, in evaluation mode: batch norm uses the statistics in the row and leaves
them alone. The server's data may come from elsewhere, and statistics of them would be wrong for the clients' data.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.errors import FedloomError, InputError
from fedloom.exchange import Job
from fedloom.methods.base import Context, O, Server
from fedloom.methods.synthesis import Network
from fedloom.optim import Optimizer
from fedloom.scores import SCORE_BATCH

MOST_PREPARED = 1 << 28
"""Bytes of inputs that are made ready once and kept; more than that is made ready batch by batch."""


class SingleServer(Server[O]):
    """A server with one model, as FedAvg has; how answers are taken in is left open."""

    kept = ("bank",)

    def __init__(self, context: Context, options: O) -> None:
        super().__init__(context, options)
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial

    def dispatch(self, round: int, clients: list[int]) -> Iterable[Job]:
        return [Job(client, self.bank.rows[0]) for client in clients]

    def deploy(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows


class Proxy:
    """The server's data, and the network on them."""

    def __init__(self, context: Context, method: str, *, classifies: bool = True) -> None:
        if context.server_data is None:
            raise InputError(f"{method} needs data on the server: name some with --server-data.")
        if classifies and context.classes < 2:
            raise InputError(f"{method} compares what classifiers say, so it needs data with classes.")
        self.context, self.method = context, method
        self.samples = context.server_data
        self.network = Network(context.make_module(), context.layout, context.device)
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
        pieces = torch.split(index.to(self.context.device), SCORE_BATCH)
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
        loss = divergence(teacher.index_select(0, index), self.network(weights, self.inputs(index), row) / t)
        (gradient,) = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            optimizer.step(weights, gradient, lr)

    def check(self, round: int, row: Tensor, rate: str) -> None:
        """End the run where the model has become useless, with a word on what to lower."""
        if not self.context.layout.is_finite(row):
            raise FedloomError(
                f"round {round + 1}: a model is not finite after {self.method}'s work on the server; lower {rate}."
            )


def divergence(teacher: Tensor, logits: Tensor) -> Tensor:
    """KL(teacher || softmax(logits)), mean over the batch."""
    return F.kl_div(F.log_softmax(logits, dim=1), teacher, reduction="batchmean")
