"""FedMut: each client trains a mutant of the global model, spread along the last global update.

Hu et al., "FedMut: Generalized Federated Learning via Stochastic Mutation", AAAI 2024. With delta = w_t - w_{t-1} and,
for each layer l on its own, coefficients v_l that are pairs (1, a_t - 1) in random order,

    mutant j, layer l  =  w_t + alpha v_lj delta,        a_t = a0 (1 - min(t / T_a, 1))

so that the mean of the mutants is w_t, and lies ahead of it by alpha a_t / 2 delta in the first T_a rounds. With an odd
number of clients one gets w_t itself. The server takes the uniform mean of what comes back. In the first round delta is
0, and all get the same model.

Values are those of the authors' repository; FedMR's has alpha 5 and T_a 100. Their code mutates every entry of the
state dict as a layer of its own, batch norm's running variances included, which may so turn negative. Here only
trainable parameters mutate, and a layer is a module (`granularity`).

Where the paper is silent: if clients are lost, the mutants that came back do not balance, and their mean lies off by a
multiple of delta. The difference between the mean of all mutants and that of those which were trained is then added.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.base import MethodContext, Options, Server
from fedloom.methods.fedmr import fedmr_layer_columns
from fedloom.methods.registry import Method, register


class FedMutOptions(Options):
    alpha: float = Field(4.0, ge=0)
    """how far mutants are spread, in global updates; 0 is FedAvg with uniform weights"""
    a0: float = Field(0.3, ge=0, le=1)
    """how much the mutants of the first rounds lean forward"""
    T_a: int = Field(50, ge=0)
    """rounds until they no longer do"""
    granularity: Literal["module", "tensor"] = "module"
    """what mutates as one: all parameters of a module, or each tensor"""


class FedMutServer(Server[FedMutOptions]):
    """The last two models in rows 0 (the newer) and 1; mutants are made when they are sent."""

    kept = ("bank",)

    def __init__(self, context: MethodContext, options: FedMutOptions) -> None:
        super().__init__(context, options)
        self.bank = context.bank(2)
        self.bank.rows[:] = context.initial
        self._mutants = context.bank(context.per_round)
        self._count = 0  # of mutants that were sent in this round
        trainable = context.layout.trainable
        units = [
            [c for c in unit if c.stop <= trainable]
            for unit in fedmr_layer_columns(context.layout, options.granularity)
        ]
        self._layers = [unit for unit in units if unit]

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        w, before = self.bank.rows
        mutants, draw = self._mutants.rows[: len(clients)], self.context.streams.numpy("fedmut", round)
        self._count = len(clients)
        mutants[:] = w
        for unit in self._layers:
            v = torch.from_numpy(fedmut_coefficients(len(clients), self.lean(round), draw)).to(mutants)
            if self.options.alpha:
                for columns in unit:
                    delta = w[columns] - before[columns]
                    mutants[:, columns] += self.options.alpha * v[:, None] * delta
        return [ClientTask(client, mutants[slot], slot) for slot, client in enumerate(clients)]

    def lean(self, round: int) -> float:
        """a_t."""
        over = min(round / self.options.T_a, 1.0) if self.options.T_a else 1.0
        return self.options.a0 * (1 - over)

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        w, before = self.bank.rows
        trained, sent, everyone = (WeightedMean(self.context.layout) for _ in range(3))
        for update in updates:
            trained.add(update.row)
            sent.add(update.job.row)
        if not trained.weight:
            return
        before.copy_(w)
        trained.into(w)
        if trained.weight < self._count:
            for mutant in self._mutants.rows[: self._count]:
                everyone.add(mutant)
            balanced, biased = self.context.layout.empty(w.device), self.context.layout.empty(w.device)
            everyone.into(balanced)
            sent.into(biased)
            w[: self.context.layout.trainable] += (balanced - biased)[: self.context.layout.trainable]

    def deploy(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows[:1]


def fedmut_coefficients(count: int, lean: float, draw: np.random.Generator) -> NDArray[np.float64]:
    """v of one layer for `count` mutants: pairs (1, lean - 1), shuffled; the last of an odd number is 0."""
    v = np.zeros(count)
    pairs = np.tile([1.0, lean - 1.0], count // 2)
    v[: len(pairs)] = draw.permutation(pairs)
    return v


register(
    Method(
        name="fedmut",
        summary="clients train mutants of the global model, spread along its last update",
        reference="Hu et al., AAAI 2024",
        options=FedMutOptions,
        server=FedMutServer,
        defaults={"fedavg.weighting": "uniform"},  # what its neutral setting is compared with
        neutral={"alpha": 0.0},
        models_sent="2K",
        needs_each="",
        server_keeps="2 models",
    )
)
