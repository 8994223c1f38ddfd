"""FedLAW: learn the weights of the mean, and its scale, on labeled server data.

Li et al., "Revisiting Weighted Aggregation in Federated Learning with Neural Networks", ICML 2023:

    w <- gamma sum_k lambda_k w_k,   lambda on the simplex, gamma > 0.

The server computes the loss of the merged model on its own data. The gradient reaches lambda = softmax(u) and
gamma = exp(s). They start at u = log p_k (p_k is the client's share of samples) and s = 0, which is FedAvg. With
`form=quad`, lambda ~ u^2 and gamma = s^2. The optimizer is Adam with the settings of the authors' code.

gamma scales trainable parameters only; batch norm's statistics are averaged with lambda. In the authors' code, batch
norm adapts to the server's data during this training. Here it uses the averaged statistics, as the global model does.
Their proxy data are a part of the test set; here they are not (`--server-data`). `shrink=false` keeps gamma at 1.

`swa` is their variant in two stages. The first half of the epochs learns lambda from the mean of u at the ends of all
epochs except the first few (stochastic weight averaging). The second half learns gamma for this lambda. In their code
the learning rate rises a little while u is averaged; here it does not.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import average_models
from fedloom.core.tasks import ClientUpdate
from fedloom.methods._support.distillation import DistillationData
from fedloom.methods.base import Options
from fedloom.methods.registry import register
from fedloom.methods.servers import AveragingServer
from fedloom.training.optimizers import Adam


class FedLAWOptions(Options):
    epochs: int = Field(20, ge=0)
    """passes over the server's data in each round; 0 is FedAvg"""
    batch_size: int = Field(128, ge=0)
    """samples in a batch; 0 takes all"""
    lr: float = Field(0.01, ge=0)
    """learning rate of Adam for u and s"""
    halve_every: int = Field(20, ge=1)
    """epochs after which the learning rate is halved, repeatedly"""
    form: Literal["exp", "quad"] = "exp"
    """how lambda and gamma stay positive: softmax and exp (exp), or squares (quad)"""
    shrink: bool = True
    """learn gamma; otherwise gamma is 1 and only the weights are learned"""
    swa: bool = False
    """learn the weights in the first half of the epochs, averaged over epochs, and gamma in the second half"""
    swa_start: int = Field(6, ge=0)
    """with swa: number of first epochs left out of that average; if none remains, only the last epoch counts"""


@register(
    "fedlaw",
    reference="Li et al., ICML 2023",
    neutral={"epochs": 0},
    extra_compute="server learns",
    server_data="labels",
    rescales=True,
)
class FedLAWServer(AveragingServer[FedLAWOptions]):
    """Learn the weights of the mean, and a factor on it, on the server's labeled samples."""

    needs_reason = "learns a weight for each client's model"

    def start(self) -> None:
        self._proxy = DistillationData(self.context, "fedlaw", needs_classes=False)
        self._last: dict[str, float] = {}

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._last = {}
        layout, w = self.context.layout, self.bank.rows[0]
        received = [(u.client_id, u.num_examples, u.row.clone()) for u in updates if u.num_examples]
        if not received:
            return
        if self.options.epochs:
            received.sort(key=lambda update: update[0])  # so that rounding does not depend on the order of arrival
        samples, rows = [n for _, n, _ in received], torch.stack([row for *_, row in received])
        del received  # memory holds all models once, not twice
        weights, gamma = self.learn(round, rows, samples) if self.options.epochs else (samples, 1.0)
        w.copy_(average_models(layout, rows, weights))
        if self.options.epochs:
            w[: layout.trainable] *= gamma
            self._last = {"shrink factor": gamma, "largest weight": max(weights)}
        self._proxy.check(round, w, "fedlaw.lr")

    def merge(self, learned: Tensor) -> tuple[Tensor, Tensor]:
        """Return lambda and gamma for the learned vector (u, s)."""
        u, s = learned[:-1], learned[-1]
        if self.options.form == "quad":
            return u.square() / u.square().sum(), s.square()
        return F.softmax(u, dim=0), s.exp()

    def learn(self, round: int, rows: Tensor, samples: list[int]) -> tuple[list[float], float]:
        """Learn the weights of these models and the factor on their mean."""
        options, draw = self.options, self.context.rng_streams.numpy("fedlaw", round)
        p = torch.tensor(samples, dtype=rows.dtype, device=rows.device)
        p /= p.sum()
        start, one = (p.sqrt(), p.new_ones(1)) if options.form == "quad" else (p.log(), p.new_zeros(1))
        learned, u, s = torch.cat([start, one]), slice(0, len(p)), slice(len(p), len(p) + 1)
        rates = [options.lr * 0.5 ** (epoch // options.halve_every) for epoch in range(options.epochs)]
        if not options.swa:
            for _ in self.descend(rows, learned, slice(u.start, s.stop if options.shrink else u.stop), rates, draw):
                pass
        else:
            first = (len(rates) + 1) // 2 if options.shrink else len(rates)
            ends = [learned[u].clone() for _ in self.descend(rows, learned, u, rates[:first], draw)]
            learned[u] = torch.stack(ends[options.swa_start :] or ends[-1:]).mean(0)
            for _ in self.descend(rows, learned, s, rates[: len(rates) - first], draw):
                pass
        weights, gamma = self.merge(learned)
        return [float(weight) for weight in weights.cpu()], float(gamma)

    def descend(
        self, rows: Tensor, learned: Tensor, moves: slice, rates: Iterable[float], draw: np.random.Generator
    ) -> Iterator[None]:
        """Learn a part of (u, s) in place, with one pass over the data per learning rate; yield after each."""
        proxy, layout, optimizer = self._proxy, self.context.layout, Adam(betas=(0.5, 0.999))
        trainable, floats, merged = layout.trainable, layout.floats, rows[0].clone()
        for lr in rates:
            for index in proxy.batches(draw, self.options.batch_size):
                z = learned.detach().requires_grad_()
                weights, gamma = self.merge(z)
                torch.mv(rows[:, trainable:floats].t(), weights.detach(), out=merged[trainable:floats])
                output = proxy.network(gamma * (weights @ rows[:, :trainable]), proxy.inputs(index), merged)
                loss = self.context.criterion(output, proxy.samples.y.index_select(0, index))
                (gradient,) = torch.autograd.grad(loss, z)
                optimizer.step(learned[moves], gradient[moves], lr)
            yield

    def diagnostics(self) -> dict[str, float]:
        return dict(self._last)
