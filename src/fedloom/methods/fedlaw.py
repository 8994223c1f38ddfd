"""FedLAW: the weights of the mean, and a factor that shrinks it, are learned on labelled data of the server.

Li et al., "Revisiting Weighted Aggregation in Federated Learning with Neural Networks", ICML 2023:

    w <- gamma sum_k lambda_k w_k,   lambda on the simplex, gamma > 0.

The loss on the server's data is followed back through the merged model to lambda = softmax(u) and gamma = exp(s), from
u = log p_k (p_k the client's share of samples) and s = 0, which is FedAvg; `form=quad` has lambda ~ u^2 and
gamma = s^2 instead. Adam and its numbers are those of the authors' code.

gamma scales trainable parameters only: batch norm's statistics get the mean by lambda. The authors' code lets batch
norm adapt to the server's data while it learns; here it uses that mean, so that what is learned is what is deployed.
Their proxy data are a part of the test set; ours are not (`--server-data`). `shrink=false` leaves gamma at 1.

`swa` is their variant in two stages: half of the epochs learn lambda, from the mean of u at the ends of all epochs but
the first few (stochastic weight averaging), and the other half learn gamma for that lambda. Their rate climbs a little
while u is averaged; ours stays.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.tasks import ClientUpdate
from fedloom.methods._support.distillation import DistillationData
from fedloom.methods.base import MethodContext, Options
from fedloom.methods.registry import Method, register
from fedloom.methods.servers import SingleModelServer
from fedloom.training.optimizers import Adam


class FedLAWOptions(Options):
    epochs: int = Field(20, ge=0)
    """passes over the server's data, in each round; 0 is FedAvg"""
    batch_size: int = Field(128, ge=0)
    """samples in a batch; 0 takes all"""
    lr: float = Field(0.01, ge=0)
    """learning rate of Adam, on u and s"""
    halve_every: int = Field(20, ge=1)
    """epochs after which that rate is halved, again and again"""
    form: Literal["exp", "quad"] = "exp"
    """what keeps lambda and gamma positive: softmax and exp, or squares"""
    shrink: bool = True
    """learn gamma; otherwise it is 1 and only the weights are learned"""
    swa: bool = False
    """learn the weights in the first half of the epochs, as a mean over epochs, and gamma in the second half"""
    swa_start: int = Field(6, ge=0)
    """with swa: epochs before the first that counts in that mean; where none is left, the last counts alone"""


class FedLAWServer(SingleModelServer[FedLAWOptions]):
    """One model, merged as the server's data ask for."""

    def __init__(self, context: MethodContext, options: FedLAWOptions) -> None:
        super().__init__(context, options)
        self._proxy = DistillationData(context, "fedlaw", classifies=False)
        self._last: dict[str, float] = {}

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._last = {}
        layout, w = self.context.layout, self.bank.rows[0]
        answers = [(u.client, u.samples, u.row.clone()) for u in updates if u.samples]
        if not answers:
            return
        if self.options.epochs:
            answers.sort(key=lambda answer: answer[0])  # so that rounding does not depend on who came first
        samples, rows = [n for _, n, _ in answers], torch.stack([row for *_, row in answers])
        del answers  # there is memory for all models once, not twice
        weights, gamma = self.learn(round, rows, samples) if self.options.epochs else (samples, 1.0)
        mean = WeightedMean(layout)
        for row, weight in zip(rows, weights, strict=True):
            mean.add(row, weight)
        mean.into(w)
        if self.options.epochs:
            w[: layout.trainable] *= gamma
            self._last = {"shrink factor": gamma, "largest weight": max(weights)}
        self._proxy.check(round, w, "fedlaw.lr")

    def merge(self, learned: Tensor) -> tuple[Tensor, Tensor]:
        """lambda and gamma of what is learned, (u, s)."""
        u, s = learned[:-1], learned[-1]
        if self.options.form == "quad":
            return u.square() / u.square().sum(), s.square()
        return F.softmax(u, dim=0), s.exp()

    def learn(self, round: int, rows: Tensor, samples: list[int]) -> tuple[list[float], float]:
        """The weights of these models, and the factor on their mean."""
        options, draw = self.options, self.context.streams.numpy("fedlaw", round)
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
        """Learn a part of (u, s), in place, with one pass over the server's data at each rate; stops after each."""
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


register(
    Method(
        name="fedlaw",
        summary="learn the weights of the mean, and a factor on it, on the server's labelled samples",
        reference="Li et al., ICML 2023",
        options=FedLAWOptions,
        server=FedLAWServer,
        neutral={"epochs": 0},
        models_sent="2K",
        needs_each="learns a weight for each client's model",
        extra_compute="server learns",
        server_data="labels",
        rescales=True,
    )
)
