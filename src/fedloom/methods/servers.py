"""Servers that keep several models, each travelling from client to client: what FedCross and FedMR have in common.

K models, equal at first, K the number of clients in a round. In every round model i goes to the i-th client drawn, in
random order, and comes back trained as v_i; a server then makes the next K models of v_0, ..., v_{K-1} (`combine`). A
model whose client is lost is its own v_i. The deployed model is the uniform mean, and never feeds back.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.base import MethodContext, O, Server

MULTI_MODEL_DEFAULTS: Mapping[str, Any] = {"fedgen.alpha": 1.0, "fedgen.beta": 1.0}
"""Options of other methods for models that are not made one in every round: with FedGen's own weights, 10, they learn
but drift so far apart that their mean is worth nothing."""


class MultiModelServer(Server[O]):
    """K models in K slots."""

    kept = ("bank",)

    def __init__(self, context: MethodContext, options: O) -> None:
        super().__init__(context, options)
        self.bank = context.bank(context.per_round)
        self.bank.rows[:] = context.initial
        self._uploaded = context.bank(context.per_round)
        self._places = self._uploaded.rows.unbind()  # once: behind a round on a GPU every call counts
        self.absent: set[int] = set()
        """Slots whose clients were lost or not asked in this round."""

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        slots = self._slots(round, len(clients))
        return [ClientTask(client, self.bank.rows[slot], slot) for slot, client in zip(slots, clients, strict=True)]

    def _slots(self, round: int, count: int) -> list[int]:
        """The models that travel: all of them, or as many as there are clients this time."""
        if count >= len(self.bank):
            return list(range(len(self.bank)))[:count]
        draw = self.context.streams.numpy("slots", round)
        return sorted(int(slot) for slot in draw.choice(len(self.bank), count, replace=False))

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        missing = set(range(len(self.bank)))
        for update in updates:
            self._places[update.slot].copy_(update.row)
            missing.discard(update.slot)
        if len(missing) == len(self.bank):
            return
        self.absent = missing
        for slot in missing:
            self._places[slot].copy_(self.bank.rows[slot])
        self.combine(round, self._uploaded.rows, self.bank.rows)

    @abstractmethod
    def combine(self, round: int, v: Tensor, w: Tensor) -> None:
        """Write the next models into the rows of `w`, from the uploaded `v`, which is not changed."""

    def mean(self, rows: Tensor) -> Tensor:
        """The uniform mean of models."""
        mean, result = WeightedMean(self.context.layout), self.context.layout.empty(self.context.device)
        for row in rows:
            mean.add(row)
        mean.into(result)
        return result

    def deploy(self) -> Tensor:
        return self.mean(self.bank.rows)

    def models(self) -> Tensor:
        return self.bank.rows


class SingleModelServer(Server[O]):
    """A server with one model, as FedAvg has; how answers are taken in is left open."""

    kept = ("bank",)

    def __init__(self, context: MethodContext, options: O) -> None:
        super().__init__(context, options)
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client, self.bank.rows[0]) for client in clients]

    def deploy(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows
