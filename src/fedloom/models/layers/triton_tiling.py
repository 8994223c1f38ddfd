"""Maps as kernels written with Triton see them: a matrix of M rows, one for each pixel of each image, and C channels.

A program works on a tile of it, and may move down the rows. Sizes that differ from batch to batch are plain arguments,
for which nothing is compiled anew: that must not happen while a step is being recorded.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-untyped-call"
# Triton's own language has no types that mypy knows.

from collections.abc import Sequence
from threading import Lock
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

WIDEST = 32
"""Channels of a tile at most, where channels lie side by side in memory; where pixels do, a tile has one."""

_launching = Lock()


@triton.jit
def tile_channels(C: tl.constexpr, WIDE: tl.constexpr):
    """The channels of this program, and which of them there are."""
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    return c, c < C


@triton.jit
def tile_relu_gradient(g, y, at, inside, RELU: tl.constexpr):
    """The gradient of what went into a ReLU, or not, where y came out; what is not a number lets it through."""
    slope = tl.load(g + at, inside, 0.0).to(tl.float32)
    if RELU:
        slope = tl.where(tl.load(y + at, inside, 0.0) <= 0, 0.0, slope)
    return slope


class Tiling:
    """How maps of this shape are divided into tiles of so many numbers, and rows into chunks for some programs."""

    def __init__(self, shape: Sequence[int], channels_last: bool, tile: int) -> None:
        count, self.channels, height, width = shape
        self.M = count * height * width
        wide = min(triton.next_power_of_2(self.channels), WIDEST) if channels_last else 1
        self.tall = tile // wide
        self.blocks = triton.cdiv(self.channels, wide)
        self.compiled_for: dict[str, Any] = {"C": self.channels, "TALL": self.tall, "WIDE": wide}

    def chunk(self, most: int) -> tuple[int, int]:
        """Rows of a chunk, in whole tiles, and how many chunks there are: no more than `most`."""
        rows = triton.cdiv(triton.cdiv(self.M, most), self.tall) * self.tall
        return rows, triton.cdiv(self.M, rows)

    def launch(self, kernel: Any, programs: int, *given: Tensor | float, **flags: bool) -> None:
        """Launch a kernel, in one thread at a time.

        Triton takes a kernel for loaded as soon as it begins to load it, and also if that has failed, for want of
        memory. So then it is to forget it.
        """
        with _launching:
            try:
                kernel[programs, self.blocks](*given, **self.compiled_for, **flags)
            except BaseException:
                getattr(kernel, "device_caches", {}).clear()
                raise
