"""FedDF: distill the ensemble of client models into their mean.

The server distills on unlabeled data.

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020. The student starts as
the new model (FedAvg's mean) and becomes the model of the next round. For batches x of the server's data

    teacher = softmax(mean_k logits_k(x)),    loss = KL(teacher || student(x)).

As in the authors' code, each round has a new Adam, a cosine schedule over at most 10,000 batches of 128, and early
stopping: after 1,000 batches without an improvement, checked every 100. They check the accuracy on a labeled set. Here
no labels are needed: a tenth of the server's data is held out, an improvement is a lower divergence from the ensemble
there, and the best student is kept, even the initial one. With `validation=0` all batches run and the last is kept.

Our own choices. The teachers' logits are computed once, when their models arrive, so no client model is stored. Every
model that the next round starts from is distilled, with any server. `drop` (optional in the paper) leaves out clients
no better than chance on the server's samples, so it needs labels. If no client is better, all of them count.
"""

from itertools import chain, count, islice
from math import cos, pi
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.core.tasks import ClientUpdate
from fedloom.errors import InputError
from fedloom.methods._support.distillation import DistillationData, distillation_loss
from fedloom.methods.base import Options, Refiner, Server
from fedloom.methods.registry import register
from fedloom.training.optimizers import Adam

GAIN = 1e-6
"""Smaller decreases of the divergence are rounding, not an improvement."""


class FedDFOptions(Options):
    steps: int = Field(10_000, ge=0)
    """maximal number of distillation steps in each round; 0 is FedAvg"""
    batch_size: int = Field(128, ge=0)
    """samples in a batch; 0 takes all"""
    lr: float = Field(0.001, ge=0)
    """learning rate of Adam at first; it falls to 0 over `steps` by a cosine"""
    temperature: float = Field(1.0, gt=0)
    """divisor of the logits of teacher and student"""
    validation: float = Field(0.1, ge=0, lt=1)
    """share of the server's data held out for early stopping and to select the best student"""
    check_every: int = Field(100, ge=1)
    """steps between two validations"""
    patience: int = Field(1000, ge=1)
    """steps without an improvement after which the distillation ends"""
    drop: bool = False
    """leave out clients that are no better than chance on the server's samples (needs their labels)"""


@register(
    "feddf",
    reference="Lin et al., NeurIPS 2020",
    neutral={"steps": 0},
    extra_compute="server distills",
    server_data="inputs",
)
class FedDFRefiner(Refiner[FedDFOptions]):
    """Distill the ensemble of the client models into their mean, on the server's unlabeled samples."""

    needs_reason = "takes the clients' models as teachers"

    def start(self) -> None:
        context, options = self.context, self.options
        self._proxy = proxy = DistillationData(context, "feddf")
        if options.drop and not context.server.labels_fit:
            raise InputError("feddf.drop needs server data labeled with the clients' classes, and this run has none.")
        order = torch.from_numpy(context.rng_streams.numpy("feddf validation").permutation(len(proxy)))
        held = min(int(options.validation * len(proxy) + 0.5), len(proxy) - 1)
        self._held, self._used = order[:held].to(context.server.device), order[held:]
        self._heard = 0
        self._all: Tensor | None = None  # mean logits of all clients, and of those better than chance
        self._good: Tensor | None = None
        self._good_weight = torch.zeros((), dtype=context.layout.dtype, device=context.server.device)
        self._last: dict[str, float] = {}

    def receive_update(self, round: int, update: ClientUpdate) -> None:
        if not self.options.steps:
            return
        logits = self._proxy.outputs(update.row)
        if self._all is None or self._good is None:
            self._heard, self._all, self._good = 0, torch.zeros_like(logits), torch.zeros_like(logits)
            self._good_weight.zero_()
        self._heard += 1
        self._all.lerp_(logits, 1 / self._heard)
        if self.options.drop:
            right = (logits.argmax(1) == self._proxy.samples.y).to(logits.dtype).mean()
            good = (right > 1 / self.context.classes).to(logits.dtype)
            self._good_weight += good
            self._good += (logits - self._good) * good / self._good_weight.clamp_min(1)

    def teacher(self) -> Tensor | None:
        """Return the ensemble's probabilities for every server sample, or None without any client update."""
        if self._all is None or self._good is None:
            return None
        logits = torch.where(self._good_weight > 0, self._good, self._all)
        return F.softmax(logits / self.options.temperature, dim=1)

    def refine(self, round: int, server: Server[Any]) -> None:
        self._last = {}
        teacher = self.teacher()
        self._all = self._good = None
        if teacher is None:
            return
        for model_index, row in enumerate(server.models()):
            self.distill(round, model_index, row, teacher)

    def distill(self, round: int, model_index: int, row: Tensor, teacher: Tensor) -> None:
        """Distill the teacher into the model in `row`, in place."""
        options, proxy, held = self.options, self._proxy, self._held
        draw = self.context.rng_streams.numpy("feddf", round, model_index)
        optimizer, weights = Adam(), row[: self.context.layout.trainable]

        def look() -> float:
            return float(distillation_loss(teacher[held], proxy.outputs(row, held) / options.temperature))

        best = first = look() if len(held) else float("inf")
        kept, gained, step = weights.clone(), 0, 0
        batches = chain.from_iterable(proxy.batches(draw, options.batch_size, self._used) for _ in count())
        for step, index in enumerate(islice(batches, options.steps), start=1):
            self.context.server.progress("distillation", step - 1, options.steps)
            lr = options.lr * (1 + cos(pi * (step - 1) / options.steps)) / 2
            proxy.distill(row, index, teacher, optimizer, lr, options.temperature)
            if len(held) and (step % options.check_every == 0 or step == options.steps):
                if (now := look()) < best - GAIN:
                    best, gained = now, step
                    kept.copy_(weights)
                elif step - gained >= options.patience:
                    break
        self._last = {"steps": float(step)}
        if len(held):
            weights.copy_(kept)
            self._last |= {"divergence before": first, "divergence after": best}
        proxy.check(round, row, "feddf.lr")

    def diagnostics(self) -> dict[str, float]:
        return dict(self._last)
