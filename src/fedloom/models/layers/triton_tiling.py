"""Tiling of feature maps for the Triton kernels.

A map is a matrix of M rows, one for each pixel of each image, and C channels.

A program works on one tile of the matrix, and may move down the rows. Sizes that differ from batch to batch are plain
arguments, so nothing is compiled for them: compilation must not happen during a capture.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, no-untyped-call"
# mypy does not know the types of Triton's language.

from collections.abc import Sequence
from threading import Lock
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

WIDEST = 32
"""Maximum channels of a tile in channels-last order. In other orders a tile has one channel."""

_launching = Lock()


@triton.jit
def tile_channels(C: tl.constexpr, WIDE: tl.constexpr):
    """Return the channels of this program, and which of them exist."""
    c = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    return c, c < C


@triton.jit
def triton_tiling_relu_gradient(grad_output, y, offsets, mask, RELU: tl.constexpr):
    """Return the gradient before a ReLU with output y, or without one; NaN in y lets it through."""
    slope = tl.load(grad_output + offsets, mask, 0.0).to(tl.float32)
    if RELU:
        slope = tl.where(tl.load(y + offsets, mask, 0.0) <= 0, 0.0, slope)
    return slope


class Tiling:
    """How maps of this shape are divided into tiles of `tile_size` numbers, and rows into chunks for programs."""

    def __init__(self, shape: Sequence[int], channels_last: bool, tile_size: int) -> None:
        count, self.channels, height, width = shape
        self.M = count * height * width
        wide = min(triton.next_power_of_2(self.channels), WIDEST) if channels_last else 1
        self.tall = tile_size // wide
        self.blocks = triton.cdiv(self.channels, wide)
        self.compiled_for: dict[str, Any] = {"C": self.channels, "TALL": self.tall, "WIDE": wide}

    def chunk(self, most: int) -> tuple[int, int]:
        """Return the rows of a chunk, in whole tiles, and the number of chunks, at most `most`."""
        rows = triton.cdiv(triton.cdiv(self.M, most), self.tall) * self.tall
        return rows, triton.cdiv(self.M, rows)

    def launch(self, kernel: Any, programs: int, *given: Tensor | float, **flags: bool) -> None:
        """Launch a kernel, in one thread at a time.

        Triton marks a kernel as loaded when loading begins, and keeps the mark if memory runs out. So the mark is
        deleted.
        """
        with _launching:
            try:
                kernel[programs, self.blocks](*given, **self.compiled_for, **flags)
            except BaseException:
                getattr(kernel, "device_caches", {}).clear()
                raise
