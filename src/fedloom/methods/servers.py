"""Base classes of servers with one model and with several models.

A server with one model sends it to all clients. `next_model` computes the next model from the old one and the mean of
the client models. Without an update the model stays as it is.

A server with several models keeps K of them, equal at first. K is the number of clients per round. In every round the
i-th sampled client trains model i and returns v_i. `combine` computes the next K models from v_0, ..., v_{K-1}. If a
client fails, v_i is the old model i. The global model is the uniform mean, which is never trained.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.base import MethodContext, O, Server

MULTI_MODEL_DEFAULTS: Mapping[str, Any] = {"fedgen.alpha": 1.0, "fedgen.beta": 1.0}
"""Options of other methods for servers that do not average their models in every round.

With FedGen's own weights, 10, the models learn but drift so far apart that their mean is useless."""


class AveragingServer(Server[O]):
    """A server with one model; a subclass computes the next model from the mean of the client models.

    Override `aggregate` instead of `next_model` if the server needs the client models themselves.

    Example:
        class MomentumServer(AveragingServer[MomentumOptions]):
            def start(self) -> None:
                self.velocity = self.zeros()

            def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
                self.velocity.mul_(self.options.beta).add_(mean - old)
                return old + self.velocity
    """

    needs = "mean"
    _sees_updates = ("aggregate", "observe", "weight")

    def __init__(self, context: MethodContext, options: O) -> None:
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial
        super().__init__(context, options)

    def zeros(self) -> Tensor:
        """Return a vector of zeros, as long as the trainable parameters of a model."""
        return torch.zeros_like(self.context.initial[: self.context.layout.trainable])

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client_id, self.bank.rows[0]) for client_id in client_ids]

    def weight(self, update: ClientUpdate) -> float:
        """Choose the weight of a client in the mean.

        Args:
            update: The client's update.

        Returns:
            The weight: here the number of samples.
        """
        return update.num_examples

    def observe(self, round: int, update: ClientUpdate) -> None:
        """See one update before it joins the mean. Copy what `next_model` needs of it.

        Args:
            round: The round, from 0.
            update: A client's update, valid until the next one.
        """

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        """Compute the next model from the old one and the mean of the client models; here it is the mean.

        Args:
            round: The round, from 0.
            old: The trainable parameters of the model that the clients received. Do not change them.
            mean: The weighted mean of the clients' trainable parameters.

        Returns:
            The trainable parameters of the next model. Its buffers are the mean of the clients' buffers.
        """
        return mean

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        mean = WeightedMean(self.context.layout)
        for update in updates:
            self.observe(round, update)
            mean.add(update.row, self.weight(update))
        row, w, trainable = mean.result(), self.bank.rows[0], self.context.layout.trainable
        if row is not None:
            new = self.next_model(round, w[:trainable], row[:trainable])
            w[:trainable], w[trainable:] = new, row[trainable:]

    def global_model(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows


class MultiModelServer(Server[O]):
    """A server with K models; a subclass combines them after every round.

    K is the number of clients per round. All models are equal at first, and each client trains one of them. The global
    model is their uniform mean.

    Attributes:
        bank: The models, one per row of `bank.rows`.

    Example:
        class RotationServer(MultiModelServer[Options]):
            def combine(self, round: int, v: Tensor, w: Tensor) -> None:
                w.copy_(v.roll(1, 0))  # each model goes on to the next client
    """

    def __init__(self, context: MethodContext, options: O) -> None:
        self.bank = context.bank(context.clients_per_round)
        self.bank.rows[:] = context.initial
        self._uploaded = context.bank(context.clients_per_round)
        self._places = self._uploaded.rows.unbind()  # once, because each call on a GPU costs time
        self._absent: set[int] = set()
        super().__init__(context, options)

    @property
    def absent(self) -> set[int]:
        """Indices of the models that no client returned in this round."""
        return self._absent

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        model_indices = self._model_indices(round, len(client_ids))
        return [
            ClientTask(client_id, self.bank.rows[model_index], model_index, result_row=self._places[model_index])
            for model_index, client_id in zip(model_indices, client_ids, strict=True)
        ]

    def _model_indices(self, round: int, count: int) -> list[int]:
        """Return which models are sent: all of them, or a random choice if there are fewer clients."""
        if count >= len(self.bank):
            return list(range(len(self.bank)))[:count]
        draw = self.context.rng_streams.numpy("slots", round)
        return sorted(int(model_index) for model_index in draw.choice(len(self.bank), count, replace=False))

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        missing = set(range(len(self.bank)))
        for update in updates:
            place = self._places[update.model_index]
            if update.row is not place:
                place.copy_(update.row)
            missing.discard(update.model_index)
        if len(missing) == len(self.bank):
            return
        self._absent = missing
        for model_index in missing:
            self._places[model_index].copy_(self.bank.rows[model_index])
        self.combine(round, self._uploaded.rows, self.bank.rows)

    @abstractmethod
    def combine(self, round: int, v: Tensor, w: Tensor) -> None:
        """Compute the next models from the client models.

        Args:
            round: The round, from 0.
            v: The client models, one per row. If a client failed, its row is the old model. Do not change `v`.
            w: The models of the server, one per row. Write the next models into it.
        """

    def received_mean(self, v: Tensor) -> Tensor:
        """Return the uniform mean of the models that clients returned in this round.

        Args:
            v: The client models, one per row, as `combine` gets them.
        """
        return self.mean(row for model_index, row in enumerate(v) if model_index not in self.absent)

    def mean(self, rows: Iterable[Tensor]) -> Tensor:
        """Return the uniform mean of models.

        Args:
            rows: The models, for example `self.bank.rows`.
        """
        mean = WeightedMean(self.context.layout)
        for row in rows:
            mean.add(row)
        result = mean.result()
        return self.context.layout.empty(self.context.server.device) if result is None else result

    def global_model(self) -> Tensor:
        return self.mean(self.bank.rows)

    def models(self) -> Tensor:
        return self.bank.rows
