"""FedCDA: average cached models of all clients that diverge least.

The server selects them across rounds.

Wang et al., "FedCDA: Federated Learning with Cross-round Divergence-aware Aggregation", ICLR 2024. For every client n
the last K models w^n with their losses F_n (mean training loss of the last local epoch) are cached. After a round one
model is chosen for each participant, so that over all clients seen

    J = (1/m) sum F_n(w^n) + (L/2m) sum ||w^n - w||^2,    w = mean of the chosen models         (Eq. 5 = Eq. 6)

is small; the others keep the model chosen for them last. The global model is the uniform mean of all chosen models.
`approximate` (Eq. 8) chooses batch by batch: participants are shuffled into B near-equal batches. For each batch it
tries all combinations, with earlier batches fixed and later ones left out. If a batch has more than a million, there
are more batches. `optimal` is B = 1, and is rejected above a million. `newest` takes each client's last model, `random`
any cached one.

Not specified in the paper: clients that never trained are left out of the mean and of J. During warm-up the model is
FedAvg's over the participants (`warmup_mode=newest`: the mean of all clients' newest models, as in code that is
probably the authors'), and the newest models count as chosen. A model whose loss is not finite is a candidate only if
its client has no other. Ties go to the newest. Norms are over trainable parameters; buffers of the chosen models are
averaged with them.

The search needs only the inner products of the candidates (_support/model_selection.py).
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.bank import RowStore
from fedloom.core.similarity import inner_products
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.errors import InputError
from fedloom.methods._support.model_selection import (
    MOST,
    SelectedModelSums,
    enumerate_model_selections,
    model_selection_batch_size,
)
from fedloom.methods.base import Options, Server
from fedloom.methods.registry import register


class FedCDAOptions(Options):
    K: int = Field(3, ge=1)
    """models cached for each client"""
    B: int = Field(3, ge=1)
    """batches of the approximate selection; more if a batch would have more than a million combinations"""
    L: float = Field(1.0, ge=0)
    """weight of the divergence relative to the losses (the smoothness constant of the paper)"""
    selection: Literal["approximate", "optimal", "newest", "random"] = "approximate"
    """how to select the cached models that are averaged"""
    warmup: int = Field(50, ge=0)
    """rounds before the selection begins"""
    warmup_mode: Literal["fedavg", "newest"] = "fedavg"
    """the model during warm-up: FedAvg's, or the mean of the newest models of all clients"""


@register("fedcda", reference="Wang et al., ICLR 2024", server_state="3N+3 models", extra_compute="server searches")
class FedCDAServer(Server[FedCDAOptions]):
    """Average cached models of all clients, chosen across rounds to diverge least."""

    needs_reason = "chooses one of each client's models of several rounds"

    def start(self) -> None:
        context = self.context
        self._refuse_too_many_combinations()
        layout = context.layout
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial
        device = self.bank.rows.device
        self.store = RowStore(
            layout.size, layout.dtype, context.server.cache_dir, context.server.keep_checkpoints, device
        )
        self.cache: dict[int, list[tuple[int, float]]] = {}
        """(row number, loss) of each client's cached models, oldest first."""
        self.chosen: dict[int, int] = {}
        """The row number of each client's chosen model."""
        self.total = torch.zeros(layout.floats, dtype=torch.float64, device=device)
        """Sum of the chosen rows, so that a round only reads the models of its participants."""
        self._last: dict[str, float] = {}

    def _refuse_too_many_combinations(self) -> None:
        sampled, models = self.context.clients_per_round, min(self.options.K, self.context.rounds)
        if self.options.selection == "optimal" and self._selects() and sampled > (largest := self._largest_batch()):
            raise InputError(
                f"fedcda.selection=optimal would try up to {models}^{sampled} combinations of cached models, and "
                f"{MOST:,} is the most; sample at most {largest} clients per round, or use "
                "fedcda.selection=approximate."
            )

    def _selects(self) -> bool:
        """Return whether any round of this run tries combinations."""
        return self._largest_batch() > 0 and self.context.rounds > self.options.warmup

    def _largest_batch(self) -> int:
        """Return how many clients a batch may have; 0 if each client has one model."""
        models = min(self.options.K, self.context.rounds)
        return 0 if models == 1 else model_selection_batch_size(models)

    def _batches(self, participants: int) -> int:
        """Return into how many batches the participants are split."""
        if self.options.selection == "optimal":
            return 1
        largest = self._largest_batch() or participants
        return max(min(self.options.B, participants), -(-participants // largest))

    def notes(self) -> list[str]:
        warmup, rounds, sampled = self.options.warmup, self.context.rounds, self.context.clients_per_round
        if rounds <= warmup:
            return [f"fedcda selects after its warm-up of {warmup} rounds (fedcda.warmup), and this run has {rounds}."]
        if self.options.selection == "approximate" and (batches := self._batches(sampled)) > self.options.B:
            return [
                f"fedcda selects for {sampled} clients in {batches} batches instead of {self.options.B} (fedcda.B), "
                f"because a batch would have more than {MOST:,} combinations."
            ]
        return []

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client_id, self.bank.rows[0]) for client_id in client_ids]

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._last = {}
        participants: list[int] = []
        fedavg = WeightedMean(self.context.layout)
        for update in updates:
            if update.client_id not in participants:
                participants.append(update.client_id)
                self._leave(update.client_id)
            self._cache(update)
            fedavg.add(update.row, update.num_examples)
        if not participants:
            return
        warm = round < self.options.warmup
        picks = self._newest(participants) if warm else self.choose(round, participants)
        w = self.bank.rows[0]
        fixed = self._fixed_mean(w)
        mean = WeightedMean(self.context.layout)
        for client_id in participants:
            number = self.cache[client_id][picks[client_id]][0]
            row = self.store.read(number)
            self.chosen[client_id] = number
            self.total += row[: self.context.layout.floats]
            mean.add(row)
        if fixed is not None:
            mean.add(fixed, len(self.chosen) - len(participants))
        (fedavg if warm and self.options.warmup_mode == "fedavg" else mean).write_to(w)
        for client_id in participants:
            self._evict(client_id)
        older = sum(picks[client_id] < len(self.cache[client_id]) - 1 for client_id in participants)
        self._last["older models chosen"] = older / len(participants)

    # the cache

    def _leave(self, client_id: int) -> None:
        """Take a participant's model out of the sum, before a new choice."""
        if client_id in self.chosen:
            self.total -= self.store.read(self.chosen.pop(client_id))[: self.context.layout.floats]

    def _cache(self, update: ClientUpdate) -> None:
        self.cache.setdefault(update.client_id, []).append((self.store.put(update.row), update.loss))
        self._evict(update.client_id)

    def _evict(self, client_id: int) -> None:
        """Keep the last K models of a client."""
        models = self.cache[client_id]
        while len(models) > self.options.K:
            self.store.drop(models.pop(0)[0])

    def _fixed_mean(self, like: Tensor) -> Tensor | None:
        """Return the mean of the models chosen for all others, with the integers of the global model."""
        if not self.chosen:
            return None
        row, floats = like.clone(), self.context.layout.floats
        row[:floats] = self.total / len(self.chosen)
        return row

    # the selection

    def _newest(self, participants: list[int]) -> dict[int, int]:
        return {client_id: len(self.cache[client_id]) - 1 for client_id in participants}

    def choose(self, round: int, participants: list[int]) -> dict[int, int]:
        """Return the index, in its cache, of the model chosen for each participant."""
        if self.options.selection == "newest":
            return self._newest(participants)
        draw = self.context.rng_streams.numpy("fedcda", round)
        if self.options.selection == "random":
            return {client_id: int(draw.integers(len(self.cache[client_id]))) for client_id in participants}
        order = [participants[i] for i in draw.permutation(len(participants))]
        products = _CandidateInnerProducts(self, order)
        picks: dict[int, int] = {}
        for batch in np.array_split(np.array(order), self._batches(len(order))):
            client_ids = [int(client_id) for client_id in batch]
            picks.update(zip(client_ids, products.choose(client_ids, self.options.L), strict=True))
        self._last["spread of a client's models"] = products.spread()
        return picks

    def global_model(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows

    def diagnostics(self) -> dict[str, float]:
        return dict(self._last)


class _CandidateInnerProducts:
    """The inner products of all candidates of a round, relative to the global model, from one pass over them.

    Clients with a fixed choice enter through their sum. The choices of each batch are added to that sum.
    """

    def __init__(self, server: FedCDAServer, participants: list[int]) -> None:
        trainable = slice(0, server.context.layout.trainable)
        reference = server.bank.rows[0]
        models = [_candidates(server.cache[client_id]) for client_id in participants]
        numbers = [number for each in models for _, number, _ in each]
        # Copy one by one, so that memory never holds rows of a file twice.
        rows = torch.empty(len(numbers), trainable.stop, dtype=server.store.dtype, device=reference.device)
        for row, number in zip(rows, numbers, strict=True):
            row.copy_(server.store.read(number)[trainable])
        count = len(server.chosen)
        fixed = server.total[trainable] - count * reference[trainable].double()
        gram = inner_products(rows, reference, trainable, extra_vector=fixed).cpu().numpy()
        self.gram, self.products_with_selected = gram[:-1, :-1], gram[:-1, -1].copy()
        self.selected = SelectedModelSums(count)
        ends = np.cumsum([0, *(len(each) for each in models)])
        self.places = {c: np.arange(ends[i], ends[i + 1]) for i, c in enumerate(participants)}
        self.losses = {c: np.array([f for *_, f in each]) for c, each in zip(participants, models, strict=True)}
        self.cached = {c: [at for at, *_ in each] for c, each in zip(participants, models, strict=True)}

    def spread(self) -> float:
        """Return how far a client's models lie apart, relative to their distance from the global model.

        It is their variance divided by their mean squared distance to it, averaged over clients with several models.
        With 0 there is no choice.
        """
        grams = [self.gram[np.ix_(places, places)] for places in self.places.values() if len(places) > 1]
        shares = [1 - gram.mean() / gram.diagonal().mean() for gram in grams if gram.diagonal().any()]
        return float(np.mean(shares)) if shares else 0.0

    def choose(self, batch: list[int], L: float) -> list[int]:
        """Choose models for these clients and fix them. Returns the indices in their caches."""
        places = np.concatenate([self.places[client_id] for client_id in batch])
        losses = [self.losses[client_id] for client_id in batch]
        picks = enumerate_model_selections(
            losses, self.gram[np.ix_(places, places)], self.products_with_selected[places], self.selected, L
        )
        picked = np.array([self.places[client_id][pick] for client_id, pick in zip(batch, picks, strict=True)])
        self.selected = SelectedModelSums(
            count=self.selected.count + len(batch),
            loss_sum=self.selected.loss_sum + sum(float(f[p]) for f, p in zip(losses, picks, strict=True)),
            squared_norm_sum=self.selected.squared_norm_sum + float(self.gram[picked, picked].sum()),
        )
        self.products_with_selected += self.gram[:, picked].sum(axis=1)
        return [self.cached[client_id][pick] for client_id, pick in zip(batch, picks, strict=True)]


def _candidates(models: list[tuple[int, float]]) -> list[tuple[int, int, float]]:
    """Return (index in the cache, row number, loss) of the candidates: the models with finite losses.

    A loss may overflow although the model is finite, and is NaN if nothing was trained. If no loss is finite, all
    models are candidates with loss 0.
    """
    finite = [(place, number, loss) for place, (number, loss) in enumerate(models) if np.isfinite(loss)]
    return finite or [(place, number, 0.0) for place, (number, _) in enumerate(models)]
