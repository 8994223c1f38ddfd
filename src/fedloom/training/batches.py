"""Mini-batches, and how an epoch is split into them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Positions = NDArray[np.int64]
"""Indices of samples."""


@dataclass(frozen=True)
class Batch:
    """A mini-batch, transformed and on the device. `len(batch)` is its number of samples."""

    x: Tensor
    """Inputs of the network."""
    y: Tensor
    """Labels or targets."""

    def __len__(self) -> int:
        return self.y.shape[0]


@dataclass(frozen=True)
class BatchSlice:
    """A batch as a range of the order in which an epoch visits the samples."""

    order: Positions
    low: int
    high: int

    def __len__(self) -> int:
        return self.high - self.low

    @property
    def sample_indices(self) -> Positions:
        return self.order[self.low : self.high]

    @property
    def starts_epoch(self) -> bool:
        """Return whether it is the first batch of an epoch."""
        return self.low == 0


class EpochBatches:
    """Split `order` into batches of `size`; `LocalTrainer` draws the order. The last batch may be smaller."""

    def __init__(self, order: Positions, size: int) -> None:
        self._order, self._size, self._at = order, size, 0

    @property
    def exhausted(self) -> bool:
        return self._at >= len(self._order)

    def next(self) -> BatchSlice:
        """Return the next batch. There must be one left."""
        low, self._at = self._at, self._at + self._size
        return BatchSlice(self._order, low, min(self._at, len(self._order)))
