"""FedCDA: the server caches the last models of each client and picks, across rounds, those that diverge least.

Wang et al., "FedCDA: Federated Learning with Cross-round Divergence-aware Aggregation", ICLR 2024. For every client n
the last K models w^n with their losses F_n (mean training loss of the last local epoch) are cached. After a round one
model is chosen for each participant, so that over all clients seen

    J = (1/m) sum F_n(w^n) + (L/2m) sum ||w^n - w||^2,    w = mean of the chosen models         (Eq. 5 = Eq. 6)

is small; the others keep the model chosen for them last. The global model is the uniform mean of all chosen models.
`approximate` (Eq. 8) chooses batch by batch: participants are shuffled into B near-equal batches, and for one batch
all combinations are tried with the batches before it fixed and those after it left out; where a batch would have more
than a million, there are more batches. `optimal` is B = 1, and is refused with more than a million. `newest` takes each
client's last model, `random` any.

Where the paper is silent. Clients never seen are left out of the mean and of J. During warm-up the model is FedAvg's
over the participants (`warmup_mode=newest`: the mean of all clients' newest models, as in code that is probably the
authors'), and everyone's newest model is chosen. With fewer than K models those there are; one whose loss is not finite
only where no other is. Equal choices go to the newest. Norms are over trainable parameters; buffers of the chosen
models are averaged with them.

The search never touches a model: it needs the inner products of the candidates and nothing else (selection.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.bank import RowStore
from fedloom.core.similarity import inner_products
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.errors import InputError
from fedloom.methods._support.model_selection import MOST, SelectedModelSums, enumerate_model_selections, largest_batch
from fedloom.methods.base import MethodContext, Options, Server
from fedloom.methods.registry import Method, register


class FedCDAOptions(Options):
    K: int = Field(3, ge=1)
    """models cached for each client"""
    B: int = Field(3, ge=1)
    """batches of the approximate selection; more, where a batch would have more than a million combinations"""
    L: float = Field(1.0, ge=0)
    """weight of the divergence against the losses (the smoothness constant of the paper)"""
    selection: Literal["approximate", "optimal", "newest", "random"] = "approximate"
    """which cached models are averaged"""
    warmup: int = Field(50, ge=0)
    """rounds before the selection begins"""
    warmup_mode: Literal["fedavg", "newest"] = "fedavg"
    """the model during warm-up: FedAvg's, or the mean of all newest models"""


class FedCDAServer(Server[FedCDAOptions]):
    """One global model, and a cache of the clients' last ones."""

    kept = ("bank", "total")

    def __init__(self, context: MethodContext, options: FedCDAOptions) -> None:
        super().__init__(context, options)
        self._refuse_too_many_combinations()
        layout = context.layout
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial
        device = self.bank.rows.device
        self.store = RowStore(layout.size, layout.dtype, context.cache_dir, context.keep_checkpoints, device)
        self.cache: dict[int, list[tuple[int, float]]] = {}
        """For each client seen (number of the row, loss), oldest first."""
        self.chosen: dict[int, int] = {}
        """For each client seen the number of the row that stands for it."""
        self.total = torch.zeros(layout.floats, dtype=torch.float64, device=device)
        """Sum of the chosen rows: so a round reads the models of its participants and no others."""
        self._last: dict[str, float] = {}

    def _refuse_too_many_combinations(self) -> None:
        asked, models = self.context.per_round, min(self.options.K, self.context.rounds)
        if self.options.selection == "optimal" and self._selects() and asked > (largest := self._largest_batch()):
            raise InputError(
                f"fedcda.selection=optimal would try up to {models}^{asked} combinations of cached models, and "
                f"{MOST:,} is the most; ask at most {largest} clients in a round, or use fedcda.selection=approximate."
            )

    def _selects(self) -> bool:
        """Whether a round of this run ever tries combinations."""
        return self._largest_batch() > 0 and self.context.rounds > self.options.warmup

    def _largest_batch(self) -> int:
        """How many clients may be chosen for at once; 0 where there is nothing to choose from."""
        models = min(self.options.K, self.context.rounds)
        return 0 if models == 1 else largest_batch(models)

    def _batches(self, participants: int) -> int:
        """The number of batches that participants are chosen for one after the other."""
        if self.options.selection == "optimal":
            return 1
        largest = self._largest_batch() or participants
        return max(min(self.options.B, participants), -(-participants // largest))

    def notes(self) -> list[str]:
        warmup, rounds, asked = self.options.warmup, self.context.rounds, self.context.per_round
        if rounds <= warmup:
            return [f"fedcda selects after its warm-up of {warmup} rounds (fedcda.warmup), and this run has {rounds}."]
        if self.options.selection == "approximate" and (batches := self._batches(asked)) > self.options.B:
            return [
                f"fedcda selects for {asked} clients in {batches} batches instead of {self.options.B} (fedcda.B), or a "
                f"batch would have more than {MOST:,} combinations."
            ]
        return []

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client, self.bank.rows[0]) for client in clients]

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._last = {}
        participants: list[int] = []
        fedavg = WeightedMean(self.context.layout)
        for update in updates:
            if update.client not in participants:
                participants.append(update.client)
                self._leave(update.client)
            self._cache(update)
            fedavg.add(update.row, update.samples)
        if not participants:
            return
        warm = round < self.options.warmup
        picks = self._newest(participants) if warm else self.choose(round, participants)
        w = self.bank.rows[0]
        fixed = self._fixed_mean(w)
        mean = WeightedMean(self.context.layout)
        for client in participants:
            number = self.cache[client][picks[client]][0]
            row = self.store.read(number)
            self.chosen[client] = number
            self.total += row[: self.context.layout.floats]
            mean.add(row)
        if fixed is not None:
            mean.add(fixed, len(self.chosen) - len(participants))
        (fedavg if warm and self.options.warmup_mode == "fedavg" else mean).into(w)
        for client in participants:
            self._evict(client)
        older = sum(picks[client] < len(self.cache[client]) - 1 for client in participants)
        self._last["older models chosen"] = older / len(participants)

    # the cache

    def _leave(self, client: int) -> None:
        """Take a participant's model out of the sum: another may be chosen for it."""
        if client in self.chosen:
            self.total -= self.store.read(self.chosen.pop(client))[: self.context.layout.floats]

    def _cache(self, update: ClientUpdate) -> None:
        self.cache.setdefault(update.client, []).append((self.store.put(update.row), update.loss))
        self._evict(update.client)

    def _evict(self, client: int) -> None:
        """Keep the last K models."""
        models = self.cache[client]
        while len(models) > self.options.K:
            self.store.drop(models.pop(0)[0])

    def _fixed_mean(self, like: Tensor) -> Tensor | None:
        """The mean of the models chosen for all who did not take part, with the integers of the global model."""
        if not self.chosen:
            return None
        row, floats = like.clone(), self.context.layout.floats
        row[:floats] = self.total / len(self.chosen)
        return row

    # the selection

    def _newest(self, participants: list[int]) -> dict[int, int]:
        return {client: len(self.cache[client]) - 1 for client in participants}

    def choose(self, round: int, participants: list[int]) -> dict[int, int]:
        """Which of its cached models stands for each participant."""
        if self.options.selection == "newest":
            return self._newest(participants)
        draw = self.context.streams.numpy("fedcda", round)
        if self.options.selection == "random":
            return {client: int(draw.integers(len(self.cache[client]))) for client in participants}
        order = [participants[i] for i in draw.permutation(len(participants))]
        products = _CandidateInnerProducts(self, order)
        picks: dict[int, int] = {}
        for batch in np.array_split(np.array(order), self._batches(len(order))):
            clients = [int(client) for client in batch]
            picks.update(zip(clients, products.choose(clients, self.options.L), strict=True))
        self._last["spread of a client's models"] = products.spread()
        return picks

    def deploy(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows

    def diagnostics(self) -> dict[str, float]:
        return dict(self._last)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "store": self.store.state(), "cache": self.cache, "chosen": self.chosen}

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.store.load(state["store"])
        self.cache = {client: [(number, loss) for number, loss in models] for client, models in state["cache"].items()}
        self.chosen = dict(state["chosen"])


class _CandidateInnerProducts:
    """The inner products of all candidates of a round, about the global model, taken in one pass over them.

    Clients whose choice is fixed enter through their sum alone; as batches are decided, their choices join that sum.
    """

    def __init__(self, server: FedCDAServer, participants: list[int]) -> None:
        trainable = slice(0, server.context.layout.trainable)
        reference = server.bank.rows[0]
        models = [_candidates(server.cache[client]) for client in participants]
        numbers = [number for each in models for _, number, _ in each]
        # One by one into their place: of rows in a file no second copy is ever held.
        rows = torch.empty(len(numbers), trainable.stop, dtype=server.store.dtype, device=reference.device)
        for row, number in zip(rows, numbers, strict=True):
            row.copy_(server.store.read(number)[trainable])
        count = len(server.chosen)
        fixed = server.total[trainable] - count * reference[trainable].double()
        gram = inner_products(rows, reference, trainable, last=fixed).cpu().numpy()
        self.gram, self.with_fixed = gram[:-1, :-1], gram[:-1, -1].copy()
        self.fixed = SelectedModelSums(count)
        ends = np.cumsum([0, *(len(each) for each in models)])
        self.places = {c: np.arange(ends[i], ends[i + 1]) for i, c in enumerate(participants)}
        self.losses = {c: np.array([f for *_, f in each]) for c, each in zip(participants, models, strict=True)}
        self.cached = {c: [at for at, *_ in each] for c, each in zip(participants, models, strict=True)}

    def spread(self) -> float:
        """How far a client's models lie apart, against how far they lie from the global model; 0 leaves no choice.

        Their variance over their mean squared distance to it, a mean over clients that have several.
        """
        grams = [self.gram[np.ix_(places, places)] for places in self.places.values() if len(places) > 1]
        shares = [1 - gram.mean() / gram.diagonal().mean() for gram in grams if gram.diagonal().any()]
        return float(np.mean(shares)) if shares else 0.0

    def choose(self, batch: list[int], L: float) -> list[int]:
        """The best choice for these clients, by places in their caches; afterwards they are fixed."""
        places = np.concatenate([self.places[client] for client in batch])
        losses = [self.losses[client] for client in batch]
        picks = enumerate_model_selections(
            losses, self.gram[np.ix_(places, places)], self.with_fixed[places], self.fixed, L
        )
        picked = np.array([self.places[client][pick] for client, pick in zip(batch, picks, strict=True)])
        self.fixed = SelectedModelSums(
            count=self.fixed.count + len(batch),
            loss_sum=self.fixed.loss_sum + sum(float(f[p]) for f, p in zip(losses, picks, strict=True)),
            norms=self.fixed.norms + float(self.gram[picked, picked].sum()),
        )
        self.with_fixed += self.gram[:, picked].sum(axis=1)
        return [self.cached[client][pick] for client, pick in zip(batch, picks, strict=True)]


def _candidates(models: list[tuple[int, float]]) -> list[tuple[int, int, float]]:
    """(place, number of the row, loss) of the cached models to choose from: those whose loss is a finite number.

    A loss may overflow where the model does not, and is NaN where nothing was trained. Where no loss is finite, none
    counts.
    """
    finite = [(place, number, loss) for place, (number, loss) in enumerate(models) if np.isfinite(loss)]
    return finite or [(place, number, 0.0) for place, (number, _) in enumerate(models)]


register(
    Method(
        name="fedcda",
        summary="average cached models of all clients, chosen across rounds to diverge least",
        reference="Wang et al., ICLR 2024",
        options=FedCDAOptions,
        server=FedCDAServer,
        models_sent="2K",
        needs_each="chooses one of each client's models of several rounds",
        server_keeps="3N+3 models",
        extra_compute="server searches",
    )
)
