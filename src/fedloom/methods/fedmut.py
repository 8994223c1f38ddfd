"""FedMut: each client trains a mutant of the global model.

Mutants are shifted along the last global update.

Hu et al., "FedMut: Generalized Federated Learning via Stochastic Mutation", AAAI 2024. With delta = w_t - w_{t-1} and,
for each layer l separately, coefficients v_l that are pairs (1, a_t - 1) in random order,

    mutant j, layer l  =  w_t + alpha v_lj delta,        a_t = a0 (1 - min(t / T_a, 1))

The mean of the mutants is w_t, and lies ahead of it by alpha a_t / 2 delta in the first T_a rounds. With an odd number
of clients one client gets w_t itself. The server takes the uniform mean of the updates. In the first round delta is 0,
so all clients get the same model.

The defaults are those of the authors' repository; FedMR's repository has alpha 5 and T_a 100. Their code mutates every
state-dict entry as a separate layer, including batch norm's running variances, which may become negative. Here only
trainable parameters mutate, and a layer is a module (`granularity`).

Not specified in the paper: if clients fail, the returned mutants do not balance, and their mean is off by a multiple of
delta. The difference between the mean of all mutants and the mean of the trained ones is then added.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean, average_models
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.base import Options, Server
from fedloom.methods.fedmr import fedmr_layer_columns
from fedloom.methods.registry import register


class FedMutOptions(Options):
    alpha: float = Field(4.0, ge=0)
    """spread of the mutants, in global updates; 0 is FedAvg with uniform weights"""
    a0: float = Field(0.3, ge=0, le=1)
    """forward shift of the mutants in the first round"""
    T_a: int = Field(50, ge=0)
    """rounds until the forward shift is 0"""
    granularity: Literal["module", "tensor"] = "module"
    """unit of mutation: all parameters of a module, or each tensor"""


@register(
    "fedmut",
    reference="Hu et al., AAAI 2024",
    neutral={"alpha": 0.0},
    defaults={"fedavg.weighting": "uniform"},  # so that alpha=0 equals FedAvg
)
class FedMutServer(Server[FedMutOptions]):
    """Clients train mutants of the global model, shifted along its last update.

    Row 0 of the bank is the last model, row 1 the one before. `dispatch` makes the mutants.
    """

    needs = "mean"

    def start(self) -> None:
        context, options = self.context, self.options
        self.bank = context.bank(2)
        self.bank.rows[:] = context.initial
        self._mutants = context.bank(context.clients_per_round)
        self._count = 0  # mutants sent in this round
        trainable = context.layout.trainable
        units = [
            [c for c in unit if c.stop <= trainable]
            for unit in fedmr_layer_columns(context.layout, options.granularity)
        ]
        self._layers = [unit for unit in units if unit]

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        w, before = self.bank.rows
        mutants, draw = self._mutants.rows[: len(client_ids)], self.context.rng_streams.numpy("fedmut", round)
        self._count = len(client_ids)
        mutants[:] = w
        for unit in self._layers:
            v = torch.from_numpy(fedmut_coefficients(len(client_ids), self.a_t(round), draw)).to(mutants)
            if self.options.alpha:
                for columns in unit:
                    delta = w[columns] - before[columns]
                    mutants[:, columns] += self.options.alpha * v[:, None] * delta
        return [
            ClientTask(client_id, mutants[model_index], model_index) for model_index, client_id in enumerate(client_ids)
        ]

    def a_t(self, round: int) -> float:
        """Return a_t of this round."""
        over = min(round / self.options.T_a, 1.0) if self.options.T_a else 1.0
        return self.options.a0 * (1 - over)

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        w, before = self.bank.rows
        trained, sent = WeightedMean(self.context.layout), WeightedMean(self.context.layout)
        for update in updates:
            trained.add(update.row)
            sent.add(update.task.row)
        if not trained.weight:
            return
        before.copy_(w)
        trained.write_to(w)
        if trained.weight < self._count:
            balanced = average_models(self.context.layout, self._mutants.rows[: self._count])
            biased = torch.empty_like(balanced)
            sent.write_to(biased)
            w[: self.context.layout.trainable] += (balanced - biased)[: self.context.layout.trainable]

    def global_model(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows[:1]


def fedmut_coefficients(count: int, a_t: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return v of one layer for `count` mutants: shuffled pairs (1, a_t - 1); an odd last one is 0."""
    v = np.zeros(count)
    pairs = np.tile([1.0, a_t - 1.0], count // 2)
    v[: len(pairs)] = rng.permutation(pairs)
    return v
