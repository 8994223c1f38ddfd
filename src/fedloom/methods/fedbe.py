"""FedBE: distill a Bayesian ensemble of client models into their mean.

Chen and Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021. The server fits a
distribution to the client models of a round and draws S models from it:

    gaussian    N(mean_k w_k, diag var_k w_k), the paper's;
    normalized  the authors' code: for each tensor the mean and variance of the updates Delta_k / ||Delta_k||, a draw
                mean + 0.1 sqrt(var) xi, times the mean of ||Delta_k||, added to the model that was sent;
    dirichlet   sum_k gamma_k n_k w_k / sum_k gamma_k n_k, gamma ~ Dirichlet(alpha).

Teachers are the mean, the drawn models and the client models. Their mean probabilities on the server's unlabeled data,
sharpened to p^(1/T), teach the mean by KL with SGD. The new model is the mean of snapshots of the student (SWA).

Not specified in the paper: weights are over the clients that returned an update. If there are too few steps for a
snapshot, the last student is taken. A zero update stays zero when it is normalized. Teachers' outputs are computed once
per round. A drawn model differs in trainable parameters only and has the mean batch-norm statistics, because a drawn
variance may be negative. Dirichlet's models are means, so their statistics are means too. On a server with several
models "the mean" is the global model, and each of the models learns.
"""

from itertools import chain
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean, average_models
from fedloom.core.layout import TensorKind
from fedloom.core.tasks import ClientUpdate
from fedloom.methods._support.distillation import DistillationData
from fedloom.methods.base import Options, Refiner, Server
from fedloom.methods.registry import register
from fedloom.training.optimizers import SGD


class FedBEOptions(Options):
    distribution: Literal["gaussian", "normalized", "dirichlet"] = "gaussian"
    """distribution to draw models from: gaussian (the paper), normalized (its code's Gaussian), or dirichlet"""
    samples: int = Field(10, ge=0)
    """number of models to draw (S)"""
    alpha: float = Field(1.0, gt=0)
    """concentration of dirichlet; if small, few clients make up a drawn model"""
    scale: float = Field(0.1, ge=0)
    """factor on the standard deviation of normalized"""
    sharpen: float = Field(0.5, gt=0)
    """temperature T: the ensemble's probabilities are raised to the power 1 / T"""
    epochs: int = Field(20, ge=0)
    """epochs of the distillation on the server's data, in each round; 0 is FedAvg"""
    batch_size: int = Field(128, ge=0)
    """samples in a batch; 0 takes all"""
    lr: float = Field(0.001, ge=0)
    """learning rate of the distillation"""
    momentum: float = Field(0.9, ge=0, lt=1)
    """momentum of the distillation"""
    weight_decay: float = Field(1e-5, ge=0)
    """weight decay of the distillation"""
    swa_start: int = Field(500, ge=0)
    """steps before the first snapshot of the student"""
    swa_every: int = Field(25, ge=1)
    """steps between two snapshots"""


@register(
    "fedbe",
    reference="Chen and Chao, ICLR 2021",
    neutral={"epochs": 0},
    extra_compute="server distills",
    server_data="inputs",
)
class FedBERefiner(Refiner[FedBEOptions]):
    """Distill an ensemble drawn around the client models into their mean, on the server's unlabeled samples."""

    needs_reason = "draws teachers from the spread of the clients' models"

    def start(self) -> None:
        self._proxy = DistillationData(self.context, "fedbe")
        self._answers: list[tuple[tuple[int, int], int, Tensor, Tensor]] = []

    def receive_update(self, round: int, update: ClientUpdate) -> None:
        if self.options.epochs:
            sent = update.task.row.clone() if self.options.distribution == "normalized" else update.row[:0]
            self._answers.append(
                ((update.client_id, update.model_index), update.num_examples, update.row.clone(), sent)
            )

    def refine(self, round: int, server: Server[Any]) -> None:
        updates, self._answers = sorted(self._answers, key=lambda update: update[0]), []
        if not updates:
            return
        samples, rows = [n for _, n, _, _ in updates], torch.stack([row for _, _, row, _ in updates])
        sent = torch.stack([row for _, _, _, row in updates])
        del updates  # memory holds all models once, not twice
        teachers = [server.global_model(), *rows]
        drawn = (self.draw(round, s, rows, sent, samples) for s in range(self.options.samples))
        teacher = torch.zeros_like(self._proxy.outputs(rows[0]))
        for number, row in enumerate(chain(teachers, drawn), start=1):
            teacher.lerp_(F.softmax(self._proxy.outputs(row), dim=1), 1 / number)
        teacher = F.normalize(teacher ** (1 / self.options.sharpen), p=1.0, dim=1)
        for model_index, row in enumerate(server.models()):
            self.distill(round, model_index, row, teacher)

    def draw(self, round: int, s: int, rows: Tensor, sent: Tensor, samples: list[int]) -> Tensor:
        """Draw model number `s` from the distribution over `rows`, which were trained from `sent`."""
        options, context, layout = self.options, self.context, self.context.layout
        shares = context.rng_streams.numpy("fedbe dirichlet", round, s).dirichlet([options.alpha] * len(rows))
        if options.distribution == "dirichlet":
            return average_models(layout, rows, [float(share) * n for share, n in zip(shares, samples, strict=True)])
        made = average_models(layout, rows)
        noise = context.rng_streams.pytorch("fedbe gaussian", round, s, context.server.device)
        xi = torch.randn(layout.trainable, generator=noise, dtype=layout.dtype, device=context.server.device)
        weights, w = made[: layout.trainable], rows[:, : layout.trainable]
        if options.distribution == "gaussian":
            weights.addcmul_(w.std(dim=0, correction=0), xi)
            return made
        deltas = w - sent[:, : layout.trainable]
        for entry in layout.entries:
            if entry.kind is TensorKind.PARAMETER:
                at = entry.columns
                norms = torch.linalg.vector_norm(deltas[:, at], dim=1, keepdim=True)
                units = deltas[:, at] / torch.where(norms > 0, norms, 1)
                step = units.mean(0) + options.scale * units.std(dim=0, correction=0) * xi[at]
                weights[at] = sent[:, at].mean(0) + norms.mean() * step
        return made

    def distill(self, round: int, model_index: int, row: Tensor, teacher: Tensor) -> None:
        """Distill into the model in `row`, in place; it becomes the mean of the snapshots."""
        options, context = self.options, self.context
        draw = context.rng_streams.numpy("fedbe", round, model_index)
        optimizer = SGD(options.momentum, weight_decay=options.weight_decay)
        students, step = WeightedMean(context.layout), 0
        for _ in range(options.epochs):
            for index in self._proxy.batches(draw, options.batch_size):
                self._proxy.distill(row, index, teacher, optimizer, options.lr)
                step += 1
                if step > options.swa_start and (step - options.swa_start) % options.swa_every == 0:
                    students.add(row)
        students.write_to(row)
        self._proxy.check(round, row, "fedbe.lr")
