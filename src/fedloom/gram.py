"""Inner products of many rows at once."""

from math import sqrt

import torch
from torch import Tensor

BLOCK_BYTES = 4 << 20
"""How much is multiplied at a time: small enough for the cache, large enough that calls cost little."""


SHORT_BLOCK = 16384
"""How many numbers are added up in float32, where that is asked for; sums of such sums are in float64."""


def inner_products(
    rows: Tensor, reference: Tensor, columns: slice, last: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The float64 matrix of inner products of d_0, ..., d_{K-1} and one more vector, with d_i = row_i - reference.

    That vector is `last` (over these columns), or the reference itself. (K + 1) x (K + 1); one pass over the rows.

    Models of one run are close to each other: their norms are thousands of times their distances, so distances (and
    angles) taken from products of the rows themselves would be differences of nearly equal numbers. About a reference
    among them, and in float64, nothing cancels. Products in float32 (`dtype`) take half the time, and would rank
    angles wrongly where the reference lies far from rows that are close to each other: see `gap_errors`.
    """
    count = len(rows)
    chunk = max(256, BLOCK_BYTES // ((count + 1) * torch.float64.itemsize))
    if dtype is torch.float32:
        chunk = min(chunk, SHORT_BLOCK)
    gram = torch.zeros(count + 1, count + 1, dtype=torch.float64, device=rows.device)
    space = torch.empty(count + 1, chunk, dtype=dtype, device=rows.device)
    for start in range(columns.start, columns.stop, chunk):
        part = slice(start, min(start + chunk, columns.stop))
        block = space[:, : part.stop - part.start]
        block[count] = reference[part]
        torch.sub(rows[:, part], block[count], out=block[:count])
        if last is not None:
            block[count] = last[part.start - columns.start : part.stop - columns.start]
        gram += block @ block.T
    return gram


def cosine_gaps(gram: Tensor) -> Tensor:
    """1 - cosine of each pair of rows, from `inner_products`; exact to the last digits for nearly parallel rows.

    With E = |v_i - v_j|^2 and n_i = |v_i|, 1 - cos = (E - (n_i - n_j)^2) / (2 n_i n_j). Two zero rows are alike.
    """
    d = gram[:-1, :-1]
    along, own = gram[:-1, -1], d.diagonal()
    squared = (own[:, None] + own[None, :] - 2 * d).clamp_(min=0)
    extra = 2 * along + own  # |v_i|^2 - |r|^2
    norms = (gram[-1, -1] + extra).clamp_(min=0).sqrt()
    sums = norms[:, None] + norms[None, :]
    apart = torch.where(sums > 0, (extra[:, None] - extra[None, :]) / sums, torch.zeros_like(sums))
    product = norms[:, None] * norms[None, :]
    gaps = (squared - apart**2).clamp_(min=0) / (2 * product)
    return torch.where(product > 0, gaps, torch.where(sums > 0, torch.ones_like(gaps), torch.zeros_like(gaps)))


def gap_errors(gram: Tensor) -> Tensor:
    """How far `cosine_gaps` of products in float32 may be off: generously, so that what it tells apart is apart.

    A sum of n products of d_i and d_j in float32 is off by some sqrt(n) u |d_i| |d_j|, u = 2^-24, and eight times that
    once in 10^14 sums. All three terms of a gap have errors of this size, relative to (|d_i| + |d_j|)^2.
    """
    lengths = gram[:-1, :-1].diagonal().clamp(min=0).sqrt()
    norms = (gram[-1, -1] + 2 * gram[:-1, -1] + lengths**2).clamp_(min=0).sqrt()
    share = 4 * 8 * sqrt(SHORT_BLOCK) * 2.0**-24
    sums = lengths[:, None] + lengths[None, :]
    return share * sums.square() / (2 * norms[:, None] * norms[None, :])
