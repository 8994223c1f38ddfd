"""FedMA as in the paper: match and freeze one layer per round; layers may grow.

Wang et al., "Federated Learning with Matched Averaging", ICLR 2020. A pass over L hidden layers takes L + 1 rounds with
the same clients, and each client continues with its own model. After round l the server matches the neurons of layer l,
averages the layer, and sends it to all clients. The inputs of the next layer take the same order. The clients freeze
the matched layers and train the rest. After the last round the remaining weights are averaged; the weights of a class
count by the client's samples of that class. Then another pass begins. Between passes the global model is that of the
last pass.

Rows have one length, so a layer grows inside its row: the network is as wide as it may become, a client has `start` of
the units of each layer, and the other units are zero and stay zero. With start < 1, `find_growing_alignment`
(matching/alignment.py) matches neurons and opens new ones. If a client lacks a neuron, its weights out of the neuron
count as zero, as in the paper. Within a pass a client continues with all neurons of the matched layers. In a later pass
it gets those that were matched with its own or, if it is new, those that most clients have. With start = 1, as in later
papers, layers keep their size and are matched as in fedma.py.

The model of a failed client stays as it was. A layer without any update is matched together with the next one.
"""

from collections.abc import Iterable, Iterator
from math import ceil

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.layout import Layout, LayoutEntry, TensorKind
from fedloom.core.tasks import ClientTask, ClientUpdate, Shapes
from fedloom.errors import InputError
from fedloom.methods.base import Client, Options, Server
from fedloom.methods.fedma import fedma_incoming_weights, match_fedma_neurons
from fedloom.methods.matching.alignment import AlignmentPrior, find_growing_alignment
from fedloom.methods.matching.symmetries import Symmetries, SymmetryGroup, find_run_symmetries
from fedloom.methods.registry import Method, register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedMALayersOptions(Options):
    start: float = Field(1.0, gt=0, le=1)
    """share of each layer's units that a client has; below 1 the global layers grow, up to the network's width"""
    sweeps: int = Field(5, ge=0)
    """how often every client is matched again"""
    sigma: float = Field(1.0, gt=0)
    """if layers grow: standard deviation of a client's neuron from the global one"""
    sigma0: float = Field(1.0, gt=0)
    """if layers grow: standard deviation of global neurons from 0"""
    gamma: float = Field(7.0, gt=0)
    """if layers grow: tendency to open new neurons"""
    bias0: float = 0.1
    """if layers grow: prior mean of the global biases; that of weights is 0"""


def fedma_layer_stages(layout: Layout, symmetries: Symmetries) -> dict[int, int]:
    """Return the stage in which each tensor is averaged, by its offset.

    A tensor is averaged with the last group that lies in it, or in the last stage if it produces no units. A norm or a
    bias goes with the weights before it: in a residual stream those may come much later than the stream.
    """
    found = {entry.offset: len(symmetries.groups) for entry in layout.entries}
    before: dict[int, int] = {}
    units: dict[str, int] = {}
    for entry in layout.entries:
        here = [(n, tie) for n, g in enumerate(symmetries.groups) for tie in g.ties if tie.entry.offset == entry.offset]
        if not any(tie.produces_units for _, tie in here):
            continue
        stage = max(n for n, _ in here)
        if entry.kind is TensorKind.BUFFER:
            stage = units.get(entry.layer, stage)
        elif len(entry.shape) == 1:
            stage = max(before.get(n, n) for n, _ in here)
        else:
            before |= {n: max(stage, before.get(n, 0)) for n, tie in here if tie.produces_units}
        found[entry.offset] = units[entry.layer] = stage
    return found


def fedma_layer_columns(layout: Layout, stages: dict[int, int], first_stage: int, end_stage: int) -> Tensor:
    """Return a mask of the floats of a row that belong to stages `first_stage` to `end_stage` - 1."""
    chosen = torch.zeros(layout.floats, dtype=torch.bool)
    for entry in layout.entries:
        if entry.kind is not TensorKind.INTEGER and first_stage <= stages[entry.offset] < end_stage:
            chosen[entry.columns] = True
    return chosen


class FedMALayersServer(Server[FedMALayersOptions]):
    """Server with one model per client of the pass, and the global model of the last pass."""

    needs_reason = "matches the neurons of the clients' models"

    def start(self) -> None:
        context, options = self.context, self.options
        self._symmetries = find_run_symmetries(context)
        self._ties = fedma_incoming_weights(self._symmetries)
        self._stage = fedma_layer_stages(context.layout, self._symmetries)
        groups, K = self._symmetries.groups, context.clients_per_round
        if options.start < 1 and any(group.coupled for group in groups):
            coupled = next(group.name for group in groups if group.coupled)
            raise InputError(
                f"the layer {coupled!r} cannot grow: its units are normalized together, so units that do not exist "
                "yet would count; use another norm, or --set fedma-layers.start=1."
            )
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial
        self.client_models = context.bank(K)
        self.whole = context.layout.empty(context.server.device)
        """The global model of this pass, as far as it is averaged."""
        self._ends = [0, *torch.tensor([group.size for group in groups]).cumsum(0).tolist()]
        self._sizes = [ceil(options.start * group.size) for group in groups]
        """How many units of each group a client has."""
        first = [torch.arange(group.size) < size for group, size in zip(groups, self._sizes, strict=True)]
        self.popular = torch.cat([torch.zeros(0, dtype=torch.bool), *first]).double()
        """How many clients have each unit; all groups in one vector."""
        self._cut(self.bank.rows[0], self.popular > 0)
        self.own = torch.zeros(K, len(self.popular), dtype=torch.bool)
        """Which units each client of the pass has of its own."""
        self.held = self.own.clone()
        """Which units each client has now: its own, and all those of matched layers."""
        self.places: dict[int, Tensor] = {}
        """The value of `own` for every client seen so far, from its last pass."""
        self.client_ids: list[int] = []
        self.weights: list[float] = []
        self.counts = torch.zeros(K, max(1, context.classes), dtype=torch.float64)
        self.done = 0
        """Number of groups of this pass that are matched."""

    @property
    def length(self) -> int:
        """Number of rounds in a pass."""
        return len(self._symmetries.groups) + 1

    def sample_clients(self, round: int) -> list[int]:
        return super().sample_clients(round - round % self.length)

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        if round % self.length == 0:
            self._begin(client_ids)
        places = {client_id: model_index for model_index, client_id in enumerate(self.client_ids)}
        return [ClientTask(c, self.client_models.rows[places[c]], places[c]) for c in client_ids if c in places]

    def _begin(self, client_ids: list[int]) -> None:
        self.client_ids, self.done = list(client_ids), 0
        self.weights = [float(self.context.num_examples(client_id)) for client_id in client_ids]
        self.counts.zero_()
        self.whole.copy_(self.bank.rows[0])
        for model_index, client_id in enumerate(client_ids):
            self.own[model_index] = self.places[client_id] if client_id in self.places else self._most_common()
            self.held[model_index] = self.own[model_index]
            self.client_models.rows[model_index] = self.bank.rows[0]
            self._cut(self.client_models.rows[model_index], self.held[model_index])

    def _most_common(self) -> Tensor:
        chosen = torch.zeros(len(self.popular), dtype=torch.bool)
        for n, size in enumerate(self._sizes):
            low, high = self._ends[n], self._ends[n + 1]
            order = torch.argsort(self.popular[low:high], descending=True, stable=True)
            chosen[low + order[:size]] = True
        return chosen

    def _cut(self, row: Tensor, held: Tensor) -> None:
        """Set the weights into and out of units that are not held to zero; statistics do not matter."""
        for n, group in enumerate(self._symmetries.groups):
            absent = torch.nonzero(~held[self._ends[n] : self._ends[n + 1]]).flatten().to(row.device)
            for tie in group.ties if len(absent) else ():
                if tie.entry.kind is TensorKind.PARAMETER:
                    tie.view(row, group.size).index_fill_(tie.axis, absent, 0)

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        answered = False
        for update in updates:
            answered = True
            self.client_models.rows[update.model_index] = update.row
            self._cut(self.client_models.rows[update.model_index], self.held[update.model_index])
            if "counts" in update.extras:
                self.counts[update.model_index] = update.extras["counts"].double().cpu()
        active = sorted(
            (k for k, w in enumerate(self.weights) if w > 0), key=lambda k: (-self.weights[k], self.client_ids[k])
        )
        if not answered or not active:
            return
        stage, last = round % self.length, self.length - 1
        for n in range(self.done, min(stage + 1, last)):
            self._match(round, n, active)
        self._average(fedma_layer_columns(self.context.layout, self._stage, self.done, stage + 1), active)
        self.done = stage + 1
        matched = self._ends[min(stage + 1, last)]
        self.held[:, :matched] = self.own[active, :matched].any(0)
        if stage == last:
            for integers in zip(*map(self.context.layout.integers, self._rows(active)), strict=True):
                integers[0].copy_(torch.stack(integers[1:]).amax(0))
            self.bank.rows[0] = self.whole
            self.popular = self.own[active].double().sum(0)
            self.places.update({self.client_ids[k]: self.own[k].clone() for k in active})

    def _match(self, round: int, n: int, active: list[int]) -> None:
        """Put the units of group `n` of all clients into one order."""
        group, ties = self._ties[n]
        held = self.held[:, self._ends[n] : self._ends[n + 1]]
        mine = [torch.nonzero(held[k]).flatten() for k in active]
        vectors = [
            group.vectors(self.client_models.rows[k], ties).double()[m] for k, m in zip(active, mine, strict=True)
        ]
        draw = self.context.rng_streams.numpy(f"fedma layer {n}", round)
        if self.options.start < 1:
            mu0 = torch.zeros_like(self.whole)
            for tie in ties:
                if tie.entry.name.rpartition(".")[2] == "bias":
                    tie.entry.view(mu0).fill_(self.options.bias0)
            mean = group.vectors(mu0, ties)[0].double().cpu()
            prior = AlignmentPrior(self.options.sigma, self.options.sigma0, self.options.gamma, mean)
            places = find_growing_alignment(
                [vector.cpu() for vector in vectors], mine[0], group.size, prior, self.options.sweeps, draw
            )
        else:
            orders = match_fedma_neurons(vectors, [self.weights[k] for k in active], self.options.sweeps, draw)
            places = [torch.argsort(order) for order in orders]
        for k, m, place in zip(active, mine, places, strict=True):
            group.permute_(self.client_models.rows[k], _order(group, m, place).to(self.client_models.rows.device))
            held[k] = False
            held[k, place] = True
        self.own[:, self._ends[n] : self._ends[n + 1]] = held

    def _average(self, chosen: Tensor, active: list[int]) -> None:
        """Give all clients the mean of these columns; weights out of units that they lacked start at zero."""
        layout = self.context.layout
        chosen = chosen.to(self.client_models.rows.device)
        mean = torch.zeros_like(self.client_models.rows[0, : layout.floats])
        mass = torch.zeros_like(mean)
        for k in active:
            weight = self._weights(k, active)[: layout.floats]
            mass += weight
            mean += (self.client_models.rows[k, : layout.floats] - mean) * (weight / mass.clamp(min=1e-30))
        chosen &= mass > 0  # columns that produce units nobody has stay as they are
        for k in active:
            row = self.client_models.rows[k]
            row[: layout.floats] = torch.where(chosen, mean, row[: layout.floats])
        self.whole[: layout.floats] = torch.where(chosen, mean, self.whole[: layout.floats])

    def _weights(self, k: int, active: list[int]) -> Tensor:
        """Return the weight of client k in each column: 0 in columns that produce units it lacks."""
        row = torch.full_like(self.client_models.rows[k], self.weights[k])
        row[self.context.layout.floats :] = 0
        for n, group in enumerate(self._symmetries.groups):
            absent = torch.nonzero(~self.held[k, self._ends[n] : self._ends[n + 1]]).flatten().to(row.device)
            for tie in group.ties if len(absent) else ():
                if tie.produces_units:
                    tie.view(row, group.size).index_fill_(tie.axis, absent, 0)
        total = self.counts[active].sum(0)
        for entry in self._heads():
            weight = torch.where(total > 0, self.counts[k], self.weights[k])  # a class without samples: as the rest
            shape = (-1, *[1] * (len(entry.shape) - 1))
            entry.view(row).copy_(weight.to(row.dtype).view(shape).expand(entry.shape))
        return row

    def _heads(self) -> list[LayoutEntry]:
        """Return the tensors with one row per class."""
        tied = {tie.entry.offset for group in self._symmetries.groups for tie in group.ties if tie.axis == 0}
        classes = self.context.classes
        return [
            e
            for e in self.context.layout.entries
            if classes and e.kind is TensorKind.PARAMETER and e.shape[:1] == (classes,) and e.offset not in tied
        ]

    def _rows(self, active: list[int]) -> list[Tensor]:
        return [self.whole, *(self.client_models.rows[k] for k in active)]

    def global_model(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows

    def diagnostics(self) -> dict[str, float]:
        return {"units": float((self.popular > 0).sum())}


def _order(group: SymmetryGroup, mine: Tensor, place: Tensor) -> Tensor:
    """Return which unit goes to each place: `mine` go to `place`, the others fill the rest."""
    order = torch.full((group.size,), -1)
    order[place] = mine
    others = torch.ones(group.size, dtype=torch.bool)
    others[mine] = False
    order[order < 0] = torch.nonzero(others).flatten()
    return order


class FedMALayersClient(Client[FedMALayersOptions]):
    """Client that trains the layers that are not matched yet."""

    def start(self) -> None:
        context = self.context
        self.symmetries = find_run_symmetries(context)
        self.stage = fedma_layer_stages(context.layout, self.symmetries)

    def upload_shapes(self, layout: Layout) -> Shapes:
        return {"counts": (self.context.classes,)} if self.context.classes else {}

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        layout = self.context.layout
        stage = trainer.round % (len(self.symmetries.groups) + 1)
        resting = fedma_layer_columns(layout, self.stage, 0, stage).to(trainer.device)
        if self.options.start < 1:
            resting |= self._absent(trainer.received)
        trainer.scratch["resting"] = trainer.buffer("fedma resting", layout.trainable)
        trainer.scratch["resting"].copy_(resting[: layout.trainable])
        yield LocalSteps(self.training_step)
        floats = trainer.row[: layout.floats]  # restores the statistics of frozen layers
        floats.copy_(torch.where(resting, trainer.received[: layout.floats], floats))

    def training_step(self, trainer: LocalTrainer, batch: Batch) -> Tensor:
        loss = super().training_step(trainer, batch)
        # Restore after the step: momentum and weight decay move weights without a gradient too.
        received = trainer.received[: trainer.weights.numel()]
        trainer.weights.copy_(torch.where(trainer.scratch["resting"] > 0, received, trainer.weights))
        if "counts" in trainer.uploads:
            classes = torch.arange(self.context.classes, device=trainer.device)
            trainer.uploads["counts"].add_((batch.y.view(-1, 1) == classes).sum(0))
        return loss

    def _absent(self, row: Tensor) -> Tensor:
        """Return a mask of the columns of units that this client lacks: all of their weights are zero."""
        absent = torch.zeros_like(row)
        for group in self.symmetries.groups:
            weights = [tie for tie in group.ties if tie.entry.kind is TensorKind.PARAMETER]
            none = torch.nonzero((group.vectors(row, weights) == 0).all(1)).flatten()
            for tie in group.ties:
                tie.view(absent, group.size).index_fill_(tie.axis, none, 1)
        return absent[: self.context.layout.floats] > 0


register(
    Method(
        name="fedma-layers",
        summary="Match one layer per round, freeze it, train the rest; layers may grow",
        reference="Wang et al., ICLR 2020",
        options=FedMALayersOptions,
        server=FedMALayersServer,
        client=FedMALayersClient,
        models_sent="2K + counts",
        extra_compute="server matches",
    )
)
