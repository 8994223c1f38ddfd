"""How kernels written with Triton are launched, and how work on maps is divided among programs."""

from threading import Lock
from typing import Any

_launching = Lock()

WIDEST = 32
"""Channels of a tile at most, where channels lie side by side in memory."""


def launch(kernel: Any, programs: tuple[int, int], *given: Any, **compiled_for: Any) -> None:
    """Launch a kernel, in one thread at a time.

    Triton takes a kernel for loaded as soon as it begins to load it, and also if that has failed, for want of memory.
    So then it is to forget it.
    """
    with _launching:
        try:
            kernel[programs](*given, **compiled_for)
        except BaseException:
            getattr(kernel, "device_caches", {}).clear()
            raise


def chunks(rows: int, tall: int, most: int) -> tuple[int, int]:
    """Rows of a chunk, in whole tiles, and how many chunks there are of so many rows: at most `most`."""
    tiles = -(-rows // tall)
    each = -(-tiles // most) * tall
    return each, -(-rows // each)
