"""GAMF: align whole networks by graph matching, then average.

Liu et al., "Deep Neural Network Fusion via Graph Matching with Applications to Model Ensemble and Federated Learning",
ICML 2022. Channels are nodes, weights are edges. Two channels are similar if their incoming *and* their outgoing
weights are, under the matchings of the layers before and after. This is a quadratic assignment problem, solved by
graduated assignment: soft matchings P_l start uniform, and each sweep over the layers computes

    M_l = A(weights into l, under P_{l-1}) + A(weights out of l, under P_{l+1})
    P_l = Sinkhorn(M_l / temperature),      A = exp(-||difference||_4 / 2), divided by its mean

The temperature falls after each sweep, so the matchings harden. All models are matched to the largest client's model,
which makes the matchings consistent.

As in the authors' code, biases and norms do not count in A; they move with their channels. That code averages with the
soft matchings, `output=soft`. By default a last assignment makes them permutations, so every aligned model computes
the same function as before. Sinkhorn stops at convergence, the sweeps when all matchings are almost hard and stable.
"""

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.layout import TensorKind
from fedloom.methods.matching.alignment import AlignmentOptions, AlignmentServer, align_units_by_cost
from fedloom.methods.matching.symmetries import Symmetries, SymmetryGroup, SymmetryTie
from fedloom.methods.registry import register


class GAMFOptions(AlignmentOptions):
    sweeps: int = Field(50, ge=1)
    """maximal number of sweeps over the layers"""
    temperature: float = Field(10.0, gt=0)
    """temperature of the first sweep; higher is softer"""
    cooling: float = Field(0.8, gt=0, le=1)
    """factor on the temperature after each sweep"""
    coldest: float = Field(0.01, gt=0)
    """lowest temperature"""
    output: Literal["hard", "soft"] = "hard"
    """hard: permute the units; soft: replace each by a mixture of units, as in the authors' code"""


@register("gamf", reference="Liu et al., ICML 2022", extra_compute="server matches")
class GAMFServer(AlignmentServer[GAMFOptions]):
    """Align whole networks by graph matching, then average."""

    needs_reason = "matches the neurons of the clients' models"

    def align(self, round: int, rows: list[Tensor], weights: list[float]) -> None:
        anchor = rows[0]
        for row in rows[1:]:
            matching = gamf_graduated_assignment(self._symmetries, anchor, row, self.options)
            for group, P in zip(self._symmetries.groups, matching, strict=True):
                if self.options.output == "hard":
                    group.permute_(row, align_units_by_cost(-P).to(row.device))
                else:
                    group.transport_(row, P)


class GAMFEdgeWeights:
    """The weights between one group of units and the others, in one tensor."""

    def __init__(self, symmetries: Symmetries, group: SymmetryGroup, tie: SymmetryTie) -> None:
        self.group, self.tie = group, tie
        self.others = [
            (number, theirs)
            for number, other in enumerate(symmetries.groups)
            for theirs in other.ties
            if theirs.entry.offset == tie.entry.offset and theirs.axis != tie.axis
        ]

    def affinity(self, anchor: Tensor, row: Tensor, P: list[Tensor]) -> Tensor:
        """Return A[i, j], the similarity of unit i of the anchor and unit j of the model, under the other matchings."""
        moved = self.tie.entry.view(row).double().clone()
        for number, theirs in self.others:
            block = moved.narrow(theirs.axis, theirs.start, len(P[number]) * theirs.inner)
            block = torch.unflatten(block, theirs.axis, (-1, theirs.inner))
            block.copy_(torch.tensordot(P[number], block, dims=([1], [theirs.axis])).movedim(0, theirs.axis))
        a, b = (self._vectors(each) for each in (self.tie.entry.view(anchor).double(), moved))
        A = torch.exp(-0.5 * gamf_l4_distances(a, b))
        return A / A.mean()

    def _vectors(self, tensor: Tensor) -> Tensor:
        tie, size = self.tie, self.group.size
        return tensor.narrow(tie.axis, tie.start, size * tie.inner).movedim(tie.axis, 0).reshape(size, -1)


def gamf_graduated_assignment(
    symmetries: Symmetries, anchor: Tensor, row: Tensor, options: GAMFOptions
) -> list[Tensor]:
    """Return the soft matching P of each group: P[i, j] is the share of the model's unit j in the anchor's unit i."""
    graph = [
        [GAMFEdgeWeights(symmetries, group, tie) for tie in group.ties if _is_weight(tie)]
        for group in symmetries.groups
    ]
    P = [torch.full((g.size, g.size), 1 / g.size, dtype=torch.float64, device=row.device) for g in symmetries.groups]
    # If the other side is fixed (pixels, classes), the affinity is the same in all sweeps.
    constant = {edges: edges.affinity(anchor, row, P) for each in graph for edges in each if not edges.others}
    temperature = options.temperature
    for sweep in range(options.sweeps):
        change, surest = 0.0, 1.0
        for number, each in enumerate(graph):
            if not each:
                continue
            parts = [constant[e] if e in constant else e.affinity(anchor, row, P) for e in each]
            new = gamf_sinkhorn(torch.stack(parts).sum(0) / temperature, 20 + 50 * sweep)
            change = max(change, float((new - P[number]).abs().max()))
            surest = min(surest, float(new.amax(1).min()))
            P[number] = new
        if change < 1e-2 and surest > 0.99:
            break
        temperature = max(options.coldest, temperature * options.cooling)
    return P


def _is_weight(tie: SymmetryTie) -> bool:
    return tie.entry.kind is TensorKind.PARAMETER and len(tie.entry.shape) > 1


def gamf_sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Return the doubly stochastic matrix exp(logits[i, j] + u_i + v_j), approximately after few iterations."""
    # Shift the maximum of each row and column to 0, so that the exponentials fit a double (below -300 they count as 0)
    # and an iteration is two matrix-vector products without logarithms.
    logits = logits.double()
    logits = logits - logits.amax(1, keepdim=True)
    logits = logits - logits.amax(0, keepdim=True)
    # numpy needs a third of the time of torch per iteration, for 128 units.
    K = logits.clamp(min=-300).exp().cpu().numpy()
    v = np.ones(len(K))
    for i in range(iterations):
        u = 1 / (K @ v)
        v = 1 / (u @ K)
        if i % 10 == 9 and abs(u * (K @ v) - 1).max() < 1e-6:
            break
    return torch.from_numpy(u[:, None] * K * v).to(logits.device)


def gamf_l4_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return (sum_x (a_ix - b_jx)^4)^(1/4), computed by three matrix products."""
    a2, b2 = a * a, b * b
    powers = (a2 * a2).sum(1)[:, None] + (b2 * b2).sum(1)
    powers = powers - 4 * (a2 * a) @ b.T + 6 * a2 @ b2.T - 4 * a @ (b2 * b).T
    return powers.clamp_(min=0) ** 0.25
