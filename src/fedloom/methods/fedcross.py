"""FedCross: keep K models and mix each with one other after every round.

Hu et al., "FedCross: Towards Accurate Federated Learning via Multi-Model Cross-Aggregation", ICDE 2024. Each model goes
to another client every round. The server mixes the uploaded models v_0, ..., v_{K-1} all at once:

    w_i = alpha v_i + (1 - alpha) v_co(i)

The collaborator co(i) is chosen in order, co(i) = (i + (r mod (K - 1)) + 1) mod K, or it is the model least or most
similar to v_i. The similarity is the cosine of the parameters (the plus between the norms in the paper's formula is a
misprint). Buffers are mixed like weights but do not count in it. `layerwise` is the mean of the cosines of the layers,
close to the authors' code; `euclidean` takes the distance, which the paper leaves as future work. The authors'
`first_stage` broadcasts the uniform mean of the received models in the first rounds.

Acceleration by propellers (PM): for `propeller_rounds` rounds, p propellers in order replace the collaborator. Dynamic
alpha (DA): after these rounds, alpha rises within `dynamic_rounds` rounds. PM, DA and PM-DA of Figure 9 are 100 and 0,
0 and 100, 50 and 50.

Not specified in the paper: p and the weights of propellers. In this "coarse-grained" stage models shall learn more from
each other, so each becomes the plain mean of itself and its propellers. If they shared the weight 1 - alpha (`shared`),
they would have no effect. The course of alpha: here a line. A single model is not mixed. The model of a failed client
takes part as it is, except in the first stage. Ties of similarity go to the next model in order.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
from math import cos, pi
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.layout import Layout, TensorKind
from fedloom.core.similarity import BLOCK_BYTES, Numbers, cosine_distances, inner_products, squared_euclidean_distances
from fedloom.methods.base import Options
from fedloom.methods.registry import register
from fedloom.methods.servers import MULTI_MODEL_DEFAULTS, MultiModelServer


def _column_blocks(rows: Tensor, columns: slice) -> Iterator[slice]:
    """Yield these columns in blocks of about `BLOCK_BYTES`."""
    length = max(256, BLOCK_BYTES[rows.device.type] // (len(rows) * rows.element_size()))
    for start in range(columns.start, columns.stop, length):
        yield slice(start, min(start + length, columns.stop))


class FedCrossOptions(Options):
    alpha: float = Field(0.99, ge=0.5, le=1)
    """weight of a model itself when it is mixed; 1 never mixes"""
    selection: Literal["in-order", "lowest", "highest"] = "lowest"
    """the collaborator: the next in order, the least similar, or the most similar model"""
    similarity: Literal["global", "layerwise", "euclidean"] = "global"
    """cosine of whole models, mean of the cosines of their layers, or Euclidean distance (near models are similar)"""
    propellers: int = Field(3, ge=1)
    """number of models that replace the collaborator in the first propeller_rounds rounds"""
    propeller_rounds: int = Field(0, ge=0)
    """number of rounds with propellers"""
    propeller_weights: Literal["equal", "shared"] = "equal"
    """plain mean of a model and its propellers, or propellers that share the weight 1 - alpha"""
    dynamic_rounds: int = Field(0, ge=0)
    """number of rounds in which alpha rises from dynamic_start, after those with propellers"""
    dynamic_start: float = Field(0.5, ge=0.5, le=1)
    """alpha in the first of the dynamic_rounds"""
    dynamic_schedule: Literal["linear", "cosine"] = "linear"
    """course of the rising alpha: a line, or half a cosine wave"""
    first_stage: int = Field(0, ge=0)
    """number of first rounds in which all models become their mean"""

    @model_validator(mode="after")
    def _rising(self) -> "FedCrossOptions":
        if self.dynamic_start > self.alpha:
            raise ValueError(f"dynamic_start must be at most alpha, {self.alpha}, not {self.dynamic_start}.")
        return self


@register("fedcross", reference="Hu et al., ICDE 2024", defaults=MULTI_MODEL_DEFAULTS, extra_compute="server compares")
class FedCrossServer(MultiModelServer[FedCrossOptions]):
    """Keep K models and mix each with one other model every round."""

    needs_reason = "crosses the clients' models"

    def start(self) -> None:
        units = _units(self.context.layout, self.options.similarity)
        self._pieces = [columns for unit in units for columns in unit]
        """The columns that the similarity compares."""
        self._starts = list(accumulate((len(unit) for unit in units[:-1]), initial=0))
        """The first piece of each unit (the whole model or one layer)."""

    def combine(self, round: int, v: Tensor, w: Tensor) -> None:
        options, floats = self.options, self.context.layout.floats
        if round < options.first_stage:
            w[:] = self.received_mean(v)
            return
        r = round - options.first_stage
        alpha = self.alpha(r)
        if alpha == 1 or len(v) == 1:
            w.copy_(v)
            return
        collaborators = self.collaborators(r, v)
        if floats < v.shape[1]:
            w[:, floats:] = v[:, floats:]  # integers stay with their model
        mix = cross_aggregate_by_row if v.device.type == "cpu" else cross_aggregate_batched
        mix(v, collaborators, alpha, w, slice(0, floats))

    def alpha(self, r: int) -> float:
        """Return the weight of a model itself in round r, counted from the end of the first stage."""
        o = self.options
        since, last = r - o.propeller_rounds, o.dynamic_rounds - 1
        if since < 0 and o.propeller_weights == "equal":
            return 1 / (1 + self._propellers())
        if not 0 <= since < last:
            return o.alpha
        share = since / last if o.dynamic_schedule == "linear" else (1 - cos(pi * since / last)) / 2
        return o.dynamic_start + (o.alpha - o.dynamic_start) * share

    def _propellers(self) -> int:
        """Return how many propellers each model has."""
        return min(self.options.propellers, len(self.bank) - 1)

    def collaborators(self, r: int, v: Tensor) -> list[list[int]]:
        """Return the models that each model is mixed with."""
        count = len(v)
        if count == 1:
            return [[]]
        first = r % (count - 1)
        if r < self.options.propeller_rounds:
            offsets = [(first + step) % (count - 1) + 1 for step in range(self._propellers())]
            return [[(i + offset) % count for offset in offsets] for i in range(count)]
        if self.options.selection == "in-order" or count == 2:
            return [[(i + first + 1) % count] for i in range(count)]
        return [[partner] for partner in self.extremes(v, -1 if self.options.selection == "lowest" else 1)]

    def extremes(self, v: Tensor, sign: int) -> list[int]:
        """Return for each model the other one with the lowest sign x gap; ties go to the next in order."""
        models, others = np.arange(len(v)), _others(len(v))
        lowest = (sign * self.gaps(v))[models[:, None], others].argmin(1)  # the first of equals
        found: list[int] = others[models, lowest].tolist()
        return found

    def gaps(self, v: Tensor) -> Numbers:
        """Return 1 - cosine, or the squared distance, of each pair over the trainable parameters, in float64.

        The CPU adds up the products of the pieces; a GPU would need one call for each addition.
        """
        products = torch.stack([inner_products(v[1:], v[0], columns) for columns in self._pieces]).cpu().numpy()
        with np.errstate(all="ignore"):
            sums = np.add.reduceat(products, self._starts)
        found = np.zeros((len(sums), len(v) + 1, len(v) + 1))
        found[:, 1:, 1:] = sums  # row and column 0 stay zero: v_0 minus itself
        measure = squared_euclidean_distances if self.options.similarity == "euclidean" else cosine_distances
        gaps: Numbers = measure(found).mean(0)
        return gaps


def cross_aggregate_by_row(v: Tensor, collaborators: list[list[int]], alpha: float, w: Tensor, columns: slice) -> None:
    """Mix these columns of each row of `v` with its partners' into `w`, row by row, without extra memory."""
    for i, theirs in enumerate(collaborators):
        _mix(v[i, columns], (v[j, columns] for j in theirs), alpha, w[i, columns])


def cross_aggregate_batched(v: Tensor, collaborators: list[list[int]], alpha: float, w: Tensor, columns: slice) -> None:
    """Do the same with few calls: on a GPU they take longer than the arithmetic of small models."""
    others = torch.tensor(collaborators, device=v.device).unbind(1)
    for block in _column_blocks(v, columns):
        mine = v[:, block]
        _mix(mine, (mine.index_select(0, theirs) for theirs in others), alpha, w[:, block])


def _mix(mine: Tensor, others: Iterable[Tensor], alpha: float, mixed: Tensor) -> None:
    first, *more = others
    for number, other in enumerate(more, start=2):  # a running mean: equal models are exactly their mean
        first = torch.lerp(first, other, 1 / number)
    torch.lerp(first, mine, alpha, out=mixed)


def _units(layout: Layout, similarity: str) -> list[list[slice]]:
    """Return the columns of each unit of comparison: the whole model, or one layer."""
    if similarity != "layerwise":
        return [[slice(0, layout.trainable)]]
    layers: dict[str, list[slice]] = {}
    for entry in layout.entries:
        if entry.kind is TensorKind.PARAMETER:
            layers.setdefault(entry.layer, []).append(entry.columns)
    return list(layers.values())


@cache
def _others(count: int) -> NDArray[np.intp]:
    """Return for each of `count` models all others in order, beginning with the next one."""
    order = np.arange(count)
    return (order[:, None] + order[1:]) % count
