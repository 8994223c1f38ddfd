"""Evaluation results that can be added up, and the slices of a test set."""

from collections.abc import Sized
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

EVALUATION_BATCH_SIZE = 500
"""Samples in a batch of an evaluation, or of an estimate of batch-norm statistics. Fixed: the rounding of a sum
depends on it."""


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation: sums over samples, so that results of slices can be added."""

    loss_sum: float
    count: int
    correct_per_class: np.ndarray
    count_per_class: np.ndarray
    is_correct: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    """Whether each sample is classified correctly, in order; empty without classes."""

    def __add__(self, other: "EvaluationResult") -> "EvaluationResult":
        return EvaluationResult(
            self.loss_sum + other.loss_sum,
            self.count + other.count,
            self.correct_per_class + other.correct_per_class,
            self.count_per_class + other.count_per_class,
            np.concatenate([self.is_correct, other.is_correct]),
        )

    @property
    def loss(self) -> float:
        return self.loss_sum / self.count if self.count else float("nan")

    @property
    def accuracy(self) -> float | None:
        """Return the share of correctly classified samples, or None without classes."""
        return float(self.correct_per_class.sum() / self.count_per_class.sum()) if self.count_per_class.sum() else None

    def accuracy_for(self, label_counts: np.ndarray) -> float | None:
        """Return the accuracy per class weighted by `label_counts`, or None if none of these classes was tested."""
        held = np.where(self.count_per_class > 0, label_counts, 0).astype(np.float64)
        return (
            float(held @ (self.correct_per_class / np.maximum(self.count_per_class, 1)) / held.sum())
            if held.sum()
            else None
        )


def evaluation_slices(examples: Sized) -> list[slice]:
    """Return the slices of a test set. They are always the same, and every engine adds up results in this order."""
    return [slice(low, low + EVALUATION_BATCH_SIZE) for low in range(0, len(examples), EVALUATION_BATCH_SIZE)]
