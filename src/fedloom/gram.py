"""Inner products of many rows at once."""

from collections.abc import Iterator
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]

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
    most = max(256, BLOCK_BYTES[rows.device.type] // (count * torch.float64.itemsize))
    length = max(1, min(most, columns.stop - columns.start))
    space = torch.empty(count, length, dtype=torch.float64, device=rows.device)
    gram: Tensor | None = None
    for block in _blocks(space, rows, reference, columns, last):
        products = block @ block.T
        gram = products if gram is None else gram.add_(products)
    return space.new_zeros(count, count) if gram is None else gram


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
    length = space.shape[1]
    for start in range(columns.start, columns.stop, length):
        part = slice(start, min(start + length, columns.stop))
        block = space if part.stop - start == length else space[:, : part.stop - start]
        bottom = block[-1]
        bottom.copy_(reference[part])
        torch.sub(rows[:, part], bottom, out=block[:-1])
        if last is not None:
            bottom.copy_(last[part.start - columns.start : part.stop - columns.start])
        yield block


def column_blocks(rows: Tensor, columns: slice) -> Iterator[slice]:
    """These columns, as many at a time as are worked on at once."""
    length = max(256, BLOCK_BYTES[rows.device.type] // (len(rows) * rows.element_size()))
    for start in range(columns.start, columns.stop, length):
        yield slice(start, min(start + length, columns.stop))


def cosine_gaps(gram: Numbers) -> Numbers:
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


def gap_errors(gram: Numbers, errors: Numbers) -> Numbers:
    """How far `cosine_gaps` may be off, for products that may be off by `errors`: the terms of its formula in turn."""
    own, off = (np.diagonal(each, axis1=-2, axis2=-1)[..., :-1] for each in (gram, errors))
    with np.errstate(all="ignore"):
        squared_off = np.sqrt(_sums(off**2) + 4 * errors[..., :-1, :-1] ** 2)
        extra_off = np.sqrt(4 * errors[..., :-1, -1] ** 2 + off**2)
        norms = np.sqrt(np.maximum(gram[..., -1:, -1] + 2 * gram[..., :-1, -1] + np.maximum(own, 0), 0))
        apart_off = _sums(extra_off) / _sums(norms)
        apart = np.abs(norms[..., :, None] - norms[..., None, :]) + apart_off
        found: Numbers = (squared_off + 2 * apart * apart_off) / (2 * norms[..., :, None] * norms[..., None, :])
    return found


def _sums(numbers: Numbers) -> Numbers:
    """Of each pair."""
    return numbers[..., :, None] + numbers[..., None, :]
