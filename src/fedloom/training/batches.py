"""Mini-batches, how an epoch is split into them, and how many a client trains on."""

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedloom.config import TrainingConfig
from fedloom.core.rng import RngStreams

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


def count_local_steps(num_examples: int, config: TrainingConfig, epochs: int | None = None) -> int:
    """Return how many steps a client with so many training samples makes in a round.

    Args:
        num_examples: Its samples, without those for validation.
        config: The settings.
        epochs: Number of epochs; by default the epochs or steps of the settings.
    """
    if not num_examples:
        return 0
    if epochs is None:
        if config.steps is not None:
            return config.steps
        epochs = config.epochs
    return ceil(num_examples / min(config.batch_size or num_examples, num_examples)) * epochs


def split_validation(
    count: int, config: TrainingConfig, rng_streams: RngStreams, client_id: int
) -> tuple[Positions, Positions]:
    """Return the indices of a client's samples for training, at least one, and for validation."""
    held = count_validation_samples(count, config)
    if not held:
        return np.arange(count), np.arange(0)
    order = rng_streams.numpy("validation", client_id=client_id).permutation(count)
    return np.sort(order[held:]), np.sort(order[:held])


def count_validation_samples(count: int, config: TrainingConfig) -> int:
    """Return how many of a client's samples are held out from training."""
    return min(int(config.validation * count + 0.5), max(0, count - 1))
