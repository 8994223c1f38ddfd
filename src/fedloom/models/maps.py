"""Maps as kernels written with Triton see them: a matrix of M rows, one for each pixel of each image, and C channels.

A program works on a tile of it, and moves down the rows. Sizes that differ from batch to batch are plain arguments, for
which nothing is compiled anew: that must not happen while a step is being recorded.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-untyped-call"
# Triton's own language has no types that mypy knows.

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

WIDEST = 32
"""Channels of a tile at most, where channels lie side by side in memory; where pixels do, a tile has one."""


@triton.jit
def channels_here(C: tl.constexpr, WIDE: tl.constexpr):
    """The channels of this program, and which of them there are."""
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    return c, c < C


@triton.jit
def places(m, c, C: tl.constexpr, PIXELS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Where these rows and channels lie."""
    if CHANNELS_LAST:
        at = m[:, None] * C + c[None, :]
    else:
        at = (m // PIXELS)[:, None] * (C * PIXELS) + c[None, :] * PIXELS + (m % PIXELS)[:, None]
    return at


@triton.jit
def slope_behind_relu(g, y, at, inside, RELU: tl.constexpr):
    """The gradient of what went into a ReLU, or not, where y came out; what is not a number lets it through."""
    slope = tl.load(g + at, inside, 0.0).to(tl.float32)
    if RELU:
        slope = tl.where(tl.load(y + at, inside, 0.0) <= 0, 0.0, slope)
    return slope


class Tiling:
    """How maps of this shape are divided into tiles of so many numbers, and rows into chunks for some programs."""

    def __init__(self, shape: Sequence[int], channels_last: bool, tile: int) -> None:
        count, self.channels, height, width = shape
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.M = count * height * width
        wide = min(triton.next_power_of_2(self.channels), WIDEST) if channels_last else 1
        self.tall = tile // wide
        self.blocks = triton.cdiv(self.channels, wide)
        self.compiled_for: dict[str, Any] = {
            "C": self.channels, "PIXELS": height * width, "CHANNELS_LAST": channels_last, "TALL": self.tall,
            "WIDE": wide,
        }  # fmt: skip

    def chunk(self, most: int, least_tiles: int = 1) -> tuple[int, int]:
        """Rows of a chunk, in whole tiles, and how many chunks there are: no more than `most`."""
        rows = triton.cdiv(max(triton.cdiv(self.M, most), least_tiles * self.tall), self.tall) * self.tall
        return rows, triton.cdiv(self.M, rows)
