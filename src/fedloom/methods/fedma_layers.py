"""FedMA as in the paper: one layer a round, matched layers frozen, and layers that may grow.

Wang et al., "Federated Learning with Matched Averaging", ICLR 2020. A pass over L hidden layers takes L + 1 rounds with
the same clients, each of which goes on with its own model. After round l the server matches the neurons of layer l,
averages it, and gives it to all; the clients put the inputs of the next layer into that order, freeze what is matched,
and train the rest. After the last round the remaining weights are averaged, those of the classes by how many samples
of each class a client has. Then another pass begins. Between passes the model of the last one is deployed.

Rows have one length, so a layer grows inside it: the network is built as wide as it may become, a client has `start` of
the units of each layer, and the others are zero and stay so. With start < 1 neurons are matched by the process of
growing.py, which opens new ones; where a client has none of a neuron, its weights out of it count as zero, as in the
paper. Within a pass a client works on with all neurons of matched layers; in a later one it is given those that were
matched with its own, or, if it is new, those which most clients have. With start = 1, as in later papers, layers keep
their size and are matched as in fedma.py.

A client that is lost stands as it was. A layer that nobody answered for is matched with the next one.
"""

from collections.abc import Iterable, Iterator
from math import ceil

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.layout import Layout, LayoutEntry, TensorKind
from fedloom.core.tasks import ClientTask, ClientUpdate, Shapes
from fedloom.errors import InputError
from fedloom.methods.base import Client, MethodContext, Options, Server
from fedloom.methods.fedma import fedma_incoming_weights, match_fedma_neurons
from fedloom.methods.matching.alignment import AlignmentPrior, align_growing_neurons
from fedloom.methods.matching.symmetries import Symmetries, SymmetryGroup, find_run_symmetries
from fedloom.methods.registry import Method, register
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedMALayersOptions(Options):
    start: float = Field(1.0, gt=0, le=1)
    """share of each layer's units that a client has; below 1 the global layers grow, up to the network's width"""
    sweeps: int = Field(5, ge=0)
    """times that every client is matched again"""
    sigma: float = Field(1.0, gt=0)
    """growing: deviation of a client's neuron from the global one"""
    sigma0: float = Field(1.0, gt=0)
    """growing: deviation of global neurons from 0"""
    gamma: float = Field(7.0, gt=0)
    """growing: how readily new neurons are opened"""
    bias0: float = 0.1
    """growing: mean of the global biases before any is seen; that of weights is 0"""


def fedma_layer_stages(layout: Layout, symmetries: Symmetries) -> dict[int, int]:
    """When each tensor is averaged, by its offset: with the last group that lies in it; what makes no units, last.

    A norm or a bias goes with the weights before it: in a residual stream those may come much later than the stream.
    """
    found = {entry.offset: len(symmetries.groups) for entry in layout.entries}
    before: dict[int, int] = {}
    units: dict[str, int] = {}
    for entry in layout.entries:
        here = [(n, tie) for n, g in enumerate(symmetries.groups) for tie in g.ties if tie.entry.offset == entry.offset]
        if not any(tie.made for _, tie in here):
            continue
        stage = max(n for n, _ in here)
        if entry.kind is TensorKind.BUFFER:
            stage = units.get(entry.unit, stage)
        elif len(entry.shape) == 1:
            stage = max(before.get(n, n) for n, _ in here)
        else:
            before |= {n: max(stage, before.get(n, 0)) for n, tie in here if tie.made}
        found[entry.offset] = units[entry.unit] = stage
    return found


def fedma_layer_columns(layout: Layout, stage: dict[int, int], low: int, high: int) -> Tensor:
    """Which floats of a row belong to stages from `low` to before `high`."""
    chosen = torch.zeros(layout.floats, dtype=torch.bool)
    for entry in layout.entries:
        if entry.kind is not TensorKind.INTEGER and low <= stage[entry.offset] < high:
            chosen[entry.columns] = True
    return chosen


class FedMALayersServer(Server[FedMALayersOptions]):
    """A model for each client of the pass, and the global model of the last pass."""

    kept = ("bank", "slots", "whole", "own", "held", "places", "who", "weights", "counts", "done", "popular")

    def __init__(self, context: MethodContext, options: FedMALayersOptions) -> None:
        super().__init__(context, options)
        self.symmetries = find_run_symmetries(context)
        self.ties = fedma_incoming_weights(self.symmetries)
        self.stage = fedma_layer_stages(context.layout, self.symmetries)
        groups, K = self.symmetries.groups, context.per_round
        if options.start < 1 and any(group.coupled for group in groups):
            coupled = next(group.name for group in groups if group.coupled)
            raise InputError(
                f"the layer {coupled!r} cannot grow: its units are normalised together, so units that are not there "
                "yet would count; use another norm, or --set fedma-layers.start=1."
            )
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial
        self.slots = context.bank(K)
        self.whole = context.layout.empty(context.device)
        """The global model of this pass, as far as it has come."""
        self.ends = [0, *torch.tensor([group.size for group in groups]).cumsum(0).tolist()]
        self.sizes = [ceil(options.start * group.size) for group in groups]
        """How many units of each group a client has."""
        first = [torch.arange(group.size) < size for group, size in zip(groups, self.sizes, strict=True)]
        self.popular = torch.cat([torch.zeros(0, dtype=torch.bool), *first]).double()
        """How many clients have each unit, all groups in a row."""
        self._cut(self.bank.rows[0], self.popular > 0)
        self.own = torch.zeros(K, len(self.popular), dtype=torch.bool)
        """Which units the client of each slot brings."""
        self.held = self.own.clone()
        """Which units it has now: its own, and all those of matched layers."""
        self.places: dict[int, Tensor] = {}
        """The same for every client that has been seen, from its last pass."""
        self.who: list[int] = []
        self.weights: list[float] = []
        self.counts = torch.zeros(K, max(1, context.classes), dtype=torch.float64)
        self.done = 0
        """How many groups of this pass are matched."""

    @property
    def length(self) -> int:
        """Rounds of a pass."""
        return len(self.symmetries.groups) + 1

    def select(self, round: int) -> list[int]:
        return super().select(round - round % self.length)

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        if round % self.length == 0:
            self._begin(clients)
        places = {client: slot for slot, client in enumerate(self.who)}
        return [ClientTask(c, self.slots.rows[places[c]], places[c]) for c in clients if c in places]

    def _begin(self, clients: list[int]) -> None:
        self.who, self.done = list(clients), 0
        self.weights = [float(self.context.samples(client)) for client in clients]
        self.counts.zero_()
        self.whole.copy_(self.bank.rows[0])
        for slot, client in enumerate(clients):
            self.own[slot] = self.places[client] if client in self.places else self._most_common()
            self.held[slot] = self.own[slot]
            self.slots.rows[slot] = self.bank.rows[0]
            self._cut(self.slots.rows[slot], self.held[slot])

    def _most_common(self) -> Tensor:
        chosen = torch.zeros(len(self.popular), dtype=torch.bool)
        for n, size in enumerate(self.sizes):
            low, high = self.ends[n], self.ends[n + 1]
            order = torch.argsort(self.popular[low:high], descending=True, stable=True)
            chosen[low + order[:size]] = True
        return chosen

    def _cut(self, row: Tensor, held: Tensor) -> None:
        """Set the units that are not held to zero, weights into them and out of them; statistics do not matter."""
        for n, group in enumerate(self.symmetries.groups):
            absent = torch.nonzero(~held[self.ends[n] : self.ends[n + 1]]).flatten().to(row.device)
            for tie in group.ties if len(absent) else ():
                if tie.entry.kind is TensorKind.PARAMETER:
                    tie.view(row, group.size).index_fill_(tie.axis, absent, 0)

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        answered = False
        for update in updates:
            answered = True
            self.slots.rows[update.slot] = update.row
            self._cut(self.slots.rows[update.slot], self.held[update.slot])
            if "counts" in update.extras:
                self.counts[update.slot] = update.extras["counts"].double().cpu()
        active = sorted((k for k, w in enumerate(self.weights) if w > 0), key=lambda k: (-self.weights[k], self.who[k]))
        if not answered or not active:
            return
        stage, last = round % self.length, self.length - 1
        for n in range(self.done, min(stage + 1, last)):
            self._match(round, n, active)
        self._average(fedma_layer_columns(self.context.layout, self.stage, self.done, stage + 1), active)
        self.done = stage + 1
        matched = self.ends[min(stage + 1, last)]
        self.held[:, :matched] = self.own[active, :matched].any(0)
        if stage == last:
            for integers in zip(*map(self.context.layout.integers, self._rows(active)), strict=True):
                integers[0].copy_(torch.stack(integers[1:]).amax(0))
            self.bank.rows[0] = self.whole
            self.popular = self.own[active].double().sum(0)
            self.places.update({self.who[k]: self.own[k].clone() for k in active})

    def _match(self, round: int, n: int, active: list[int]) -> None:
        """Put the units of group `n` of all clients into one order."""
        group, ties = self.ties[n]
        held = self.held[:, self.ends[n] : self.ends[n + 1]]
        mine = [torch.nonzero(held[k]).flatten() for k in active]
        vectors = [group.vectors(self.slots.rows[k], ties).double()[m] for k, m in zip(active, mine, strict=True)]
        draw = self.context.streams.numpy(f"fedma layer {n}", round)
        if self.options.start < 1:
            mu0 = torch.zeros_like(self.whole)
            for tie in ties:
                if tie.entry.name.rpartition(".")[2] == "bias":
                    tie.entry.view(mu0).fill_(self.options.bias0)
            mean = group.vectors(mu0, ties)[0].double().cpu()
            prior = AlignmentPrior(self.options.sigma, self.options.sigma0, self.options.gamma, mean)
            places = align_growing_neurons(
                [vector.cpu() for vector in vectors], mine[0], group.size, prior, self.options.sweeps, draw
            )
        else:
            orders = match_fedma_neurons(vectors, [self.weights[k] for k in active], self.options.sweeps, draw)
            places = [torch.argsort(order) for order in orders]
        for k, m, place in zip(active, mine, places, strict=True):
            group.permute_(self.slots.rows[k], _order(group, m, place).to(self.slots.rows.device))
            held[k] = False
            held[k, place] = True
        self.own[:, self.ends[n] : self.ends[n + 1]] = held

    def _average(self, chosen: Tensor, active: list[int]) -> None:
        """Give all clients the mean of these columns; weights out of units that were not theirs begin at zero."""
        layout = self.context.layout
        chosen = chosen.to(self.slots.rows.device)
        mean = torch.zeros_like(self.slots.rows[0, : layout.floats])
        mass = torch.zeros_like(mean)
        for k in active:
            weight = self._weights(k, active)[: layout.floats]
            mass += weight
            mean += (self.slots.rows[k, : layout.floats] - mean) * (weight / mass.clamp(min=1e-30))
        chosen &= mass > 0  # what makes units that nobody has stays as it is
        for k in active:
            row = self.slots.rows[k]
            row[: layout.floats] = torch.where(chosen, mean, row[: layout.floats])
        self.whole[: layout.floats] = torch.where(chosen, mean, self.whole[: layout.floats])

    def _weights(self, k: int, active: list[int]) -> Tensor:
        """How much client k counts in each column: not at all in what makes units that it has not."""
        row = torch.full_like(self.slots.rows[k], self.weights[k])
        row[self.context.layout.floats :] = 0
        for n, group in enumerate(self.symmetries.groups):
            absent = torch.nonzero(~self.held[k, self.ends[n] : self.ends[n + 1]]).flatten().to(row.device)
            for tie in group.ties if len(absent) else ():
                if tie.made:
                    tie.view(row, group.size).index_fill_(tie.axis, absent, 0)
        total = self.counts[active].sum(0)
        for entry in self._heads():
            weight = torch.where(total > 0, self.counts[k], self.weights[k])  # a class that nobody has: as all else
            shape = (-1, *[1] * (len(entry.shape) - 1))
            entry.view(row).copy_(weight.to(row.dtype).view(shape).expand(entry.shape))
        return row

    def _heads(self) -> list[LayoutEntry]:
        """The tensors with one row for each class."""
        tied = {tie.entry.offset for group in self.symmetries.groups for tie in group.ties if tie.axis == 0}
        classes = self.context.classes
        return [
            e
            for e in self.context.layout.entries
            if classes and e.kind is TensorKind.PARAMETER and e.shape[:1] == (classes,) and e.offset not in tied
        ]

    def _rows(self, active: list[int]) -> list[Tensor]:
        return [self.whole, *(self.slots.rows[k] for k in active)]

    def deploy(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows

    def diagnostics(self) -> dict[str, float]:
        return {"units": float((self.popular > 0).sum())}


def _order(group: SymmetryGroup, mine: Tensor, place: Tensor) -> Tensor:
    """Which unit goes to each place, if `mine` go to `place` and the others wherever there is room."""
    order = torch.full((group.size,), -1)
    order[place] = mine
    others = torch.ones(group.size, dtype=torch.bool)
    others[mine] = False
    order[order < 0] = torch.nonzero(others).flatten()
    return order


class FedMALayersClient(Client[FedMALayersOptions]):
    """Ordinary training of the layers that are not matched yet."""

    def __init__(self, context: MethodContext, options: FedMALayersOptions) -> None:
        super().__init__(context, options)
        self.symmetries = find_run_symmetries(context)
        self.stage = fedma_layer_stages(context.layout, self.symmetries)

    def uploads(self, layout: Layout) -> Shapes:
        return {"counts": (self.context.classes,)} if self.context.classes else {}

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        layout = self.context.layout
        stage = bench.round % (len(self.symmetries.groups) + 1)
        resting = fedma_layer_columns(layout, self.stage, 0, stage).to(bench.device)
        if self.options.start < 1:
            resting |= self._absent(bench.received)
        bench.scratch["resting"] = bench.buffer("fedma resting", layout.trainable)
        bench.scratch["resting"].copy_(resting[: layout.trainable])
        yield LocalSteps(self.step)
        floats = bench.row[: layout.floats]  # statistics of layers that rest
        floats.copy_(torch.where(resting, bench.received[: layout.floats], floats))

    def step(self, bench: LocalTrainer, batch: Batch) -> Tensor:
        loss = super().step(bench, batch)
        # After the step, not in the gradient: momentum and weight decay would move them as well.
        received = bench.received[: bench.weights.numel()]
        bench.weights.copy_(torch.where(bench.scratch["resting"] > 0, received, bench.weights))
        if "counts" in bench.uploads:
            classes = torch.arange(self.context.classes, device=bench.device)
            bench.uploads["counts"].add_((batch.y.view(-1, 1) == classes).sum(0))
        return loss

    def _absent(self, row: Tensor) -> Tensor:
        """The columns of units that this client has not: all of their weights are zero."""
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
        summary="match one layer a round, freeze it, train the rest; layers may grow",
        reference="Wang et al., ICLR 2020",
        options=FedMALayersOptions,
        server=FedMALayersServer,
        local=FedMALayersClient,
        models_sent="2K + counts",
        needs_each="matches the neurons of the clients' models",
        server_keeps="K+2 models",
        extra_compute="server matches",
    )
)
