"""Inner products of many rows at once."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]

BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""How much is multiplied at a time: on a CPU small enough for the cache, large enough that calls cost little."""


def inner_products(rows: Tensor, reference: Tensor, columns: slice, last: Tensor | None = None) -> Tensor:
    """The float64 matrix of inner products of d_0, ..., d_{K-1} and one more vector, with d_i = row_i - reference.

    That vector is `last` (over these columns), or the reference itself. (K + 1) x (K + 1); one pass over the rows.

    Models of one run are close to each other: their norms are thousands of times their distances, so distances (and
    angles) taken from products of the rows themselves would be differences of nearly equal numbers. About a reference
    among them, and in float64, nothing cancels.
    """
    count = len(rows) + 1
    most = max(256, BLOCK_BYTES[rows.device.type] // (count * torch.float64.itemsize))
    length = max(1, min(most, columns.stop - columns.start))
    space = torch.empty(count, length, dtype=torch.float64, device=rows.device)
    gram: Tensor | None = None
    for start in range(columns.start, columns.stop, length):
        part = slice(start, min(start + length, columns.stop))
        block = space[:, : part.stop - start]
        bottom = block[-1]
        bottom.copy_(reference[part])
        torch.sub(rows[:, part], bottom, out=block[:-1])
        if last is not None:
            bottom.copy_(last[start - columns.start : part.stop - columns.start])
        products = block @ block.T
        gram = products if gram is None else gram.add_(products)
    return space.new_zeros(count, count) if gram is None else gram


def cosine_distances(gram: Numbers) -> Numbers:
    """1 - cosine of each pair of rows, from `inner_products` (or several of them, stacked), exact to the last digits
    for nearly parallel rows.

    With E = |v_i - v_j|^2 and n_i = |v_i|, 1 - cos = (E - (n_i - n_j)^2) / (2 n_i n_j). Two zero rows are alike.
    """
    d = gram[..., :-1, :-1]
    along, own = gram[..., :-1, -1], np.diagonal(d, axis1=-2, axis2=-1)
    with np.errstate(all="ignore"):  # what is not a number tells by itself
        squared = np.maximum(_sums(own) - 2 * d, 0)
        extra = 2 * along + own  # |v_i|^2 - |r|^2
        norms = np.sqrt(np.maximum(gram[..., -1:, -1] + extra, 0))
        sums, product = _sums(norms), norms[..., :, None] * norms[..., None, :]
        apart = np.where(sums > 0, (extra[..., :, None] - extra[..., None, :]) / sums, 0)
        gaps = np.maximum(squared - apart**2, 0) / (2 * product)
    return np.where(product > 0, gaps, sums > 0)


def _sums(numbers: Numbers) -> Numbers:
    """Of each pair."""
    return numbers[..., :, None] + numbers[..., None, :]


def pairwise_squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """||a_i - b_j||^2, in double precision; never below 0."""
    a, b = a.double(), b.double()
    cross = a @ b.T
    return ((a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * cross).clamp_(min=0)
