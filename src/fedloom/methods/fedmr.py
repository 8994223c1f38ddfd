"""FedMR: the server recombines models layer by layer instead of averaging them.

Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination", KDD 2024. K models
travel like FedCross's; after training, for each layer an independent random permutation says which model's layer each
model gets. Every layer instance is used exactly once, so the mean of the models does not change. The deployed model
is the uniform mean.

What a layer is the paper leaves open: here all tensors of one module (`module`, so that a running mean stays with its
variance). The authors' code shuffles every state-dict entry on its own (`tensor`). FedMR-px cuts the N layers into
segments, `segment:x`: layer j (from 1) belongs to segment ceil(j / (x N)), and `segment:1` permutes whole models.
Two-stage training: for `first_stage` rounds all models become their mean (the paper: 0 for the CNN, 100 for ResNet-20
and VGG-16).

`secure` lets the clients exchange layers among themselves (Appendix B, see recombination.py) before they upload; the
paper does not say how often a layer is sent, here half the time. It changes fewer layers than the server's shuffle:
with ten clients three in ten change owner, and a model of few layers may come out as it went in. `mixed` lets the
clients exchange again until no model does, as the paper allows; where they do not get there, the round counts for
nothing, as it does between sites. A client that is lost takes no part, and its model is left out. In the rounds of the
first stage nothing is exchanged.

`indep`, the paper's baseline, is the same without recombination: models wander and never meet.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from math import ceil

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientUpdate
from fedloom.devices.cuda_runtime import foreach_copy_
from fedloom.errors import InputError
from fedloom.methods._support.layer_exchange import LayerExchange, exchange_model_layers
from fedloom.methods.base import MethodContext, Options
from fedloom.methods.registry import Method, register
from fedloom.methods.servers import MULTI_MODEL_DEFAULTS, MultiModelServer

SEGMENT = re.compile(r"segment:([0-9]?\.?[0-9]{1,9}|[0-9]{1,4}/[1-9][0-9]{0,3})")


class FedMROptions(Options):
    granularity: str = "module"
    """what is swapped: module, tensor, or segment:x with x in (0, 1]"""
    first_stage: int = Field(0, ge=0)
    """rounds at the start in which all models become their mean"""
    secure: bool = False
    """clients exchange layers among themselves, so that the server never sees a model that one client trained"""
    send_probability: float = Field(0.5, ge=0, le=1)
    """how often a client gives a layer away in the secure exchange"""
    mixed: bool = False
    """in the secure exchange, exchange again until no model is what one client trained"""

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
    """The columns of each layer."""
    units = list(layout.units().values())
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
    """All models' numbers in each piece of each layer: views."""
    return [[rows[:, part].unbind() for part in columns] for columns in layers]


class FedMRServer(MultiModelServer[FedMROptions]):
    """K models that swap layers."""

    def __init__(self, context: MethodContext, options: FedMROptions) -> None:
        super().__init__(context, options)
        self.layers = fedmr_layer_columns(context.layout, options.granularity)
        if options.mixed and len(self.layers) == 1:
            raise InputError(f"fedmr.mixed needs two layers at least; by {options.granularity} this model has one.")
        self._given_up = self._exchanged = False
        own = (self._uploaded.rows, self.bank.rows)
        self._views = {id(rows): _by_layer(rows, self.layers) for rows in own}
        """Of the rows that are recombined in every round: to make them anew took longer than the copies."""

    def notes(self) -> list[str]:
        options, fields = self.options, FedMROptions.model_fields
        if options.secure:
            return []
        idle = [name for name in ("send_probability", "mixed") if getattr(options, name) != fields[name].default]
        return [f"fedmr.{name} is about the secure exchange, and fedmr.secure is off." for name in idle]

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        self._given_up = self._exchanged = False
        super().collect(round, self._looked_at(updates))

    def _looked_at(self, updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
        for update in updates:
            self._exchanged = update.exchanged
            yield update

    def diagnostics(self) -> dict[str, float]:
        return {"exchange given up": 1.0} if self._given_up else {}

    def combine(self, round: int, v: Tensor, w: Tensor) -> None:
        if round < self.options.first_stage:
            w[:] = self.mean(v)
        elif self.options.secure:
            self.exchanged(round, v, w)
        else:
            self.shuffled(round, v, w)

    def shuffled(self, round: int, v: Tensor, w: Tensor) -> None:
        """The server draws a permutation of the models for each layer."""
        draw = self.context.streams.numpy("recombine", round)
        before, after = (self._views.get(id(rows)) or _by_layer(rows, self.layers) for rows in (v, w))
        targets, sources = list[Tensor](), list[Tensor]()
        for theirs, mine in zip(before, after, strict=True):
            source = draw.permutation(len(v)).tolist()
            for here, there in zip(theirs, mine, strict=True):
                targets += there
                sources += [here[j] for j in source]
        foreach_copy_(targets, sources)  # on a GPU, hardly slower than one of them

    @classmethod
    def layer_exchange(cls, layout: Layout, options: FedMROptions, round: int) -> LayerExchange | None:
        """What clients exchange among themselves before they upload. Sites ask this too, so it needs no server."""
        if not options.secure or round < options.first_stage:
            return None
        return LayerExchange(fedmr_layer_columns(layout, options.granularity), options.send_probability, options.mixed)

    def exchanged(self, round: int, v: Tensor, w: Tensor) -> None:
        """The clients exchange layers; what the server gets is `w`. Over sites they have done so already.

        Where they cannot mix their models they hand over none, and those of the last round stay.
        """
        if self._exchanged:
            w.copy_(v)
            return
        present = [i for i in range(len(v)) if i not in self.absent]
        models = {i: [_gather(v[i], columns) for columns in self.layers] for i in present}
        draws = partial(self.context.streams.numpy, round=round)
        found = exchange_model_layers(models, draws, self.options.send_probability, self.options.mixed)
        if found is None:
            self._given_up = True
            return
        w.copy_(v)
        for i, model in found.items():
            for columns, layer in zip(self.layers, model, strict=True):
                _scatter(w[i], columns, layer)


class IndepServer(MultiModelServer[Options]):
    """K models that never meet."""

    def combine(self, round: int, v: Tensor, w: Tensor) -> None:
        w.copy_(v)


def _gather(row: Tensor, columns: list[slice]) -> Tensor:
    return torch.cat([row[part] for part in columns])


def _scatter(row: Tensor, columns: list[slice], values: Tensor) -> None:
    start = 0
    for part in columns:
        size = part.stop - part.start
        row[part] = values[start : start + size]
        start += size


register(
    Method(
        name="fedmr",
        summary="several models travel, and swap layers instead of being averaged",
        reference="Hu et al., KDD 2024",
        options=FedMROptions,
        server=FedMRServer,
        defaults=MULTI_MODEL_DEFAULTS,
        models_sent="2K",
        needs_each="swaps layers between the clients' models",
        server_keeps="K models",
    )
)

register(
    Method(
        name="indep",
        summary="several models travel and never meet; their mean is deployed (FedMR's baseline)",
        reference="Hu et al., KDD 2024",
        server=IndepServer,
        defaults=MULTI_MODEL_DEFAULTS,
        models_sent="2K",
        needs_each="keeps models that are never averaged in training",
        server_keeps="K models",
    )
)
