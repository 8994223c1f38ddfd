"""The choice of one cached model per client: FedCDA's selection problem, on inner products alone.

FedCDA (Wang et al., ICLR 2024) chooses one of a few cached models for each client, minimising Eq. 5 over all m chosen
models, J = (1/m) sum F + (L/2m) sum |w|^2 - (L/2) |mean w|^2. J is a sum of one number per candidate and one per pair
of candidates, so each combination costs a few scalars and no pass over models.

All vectors are relative to one reference row: J does not depend on which (see
`fedloom.core.similarity`). Differences of J below 1e-12 of the size of its terms are ties; among ties the first
client's newest model wins, then the second's, and so on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Picks = NDArray[np.intp]

TIE = 1e-12
"""Of the size of J's terms: smaller differences are rounding."""
MOST = 4**10
"""Combinations that one choice may have, each of which takes 8 bytes."""


@dataclass(frozen=True)
class SelectedModelSums:
    """The models already chosen: how many, the sum of their losses and of their squared norms."""

    count: int = 0
    loss_sum: float = 0.0
    norms: float = 0.0


def largest_batch(models: int) -> int:
    """How many clients with so many models each have at most `MOST` combinations, but at least one; `models` > 1."""
    clients = 1
    while models ** (clients + 1) <= MOST:
        clients += 1
    return clients


def enumerate_model_selections(
    losses: Sequence[Array], gram: Array, with_fixed: Array, fixed: SelectedModelSums, L: float
) -> tuple[int, ...]:
    """Find the candidate of each client (0 is the oldest) that together have the least J with the fixed models.

    `losses` has one array per client, oldest candidate first; `gram` the inner products of all candidates, client
    after client in the same order; `with_fixed` their inner products with the sum of the fixed vectors.
    """
    sizes = [len(own) for own in losses]
    if not sizes or min(sizes) == 0 or gram.shape != (sum(sizes),) * 2 or with_fixed.shape != (sum(sizes),):
        raise ValueError(f"{sizes} candidates do not fit gram {gram.shape} and with_fixed {with_fixed.shape}")
    m, owner = fixed.count + len(sizes), np.repeat(np.arange(len(sizes)), sizes)
    F, norms = np.concatenate(losses), gram.diagonal()
    unary = F / m + L / (2 * m) * norms - L / m**2 * with_fixed - L / (2 * m**2) * norms
    pair = np.where(owner[:, None] == owner, 0.0, -L / m**2 * gram)
    largest = len(sizes) * float((np.abs(F) + L / 2 * norms).max())
    tie = TIE * (abs(fixed.loss_sum) + L / 2 * fixed.norms + largest) / m

    # All combinations are pairs of one combination of the first clients and one of the others.
    logs = np.log(sizes)
    cut = int(np.argmin(np.abs(np.cumsum(logs) - logs.sum() / 2))) + 1
    candidates = [np.flatnonzero(owner == client)[::-1] for client in range(len(sizes))]
    (rows_a, _, with_a, own_a), (rows_b, chosen_b, _, own_b) = (
        _combinations(half, unary, pair) for half in (candidates[:cut], candidates[cut:])
    )
    energy = with_a @ chosen_b.T
    energy += own_a[:, None]
    energy += own_b
    first = int(np.argmax(energy.ravel() <= energy.min() + tie))
    a, b = divmod(first, len(rows_b))
    picks = np.concatenate([rows_a[a], rows_b[b]]) - np.cumsum([0, *sizes[:-1]])
    return tuple(picks.tolist())


def _combinations(candidates: Sequence[Picks], unary: Array, pair: Array) -> tuple[Picks, Array, Array, Array]:
    """All combinations of these clients' candidates, in order: their numbers, and as rows of zeros and ones; what each
    has in common with every candidate, and its own part of J.
    """
    rows = np.zeros((1, 0), dtype=np.intp)
    for own in candidates:
        rows = np.column_stack([np.repeat(rows, len(own), axis=0), np.tile(own, len(rows))])
    chosen = np.zeros((len(rows), len(unary)))
    np.put_along_axis(chosen, rows, 1.0, axis=1)
    with_all = chosen @ pair
    return rows, chosen, with_all, chosen @ unary + (with_all * chosen).sum(1) / 2
