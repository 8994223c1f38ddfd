"""Weighted means of models, for aggregation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core.layout import Layout


class WeightedMean:
    """Average models that arrive one at a time, with weights.

    A running mean, m <- m + (row - m) w / W. The mean of equal rows is exactly that row, whatever the weights, and a
    row costs one pass over memory (a sum in float64 takes three times as long: results/choices.json). Integer buffers
    take their maximum: a mean of counters has no meaning, and the first or last value would depend on the order.

    Args:
        layout: The layout of the models, usually `self.context.layout`.

    Example:
        mean = WeightedMean(layout)
        for update in updates:
            mean.add(update.row, update.num_examples)
        mean.write_to(self.bank.rows[0])
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.weight = 0.0
        self._mean: Tensor | None = None

    def add(self, row: Tensor, weight: float = 1.0) -> None:
        """Add one model. `row` is not kept, so its memory may be reused.

        Args:
            row: A model in flat form, of this layout.
            weight: Its weight, usually the number of samples. A row of weight 0 changes nothing.

        Raises:
            ValueError: If the weight is negative.
        """
        if weight < 0:
            raise ValueError(f"a weight of a mean is 0 or more, not {weight}")
        if weight == 0:
            return
        self.weight += weight
        if self._mean is None:
            self._mean = row.clone()
            return
        floats = self.layout.floats
        self._mean[:floats].lerp_(row[:floats], weight / self.weight)
        for mine, theirs in zip(*map(self.layout.integers, (self._mean, row)), strict=True):
            torch.maximum(mine, theirs, out=mine)

    def result(self) -> Tensor | None:
        """Return the mean, or None if no row with a positive weight was added. The next `add` changes it."""
        return self._mean

    def write_to(self, row: Tensor) -> bool:
        """Write the mean into `row`.

        Args:
            row: Where to write the mean.

        Returns:
            True, or False if no row with a positive weight was added. `row` is then unchanged.
        """
        if self._mean is None:
            return False
        row.copy_(self._mean)
        return True


def average_models(layout: Layout, rows: Sequence[Tensor] | Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Return the mean of some models, at least one of which has a positive weight; by default all weigh the same."""
    mean = WeightedMean(layout)
    for row, weight in zip(rows, [1.0] * len(rows) if weights is None else weights, strict=True):
        mean.add(row, weight)
    result = mean.result()
    assert result is not None, "no model has a weight"
    return result
