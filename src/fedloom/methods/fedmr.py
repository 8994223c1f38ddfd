"""FedMR: the server recombines models layer by layer instead of averaging them.

Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination", KDD 2024. The server
keeps K models, as FedCross does. After training it draws a random permutation for each layer, which says which model
gets which model's layer. Every layer instance is used exactly once, so the mean of the models does not change. The
global model is the uniform mean.

The paper does not define a layer. Here it is all tensors of one module (`module`), so a running mean stays with its
variance. The authors' code shuffles every state-dict entry separately (`tensor`). FedMR-px cuts the N layers into
segments, `segment:x`: layer j (from 1) belongs to segment ceil(j / (x N)), and `segment:1` permutes whole models.
Two-stage training: in the first `first_stage` rounds all models become their mean (the paper: 0 for the CNN, 100 for
ResNet-20 and VGG-16).

With `secure`, the clients exchange layers among themselves before they upload (Appendix B, see
_support/layer_exchange.py). The paper does not say how often a layer is sent; here it is half the time. The exchange
moves fewer layers than the server's shuffle: with ten clients three in ten change owner, and a model of few layers may
come out unchanged. With `mixed`, the clients repeat the exchange until no model is one that a single client trained, as
the paper allows. If they do not succeed, the round changes nothing, also between sites. A failed client takes no part,
and its model is left out. There is no exchange in the rounds of the first stage. The paper also lets clients exchange
the received models before they train (`exchange_before=training`, simulated only): the server then sees what each
client trained, but not from which start.

The paper's baseline without recombination is in indep.py.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.devices.cuda_runtime import cuda_foreach_copy_
from fedloom.errors import InputError
from fedloom.methods._support.layer_exchange import LayerExchange, exchange_model_layers
from fedloom.methods.base import Options
from fedloom.methods.registry import register
from fedloom.methods.servers import MULTI_MODEL_DEFAULTS, MultiModelServer

SEGMENT = re.compile(r"segment:([0-9]?\.?[0-9]{1,9}|[0-9]{1,4}/[1-9][0-9]{0,3})")


class FedMROptions(Options):
    granularity: str = "module"
    """what is swapped: module, tensor, or segment:x with x in (0, 1]"""
    first_stage: int = Field(0, ge=0)
    """number of first rounds in which all models become their mean"""
    secure: bool = False
    """let the clients exchange layers before they upload, so that the server does not see their models"""
    send_probability: float = Field(0.5, ge=0, le=1)
    """probability that a client sends a layer away in the secure exchange"""
    mixed: bool = False
    """repeat the secure exchange until no model is one that a single client trained"""
    exchange_before: Literal["upload", "training"] = "upload"
    """what the secure exchange comes before: the upload, or training (in simulations only)"""

    @field_validator("mixed")
    @classmethod
    def _possible(cls, value: bool, others: ValidationInfo) -> bool:
        if value and others.data.get("send_probability") == 0:
            raise ValueError("nothing is ever mixed where nothing is sent")
        return value

    @field_validator("granularity")
    @classmethod
    def _known(cls, value: str) -> str:
        if value in ("module", "tensor"):
            return value
        if (match := SEGMENT.fullmatch(value)) and 0 < Fraction(match[1]) <= 1:
            return value
        raise ValueError("module, tensor or segment:x with x above 0 and at most 1")


def fedmr_layer_columns(layout: Layout, granularity: str) -> list[list[slice]]:
    """Return the columns of each layer."""
    units = list(layout.layer_columns().values())
    if granularity == "module":
        return units
    if granularity == "tensor":
        return [[entry.columns] for entry in layout.entries]
    x = Fraction(granularity.partition(":")[2])
    segments: dict[int, list[slice]] = {}
    for j, columns in enumerate(units, start=1):
        segments.setdefault(ceil(j / (x * len(units))), []).extend(columns)
    return list(segments.values())


def _by_layer(rows: Tensor, layers: list[list[slice]]) -> list[list[tuple[Tensor, ...]]]:
    """Return views of all models' values in each piece of each layer."""
    return [[rows[:, part].unbind() for part in columns] for columns in layers]


@register("fedmr", reference="Hu et al., KDD 2024", defaults=MULTI_MODEL_DEFAULTS)
class FedMRServer(MultiModelServer[FedMROptions]):
    """Keep K models and swap their layers instead of averaging them."""

    needs_reason = "swaps layers between the clients' models"

    def start(self) -> None:
        context, options = self.context, self.options
        self._layers = fedmr_layer_columns(context.layout, options.granularity)
        if options.mixed and len(self._layers) == 1:
            raise InputError(f"fedmr.mixed needs at least two layers; with {options.granularity} this model has one.")
        self._given_up = self._exchanged = False
        before_training = options.secure and options.exchange_before == "training"
        self._sent = context.bank(context.clients_per_round) if before_training else None
        """The models that clients train, if these are not the server's."""
        own = (self._uploaded.rows, self.bank.rows)
        self._views = {id(rows): _by_layer(rows, self._layers) for rows in own}
        """Views of the rows that are recombined in every round; creating them takes longer than the copies."""

    def notes(self) -> list[str]:
        options, fields = self.options, FedMROptions.model_fields
        if options.secure:
            return []
        names = ("send_probability", "mixed", "exchange_before")
        idle = [name for name in names if getattr(options, name) != fields[name].default]
        return [f"fedmr.{name} has no effect: it needs the secure exchange, and fedmr.secure is off." for name in idle]

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        tasks = list(super().dispatch(round, client_ids))
        if self._sent is None or round < self.options.first_stage:
            return tasks
        self._given_up = False
        self.exchanged(round, [task.model_index for task in tasks], self.bank.rows, self._sent.rows)
        return [replace(task, row=self._sent.rows[task.model_index]) for task in tasks]

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._exchanged = False
        self._given_up = self._given_up and self._sent is not None  # that was before training, in this round
        super().aggregate(round, self._looked_at(updates))

    def _looked_at(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        for update in updates:
            self._exchanged = update.exchanged
            yield update

    def diagnostics(self) -> dict[str, float]:
        return {"exchange given up": 1.0} if self._given_up else {}

    def combine(self, round: int, v: Tensor, w: Tensor) -> None:
        if round < self.options.first_stage:
            w[:] = self.received_mean(v)
        elif self._exchanged or self._sent is not None:
            w.copy_(v)  # clients have exchanged layers already
        elif self.options.secure:
            self.exchanged(round, [i for i in range(len(v)) if i not in self.absent], v, w)
        else:
            self.shuffled(round, v, w)

    def shuffled(self, round: int, v: Tensor, w: Tensor) -> None:
        """Draw a permutation of the models for each layer, and apply it."""
        draw = self.context.rng_streams.numpy("recombine", round)
        before, after = (self._views.get(id(rows)) or _by_layer(rows, self._layers) for rows in (v, w))
        targets, sources = list[Tensor](), list[Tensor]()
        for theirs, mine in zip(before, after, strict=True):
            source = draw.permutation(len(v)).tolist()
            for here, there in zip(theirs, mine, strict=True):
                targets += there
                sources += [here[j] for j in source]
        cuda_foreach_copy_(targets, sources)  # on a GPU, hardly slower than a single copy

    @classmethod
    def layer_exchange(cls, layout: Layout, options: FedMROptions, round: int) -> LayerExchange | None:
        """Return what the clients exchange, or None. Sites call this too, without a server."""
        if not options.secure or round < options.first_stage:
            return None
        layers = fedmr_layer_columns(layout, options.granularity)
        before_training = options.exchange_before == "training"
        return LayerExchange(layers, options.send_probability, options.mixed, before_training)

    def exchanged(self, round: int, present: list[int], v: Tensor, w: Tensor) -> None:
        """Let the clients of the models `present` exchange layers of `v`, and write the models they then have to `w`.

        If they cannot mix the models, those of the server stay.
        """
        models = {i: [_gather(v[i], columns) for columns in self._layers] for i in present}
        draws = partial(self.context.rng_streams.numpy, round=round)
        found = exchange_model_layers(models, draws, self.options.send_probability, self.options.mixed)
        if found is None:
            self._given_up = True
            w.copy_(self.bank.rows)
            return
        w.copy_(v)
        for i, model in found.items():
            for columns, layer in zip(self._layers, model, strict=True):
                _scatter(w[i], columns, layer)


def _gather(row: Tensor, columns: list[slice]) -> Tensor:
    return torch.cat([row[part] for part in columns])


def _scatter(row: Tensor, columns: list[slice], values: Tensor) -> None:
    start = 0
    for part in columns:
        size = part.stop - part.start
        row[part] = values[start : start + size]
        start += size
