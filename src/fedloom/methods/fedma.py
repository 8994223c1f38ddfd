"""FedMA with fixed layer sizes: match neurons of client models, then average.

Wang et al., "Federated Learning with Matched Averaging", ICLR 2020. A neuron is the vector of its incoming weights, its
bias and its norm's parameters, with the inputs already in the common order. For each layer in turn, the largest
client's model comes first. The others are added one by one, each by the assignment with the least squared distance to
the mean of those before it (Hungarian method). Then, `sweeps` times in random order, each is taken out and matched
again.

This variant matches all layers in every round. Later papers use it on networks that must not grow. The paper's own
algorithm matches one layer per round, freezes it, and lets layers grow: see `fedma-layers`. The paper covers neither
norms nor residual networks. Here the statistics of norms move with their channels. All layers that write into one
residual stream share one permutation, matched on the layers whose inputs are already in order.
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
from fedloom.methods.registry import register


class FedMAOptions(AlignmentOptions):
    sweeps: int = Field(5, ge=0)
    """how often every model is matched again to the mean of the others; stops early if nothing moves"""


@register("fedma", reference="Wang et al., ICLR 2020", extra_compute="server matches")
class FedMAServer(AlignmentServer[FedMAOptions]):
    """Match neurons by their incoming weights, then average."""

    needs_reason = "matches the neurons of the clients' models"

    def align(self, round: int, rows: list[Tensor], weights: list[float]) -> None:
        draw = self.context.rng_streams.numpy("fedma", round)
        for group, ties in fedma_incoming_weights(self._symmetries):
            vectors = [group.vectors(row, ties).double() for row in rows]
            orders = match_fedma_neurons(vectors, weights, self.options.sweeps, draw)
            for row, order in zip(rows, orders, strict=True):
                group.permute_(row, order.to(row.device))


def fedma_incoming_weights(symmetries: Symmetries) -> list[tuple[SymmetryGroup, list[SymmetryTie]]]:
    """Return the groups in order, each with the weights that compute its units from earlier groups."""
    result: list[tuple[SymmetryGroup, list[SymmetryTie]]] = []
    decided: set[str] = set()
    for group in symmetries.groups:
        made = [tie for tie in group.ties if tie.produces_units and tie.entry.kind is TensorKind.PARAMETER]
        ready = [tie for tie in made if symmetries.elsewhere(tie) <= decided]
        result.append((group, ready or made))
        decided.add(group.name)
    return result


def match_fedma_neurons(
    neuron_vectors: Sequence[Tensor], client_weights: Sequence[float], sweeps: int, rng: np.random.Generator
) -> list[Tensor]:
    """Return for each model which of its units goes to each place; the first model keeps its order.

    `neuron_vectors` has one matrix per model, with one row per unit.
    """
    size = len(neuron_vectors[0])
    orders = [torch.arange(size) for _ in neuron_vectors]
    total, mass = client_weights[0] * neuron_vectors[0], client_weights[0]
    for k in (1 + rng.permutation(len(neuron_vectors) - 1)).tolist():
        orders[k] = align_units_by_cost(pairwise_squared_distances(total / mass, neuron_vectors[k]))
        total, mass = total + client_weights[k] * neuron_vectors[k][orders[k]], mass + client_weights[k]
    for _ in range(sweeps if len(neuron_vectors) > 2 else 0):  # with two models the first matching is optimal
        moved = False
        for k in rng.permutation(len(neuron_vectors)).tolist():
            others = (total - client_weights[k] * neuron_vectors[k][orders[k]]) / (mass - client_weights[k])
            order = align_units_by_cost(pairwise_squared_distances(others, neuron_vectors[k]))
            if not torch.equal(order, orders[k]):
                moved = True
                total = total + client_weights[k] * (neuron_vectors[k][order] - neuron_vectors[k][orders[k]])
                orders[k] = order
        if not moved:
            break
    # Rematching may have moved the first model too. Relative to its order, it stays where it was.
    back = torch.argsort(orders[0])
    return [order[back] for order in orders]
