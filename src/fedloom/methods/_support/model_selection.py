"""FedCDA's selection problem: choose one cached model per client.

It uses inner products only.

FedCDA (Wang et al., ICLR 2024) selects one of a few cached models for each client. It minimizes Eq. 5 over all m chosen
models, J = (1/m) sum F + (L/2m) sum |w|^2 - (L/2) |mean w|^2. J is a sum of one number per candidate and one per pair
of candidates, so a combination costs a few scalar operations and no pass over models.

All vectors are relative to one reference row, which does not change J (see `fedloom.core.similarity`). Differences of J
below 1e-12 of the size of its terms are ties. Among ties the first client's newest model wins, then the second's, etc.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Picks = NDArray[np.intp]

TIE = 1e-12
"""Share of the size of J's terms; smaller differences are rounding errors."""
MOST = 4**10
"""Maximal number of combinations in one selection; each takes 8 bytes."""


@dataclass(frozen=True)
class SelectedModelSums:
    """The models already selected: their number, and the sums of their losses and squared norms."""

    count: int = 0
    loss_sum: float = 0.0
    squared_norm_sum: float = 0.0


def model_selection_batch_size(models: int) -> int:
    """Return how many clients with `models` > 1 models each have at most `MOST` combinations, at least 1."""
    clients = 1
    while models ** (clients + 1) <= MOST:
        clients += 1
    return clients


def enumerate_model_selections(
    losses: Sequence[Array], gram: Array, products_with_selected: Array, selected: SelectedModelSums, L: float
) -> tuple[int, ...]:
    """Return the candidates, one per client (0 is the oldest), with the least J together with the selected models.

    `losses` has one array per client, oldest candidate first; `gram` the inner products of all candidates, client
    after client in the same order; `products_with_selected` those with the sum of the selected vectors.
    """
    sizes = [len(own) for own in losses]
    if not sizes or min(sizes) == 0 or gram.shape != (sum(sizes),) * 2 or products_with_selected.shape != (sum(sizes),):
        raise ValueError(
            f"{sizes} candidates do not fit gram {gram.shape} and products_with_selected {products_with_selected.shape}"
        )
    m, owner = selected.count + len(sizes), np.repeat(np.arange(len(sizes)), sizes)
    F, norms = np.concatenate(losses), gram.diagonal()
    unary = F / m + L / (2 * m) * norms - L / m**2 * products_with_selected - L / (2 * m**2) * norms
    pair = np.where(owner[:, None] == owner, 0.0, -L / m**2 * gram)
    largest = len(sizes) * float((np.abs(F) + L / 2 * norms).max())
    tie = TIE * (abs(selected.loss_sum) + L / 2 * selected.squared_norm_sum + largest) / m

    # Each combination is a pair: one of the first clients and one of the others.
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
    """Return all combinations of these clients' candidates, in order, with their parts of J.

    The results are indices, rows of zeros and ones, pair terms with every candidate, and the own part of J.
    """
    rows = np.zeros((1, 0), dtype=np.intp)
    for own in candidates:
        rows = np.column_stack([np.repeat(rows, len(own), axis=0), np.tile(own, len(rows))])
    chosen = np.zeros((len(rows), len(unary)))
    np.put_along_axis(chosen, rows, 1.0, axis=1)
    with_all = chosen @ pair
    return rows, chosen, with_all, chosen @ unary + (with_all * chosen).sum(1) / 2
