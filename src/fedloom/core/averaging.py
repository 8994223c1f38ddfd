"""WeightedMean of model rows (what aggregation uses)."""

import torch
from torch import Tensor

from fedloom.core.layout import Layout


class WeightedMean:
    """The weighted mean of rows that come one at a time.

    A running mean, m <- m + (row - m) w / W: equal rows have exactly themselves as their mean, whatever the weights,
    and a row costs one pass over memory (a sum in float64 takes three times as long: benchmarks/choices.py).
    Integers take the largest value seen: a mean of counters means nothing, and the first would depend on the order.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.weight = 0.0
        self._mean: Tensor | None = None

    def add(self, row: Tensor, weight: float = 1.0) -> None:
        """Take one more row in; a row of weight 0 changes nothing."""
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

    def into(self, row: Tensor) -> bool:
        """Write the mean into `row`; False, and `row` untouched, when no weight came in."""
        if self._mean is None:
            return False
        row.copy_(self._mean)
        return True


def average_models(layout: Layout, rows: list[Tensor]) -> Tensor:
    """The uniform mean of some rows."""
    mean, out = WeightedMean(layout), rows[0].clone()
    for row in rows:
        mean.add(row)
    mean.into(out)
    return out
