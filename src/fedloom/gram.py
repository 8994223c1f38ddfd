"""Inner products of many rows at once."""

from collections.abc import Iterator
from math import sqrt

import torch
from torch import Tensor

BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""How much is multiplied at a time: on a CPU small enough for the cache, large enough that calls cost little."""


SHORT = 2048
"""How many products `quick_products` adds up in float32; sums of such sums are in float64."""
PIECES = 32
"""How many such sums it takes at a time."""


def inner_products(rows: Tensor, reference: Tensor, columns: slice, last: Tensor | None = None) -> Tensor:
    """The float64 matrix of inner products of d_0, ..., d_{K-1} and one more vector, with d_i = row_i - reference.

    That vector is `last` (over these columns), or the reference itself. (K + 1) x (K + 1); one pass over the rows.

    Models of one run are close to each other: their norms are thousands of times their distances, so distances (and
    angles) taken from products of the rows themselves would be differences of nearly equal numbers. About a reference
    among them, and in float64, nothing cancels.
    """
    count = len(rows) + 1
    length = max(256, BLOCK_BYTES[rows.device.type] // (count * torch.float64.itemsize))
    space = torch.empty(count, length, dtype=torch.float64, device=rows.device)
    gram = torch.zeros(count, count, dtype=torch.float64, device=rows.device)
    for block in _blocks(space, rows, reference, columns, last):
        gram += block @ block.T
    return gram


def quick_products(rows: Tensor, reference: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """`inner_products` with float32 inside, in half the time on a CPU, and how far each of them may be off.

    A sum of n products of numbers of d_i and d_j in float32 is off by some sqrt(n) u |d_i| |d_j|, with u = 2^-24. Such
    errors of different sums are independent, so their squares add up. Eight times that is said: random errors are that
    large once in 10^14 sums.
    """
    width, count = columns.stop - columns.start, len(rows) + 1
    pieces = max(1, min(PIECES, -(-width // SHORT)))
    space = torch.empty(count, pieces * SHORT, device=rows.device)
    parts = space.view(count, pieces, SHORT).transpose(0, 1)
    products = torch.zeros(-(-width // (pieces * SHORT)), pieces, count, count, device=rows.device)
    for number, block in enumerate(_blocks(space, rows, reference, columns)):
        space[:, block.shape[1] :] = 0  # behind the last columns
        torch.bmm(parts, parts.transpose(1, 2), out=products[number])
    squares = products.flatten(0, 1).diagonal(dim1=1, dim2=2).double()
    errors = 8 * sqrt(SHORT) * 2.0**-24 * (squares.T @ squares).sqrt()
    return products.sum((0, 1), dtype=torch.float64), errors


def _blocks(
    space: Tensor, rows: Tensor, reference: Tensor, columns: slice, last: Tensor | None = None
) -> Iterator[Tensor]:
    """As many columns as `space` has at a time, of the differences and the last vector, in their place there."""
    count, length = len(rows), space.shape[1]
    for start in range(columns.start, columns.stop, length):
        part = slice(start, min(start + length, columns.stop))
        block = space[:, : part.stop - part.start]
        block[count] = reference[part]
        torch.sub(rows[:, part], block[count], out=block[:count])
        if last is not None:
            block[count] = last[part.start - columns.start : part.stop - columns.start]
        yield block


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


def gap_errors(gram: Tensor, errors: Tensor) -> Tensor:
    """How far `cosine_gaps` may be off, for products that may be off by `errors`: the terms of its formula in turn."""
    own, off = gram[:-1, :-1].diagonal().clamp(min=0), errors[:-1, :-1].diagonal()
    squared_off = (off[:, None] ** 2 + off[None, :] ** 2 + 4 * errors[:-1, :-1] ** 2).sqrt()
    extra_off = (4 * errors[:-1, -1] ** 2 + off**2).sqrt()
    norms = (gram[-1, -1] + 2 * gram[:-1, -1] + own).clamp_(min=0).sqrt()
    apart_off = (extra_off[:, None] + extra_off[None, :]) / (norms[:, None] + norms[None, :])
    apart = (norms[:, None] - norms[None, :]).abs() + apart_off
    return (squared_off + 2 * apart * apart_off) / (2 * norms[:, None] * norms[None, :])
