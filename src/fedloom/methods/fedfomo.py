"""FedFomo: each client mixes the models of others that help it.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021.

The server keeps the model v_i that each client i sent last, and how much each client gained from each other one, P. It
sends client i its own model and the M - 1 others with the largest P_i; each of these is replaced by one at random with
probability epsilon, which falls from round to round. On samples held out of its training the client finds

    u_n = (L(v_i) - L(w_n)) / ||w_n - v_i||_2
    v_i <- v_i + sum_n max(u_n, 0) / (sum of these) (w_n - v_i)

trains v_i, and sends it with u, which is added to P_i as it is, negative or not.

The weights sum to one, so that v_i becomes the mean of the models that are better, weighted by u: exactly the other
model where there is one, and exactly v_i where there is none. Distances are over trainable parameters and Euclidean as
in the paper (the authors' code defaults to the L1 norm); a model that equals v_i has u = 0.

Where the paper is silent: only clients that have sent a model are candidates, so fewer than M models travel in the
first rounds. A client gets its own model back from the server, as one of the M, and keeps nothing. The deployed model
is the plain mean of the models that clients have sent; each client is scored with its own.
"""

from collections.abc import Iterable, Iterator
from math import isfinite

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, ClientUpdate, Shapes
from fedloom.methods.base import Client, MethodContext, Options, Server
from fedloom.methods.registry import Method, register
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedFomoOptions(Options):
    M: int = Field(5, ge=1)
    """models that a client receives, its own among them"""
    epsilon: float = Field(0.3, ge=0, le=1)
    """probability that one of the others is drawn at random, in the first round"""
    epsilon_decay: float = Field(0.05, ge=0)
    """by how much that falls from round to round, down to 0"""
    validation: float = Field(0.2, gt=0, lt=1)
    """share of a client's samples on which it weighs models, where the run's own validation is 0"""


class FedFomoServer(Server[FedFomoOptions]):
    """A model for each client, and who gained from whom."""

    kept = ("bank", "P", "sent")

    def __init__(self, context: MethodContext, options: FedFomoOptions) -> None:
        super().__init__(context, options)
        self.bank = context.bank(context.clients)
        self.bank.rows[:] = context.initial
        self.P = torch.zeros(context.clients, context.clients, dtype=torch.float64)
        self.sent = torch.zeros(context.clients, dtype=torch.int64)
        self._others: dict[int, list[int]] = {}

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        v = self.bank.rows
        self._others = {i: self.choose(round, i) for i in clients}
        return [ClientTask(i, v[i], i, {f"w{n}": v[j] for n, j in enumerate(self._others[i])}) for i in clients]

    def choose(self, round: int, i: int) -> list[int]:
        """The other clients whose models client i receives."""
        draw = self.context.streams.numpy("fomo", round, i)
        epsilon = max(0.0, self.options.epsilon - self.options.epsilon_decay * round)
        sent, gains = self.sent.tolist(), self.P[i].tolist()
        left = [int(j) for j in draw.permutation(self.context.clients) if sent[j] and j != i]  # ties are drawn
        left.sort(key=lambda j: -gains[j])
        chosen: list[int] = []
        while left and len(chosen) < self.options.M - 1:
            chosen.append(left.pop(int(draw.integers(len(left))) if draw.random() < epsilon else 0))
        return chosen

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        # Others still read the models of this round while the first answers come.
        for i, v_i, u in [(update.client, update.row.clone(), update.extras["u"].cpu()) for update in updates]:
            self.bank.rows[i] = v_i
            self.sent[i] = 1
            for j, gain in zip(self._others[i], u.tolist(), strict=False):
                self.P[i, j] += gain

    def deploy(self) -> Tensor:
        mean, row = WeightedMean(self.context.layout), self.context.initial.clone()
        for i in self.sent.nonzero().flatten().tolist():
            mean.add(self.bank.rows[i])
        mean.into(row)
        return row

    def own_model(self, client: int) -> Tensor | None:
        return self.bank.rows[client] if self.sent[client] else None

    def models(self) -> Tensor:
        return self.bank.rows


class FedFomoClient(Client[FedFomoOptions]):
    """Weigh the others, move to the better ones, train."""

    def holds_out(self) -> float:
        return self.options.validation

    def uploads(self, layout: Layout) -> Shapes:
        return {"u": (self.options.M - 1,)}

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        v, w = bench.received, list(bench.extras.values())
        if w and bench.samples:
            own, mixture = bench.validate(v).loss, WeightedMean(bench.layout)
            for n, w_n in enumerate(w):
                way = float(torch.linalg.vector_norm((w_n - v)[: bench.layout.trainable]))
                u_n = (own - bench.validate(w_n).loss) / way if way else 0.0
                bench.uploads["u"][n] = u_n if isfinite(u_n) else 0.0
                mixture.add(w_n, max(float(bench.uploads["u"][n]), 0.0))
            mixture.into(bench.row)
        yield LocalSteps(self.step)


register(
    Method(
        name="fedfomo",
        summary="each client mixes the models of others that help it",
        reference="Zhang et al., ICLR 2021",
        options=FedFomoOptions,
        server=FedFomoServer,
        local=FedFomoClient,
        models_sent="K(M + 1)",
        needs_each="keeps a model for each client",
        server_keeps="N models",
        extra_compute="client tests M",
    )
)
