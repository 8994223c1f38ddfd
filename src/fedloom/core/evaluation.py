"""How a model does on samples: sums that can be added up, wherever the pieces were scored."""

from collections.abc import Sized
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

EVALUATION_BATCH_SIZE = 500
"""Samples scored at once, or used at once to estimate statistics. Fixed: the rounding of a sum depends on it."""


@dataclass(frozen=True)
class EvaluationResult:
    """Test results that can be added up: sums, hits by class, and which samples were hit."""

    loss_sum: float
    count: int
    hits: np.ndarray
    seen: np.ndarray
    right: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """Of each sample, in order, whether its class was found; empty where there are no classes."""

    def __add__(self, other: "EvaluationResult") -> "EvaluationResult":
        return EvaluationResult(
            self.loss_sum + other.loss_sum,
            self.count + other.count,
            self.hits + other.hits,
            self.seen + other.seen,
            np.concatenate([self.right, other.right]),
        )

    @property
    def loss(self) -> float:
        return self.loss_sum / self.count if self.count else float("nan")

    @property
    def accuracy(self) -> float | None:
        """The share of samples that were classified rightly; None when there are no classes."""
        return float(self.hits.sum() / self.seen.sum()) if self.seen.sum() else None

    def accuracy_for(self, counts: np.ndarray) -> float | None:
        """The accuracy to expect where classes come as often as `counts` says; None where none of them was tested."""
        held = np.where(self.seen > 0, counts, 0).astype(np.float64)
        return float(held @ (self.hits / np.maximum(self.seen, 1)) / held.sum()) if held.sum() else None


def evaluation_slices(examples: Sized) -> list[slice]:
    """How a test set is cut, always alike: engines may score the pieces anywhere and add them up in this order."""
    return [slice(low, low + EVALUATION_BATCH_SIZE) for low in range(0, len(examples), EVALUATION_BATCH_SIZE)]
