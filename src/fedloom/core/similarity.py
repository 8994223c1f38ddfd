"""Inner products and distances of many models at once."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]

BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Size of one multiplication. On a CPU it fits into the cache, and is large enough to make call overhead small."""


def inner_products(rows: Tensor, reference: Tensor, columns: slice, extra_vector: Tensor | None = None) -> Tensor:
    """Return the inner products of d_0, ..., d_{K-1} and one more vector, in float64, with d_i = row_i - reference.

    The result is a (K + 1) x (K + 1) matrix. The last vector is `extra_vector` (over these columns), or the reference
    if there is none. One pass over the rows.

    Models of one run are close to each other: their norms are thousands of times their distances. Distances and angles
    from products of the rows themselves would be differences of nearly equal numbers. Relative to a reference among
    the models, and in float64, nothing cancels.
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
        if extra_vector is not None:
            bottom.copy_(extra_vector[start - columns.start : part.stop - columns.start])
        products = block @ block.T
        gram = products if gram is None else gram.add_(products)
    return space.new_zeros(count, count) if gram is None else gram


def squared_euclidean_distances(gram: Numbers) -> Numbers:
    """Return |v_i - v_j|^2 of each pair of rows, from one or several stacked results of `inner_products`."""
    d = gram[..., :-1, :-1]
    with np.errstate(all="ignore"):  # a NaN in the result is the signal
        return np.maximum(_sums(np.diagonal(d, axis1=-2, axis2=-1)) - 2 * d, 0)


def cosine_distances(gram: Numbers) -> Numbers:
    """Return 1 - cosine of each pair of rows, from one or several stacked results of `inner_products`.

    With E = |v_i - v_j|^2 and n_i = |v_i|, 1 - cos = (E - (n_i - n_j)^2) / (2 n_i n_j). This form is exact for nearly
    parallel rows. Two zero rows have distance 0.
    """
    along, own = gram[..., :-1, -1], np.diagonal(gram[..., :-1, :-1], axis1=-2, axis2=-1)
    squared = squared_euclidean_distances(gram)
    with np.errstate(all="ignore"):  # a NaN in the result is the signal
        extra = 2 * along + own  # |v_i|^2 - |r|^2
        norms = np.sqrt(np.maximum(gram[..., -1:, -1] + extra, 0))
        sums, product = _sums(norms), norms[..., :, None] * norms[..., None, :]
        apart = np.where(sums > 0, (extra[..., :, None] - extra[..., None, :]) / sums, 0)
        gaps = np.maximum(squared - apart**2, 0) / (2 * product)
    return np.where(product > 0, gaps, sums > 0)


def _sums(numbers: Numbers) -> Numbers:
    """Return the sum of each pair."""
    return numbers[..., :, None] + numbers[..., None, :]


def pairwise_squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return ||a_i - b_j||^2 in double precision, clamped to at least 0."""
    a, b = a.double(), b.double()
    cross = a @ b.T
    return ((a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * cross).clamp_(min=0)
