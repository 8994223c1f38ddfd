"""FedFomo: each client averages the models of other clients that help it.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021.

The server stores the last model v_i of each client i, and P, how much each client gained from each other one. It sends
client i its own model and the M - 1 others with the largest P_i. With probability epsilon, which falls from round to
round, a random model replaces one of these. On samples held out of its training the client computes

    u_n = (L(v_i) - L(w_n)) / ||w_n - v_i||_2
    v_i <- v_i + sum_n max(u_n, 0) / (sum of these) (w_n - v_i)

trains v_i, and sends it with u. The server adds u to P_i as it is, negative or not.

The weights sum to one, so v_i becomes the mean of the better models, weighted by u: exactly the other model if there is
one, and exactly v_i if there is none. Distances are over trainable parameters and Euclidean as in the paper (the
authors' code defaults to the L1 norm). A model that equals v_i has u = 0.

Not specified in the paper: only clients that have sent a model are candidates, so fewer than M models are sent in the
first rounds. The server sends a client its own model back, as one of the M, and clients have no state. The global model
is the uniform mean of the models that clients have sent; each client is evaluated with its own model.
"""

from collections.abc import Iterable, Iterator
from math import isfinite

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean, average_models
from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, ClientUpdate, Shapes
from fedloom.methods.base import Client, Options, Server
from fedloom.methods.registry import Method, register
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedFomoOptions(Options):
    M: int = Field(5, ge=1)
    """number of models that a client receives, including its own"""
    epsilon: float = Field(0.3, ge=0, le=1)
    """probability that one of the others is drawn at random, in the first round"""
    epsilon_decay: float = Field(0.05, ge=0)
    """decrease of this probability per round, down to 0"""
    validation: float = Field(0.2, gt=0, lt=1)
    """share of a client's samples held out to weight the models, if the run holds out none"""


class FedFomoServer(Server[FedFomoOptions]):
    """Server with a model for each client, and P."""

    needs_reason = "keeps a model for each client"

    def start(self) -> None:
        context = self.context
        self.bank = context.bank(context.num_clients)
        self.bank.rows[:] = context.initial
        self.P = torch.zeros(context.num_clients, context.num_clients, dtype=torch.float64)
        self.sent = torch.zeros(context.num_clients, dtype=torch.int64)
        self._others: dict[int, list[int]] = {}

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        v = self.bank.rows
        self._others = {i: self.choose(round, i) for i in client_ids}
        return [ClientTask(i, v[i], i, {f"w{n}": v[j] for n, j in enumerate(self._others[i])}) for i in client_ids]

    def choose(self, round: int, i: int) -> list[int]:
        """Choose the other clients whose models client i receives."""
        draw = self.context.rng_streams.numpy("fomo", round, i)
        epsilon = max(0.0, self.options.epsilon - self.options.epsilon_decay * round)
        sent, gains = self.sent.tolist(), self.P[i].tolist()
        left = [int(j) for j in draw.permutation(self.context.num_clients) if sent[j] and j != i]  # ties at random
        left.sort(key=lambda j: -gains[j])
        chosen: list[int] = []
        while left and len(chosen) < self.options.M - 1:
            chosen.append(left.pop(int(draw.integers(len(left))) if draw.random() < epsilon else 0))
        return chosen

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        # Collect all updates first: other clients still read the models of this round while the first updates arrive.
        for i, v_i, u in [(update.client_id, update.row.clone(), update.extras["u"].cpu()) for update in updates]:
            self.bank.rows[i] = v_i
            self.sent[i] = 1
            for j, gain in zip(self._others[i], u.tolist(), strict=False):
                self.P[i, j] += gain

    def global_model(self) -> Tensor:
        sent = [self.bank.rows[i] for i in self.sent.nonzero().flatten().tolist()]
        return average_models(self.context.layout, sent) if sent else self.context.initial.clone()

    def personal_model(self, client_id: int) -> Tensor | None:
        return self.bank.rows[client_id] if self.sent[client_id] else None

    def models(self) -> Tensor:
        return self.bank.rows


class FedFomoClient(Client[FedFomoOptions]):
    """Client that moves to the mean of the better models before it trains."""

    def validation_fraction(self) -> float:
        return self.options.validation

    def upload_shapes(self, layout: Layout) -> Shapes:
        return {"u": (self.options.M - 1,)}

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        v, w = trainer.received, list(trainer.extras.values())
        if w and trainer.num_examples:
            own, mixture = trainer.validate(v).loss, WeightedMean(trainer.layout)
            for n, w_n in enumerate(w):
                way = float(torch.linalg.vector_norm((w_n - v)[: trainer.layout.trainable]))
                u_n = (own - trainer.validate(w_n).loss) / way if way else 0.0
                trainer.uploads["u"][n] = u_n if isfinite(u_n) else 0.0
                mixture.add(w_n, max(float(trainer.uploads["u"][n]), 0.0))
            mixture.write_to(trainer.row)
        yield LocalSteps(self.training_step)


register(
    Method(
        name="fedfomo",
        summary="Each client averages the models of other clients that help it",
        reference="Zhang et al., ICLR 2021",
        options=FedFomoOptions,
        server=FedFomoServer,
        client=FedFomoClient,
        models_sent="K(M + 1)",
        server_state="N models",
        extra_compute="client tests M",
        new_client="A new client gets the global model, the mean of the models that the trained clients have sent.",
    )
)
