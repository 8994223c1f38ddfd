"""Batches: what one holds, and how an epoch is cut into them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Positions = NDArray[np.int64]
"""Which samples, by number."""


@dataclass(frozen=True)
class Batch:
    """One prepared mini-batch."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return self.y.shape[0]


@dataclass(frozen=True)
class BatchSlice:
    """A batch as a piece of the order in which an epoch sees the samples."""

    order: Positions
    low: int
    high: int

    def __len__(self) -> int:
        return self.high - self.low

    @property
    def positions(self) -> Positions:
        return self.order[self.low : self.high]

    @property
    def first(self) -> bool:
        """Whether an epoch begins with it."""
        return self.low == 0


class EpochBatches:
    """Every sample once, in `order`, in batches of `size`; the last holds what is left."""

    def __init__(self, order: Positions, size: int) -> None:
        self._order, self._size, self._at = order, size, 0

    @property
    def over(self) -> bool:
        return self._at >= len(self._order)

    def next(self) -> BatchSlice:
        """The next batch; there must be one left."""
        low, self._at = self._at, self._at + self._size
        return BatchSlice(self._order, low, min(self._at, len(self._order)))
