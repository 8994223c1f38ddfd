"""FedMA: match the neurons of the clients' models, layer by layer, and average those that match.

Wang et al., "Federated Learning with Matched Averaging", ICLR 2020. For each layer in turn a neuron is the vector of
its incoming weights and its bias (and what a norm makes of it), with the inputs already in the common order. Models
are added one after the other, the largest first, each by the assignment of least squared distance to the mean of those
before it (Hungarian method); then, in `sweeps` rounds of random order, each is taken out and matched again.

This is the variant of fixed size that matches all layers at once in every round, as later papers use it on networks
that must not grow. The paper's own, layer by layer with frozen layers and growing ones, is `fedma-layers`. The paper
treats neither norms nor residual networks: here the statistics of norms move with their channels, and all layers that
write into one stream share one permutation, matched by those whose inputs have their order already.
"""

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.layout import TensorKind
from fedloom.core.similarity import pairwise_squared_distances
from fedloom.methods.matching.alignment import AlignmentOptions, AlignmentServer, align_units_by_cost
from fedloom.methods.matching.symmetries import Symmetries, SymmetryGroup, SymmetryTie
from fedloom.methods.registry import Method, register


class FedMAOptions(AlignmentOptions):
    sweeps: int = Field(5, ge=0)
    """times that every model is matched again to the mean of the others; ends early when nothing moves"""


class FedMAServer(AlignmentServer[FedMAOptions]):
    """The mean of matched neurons."""

    def align(self, round: int, rows: list[Tensor], weights: list[float]) -> None:
        draw = self.context.streams.numpy("fedma", round)
        for group, ties in fedma_incoming_weights(self.symmetries):
            vectors = [group.vectors(row, ties).double() for row in rows]
            orders = match_fedma_neurons(vectors, weights, self.options.sweeps, draw)
            for row, order in zip(rows, orders, strict=True):
                group.permute_(row, order.to(row.device))


def fedma_incoming_weights(symmetries: Symmetries) -> list[tuple[SymmetryGroup, list[SymmetryTie]]]:
    """The groups in order, each with the weights that make its units from units of groups before it."""
    result: list[tuple[SymmetryGroup, list[SymmetryTie]]] = []
    decided: set[str] = set()
    for group in symmetries.groups:
        made = [tie for tie in group.ties if tie.made and tie.entry.kind is TensorKind.PARAMETER]
        ready = [tie for tie in made if symmetries.elsewhere(tie) <= decided]
        result.append((group, ready or made))
        decided.add(group.name)
    return result


def match_fedma_neurons(
    vectors: Sequence[Tensor], weights: Sequence[float], sweeps: int, draw: np.random.Generator
) -> list[Tensor]:
    """For each model which of its units goes to each place; the first model stays as it is at first.

    `vectors` has a matrix for each model, with one row a unit.
    """
    size = len(vectors[0])
    orders = [torch.arange(size) for _ in vectors]
    total, mass = weights[0] * vectors[0], weights[0]
    for k in (1 + draw.permutation(len(vectors) - 1)).tolist():
        orders[k] = align_units_by_cost(pairwise_squared_distances(total / mass, vectors[k]))
        total, mass = total + weights[k] * vectors[k][orders[k]], mass + weights[k]
    for _ in range(sweeps if len(vectors) > 2 else 0):  # with two the first matching is the best already
        moved = False
        for k in draw.permutation(len(vectors)).tolist():
            others = (total - weights[k] * vectors[k][orders[k]]) / (mass - weights[k])
            order = align_units_by_cost(pairwise_squared_distances(others, vectors[k]))
            if not torch.equal(order, orders[k]):
                moved = True
                total = total + weights[k] * (vectors[k][order] - vectors[k][orders[k]])
                orders[k] = order
        if not moved:
            break
    # Rematching may have moved the first model as well; all are told in its order, so that it stays where it was.
    back = torch.argsort(orders[0])
    return [order[back] for order in orders]


register(
    Method(
        name="fedma",
        summary="match neurons by their incoming weights, then average",
        reference="Wang et al., ICLR 2020",
        options=FedMAOptions,
        server=FedMAServer,
        models_sent="2K",
        needs_each="matches the neurons of the clients' models",
        extra_compute="server matches",
    )
)
