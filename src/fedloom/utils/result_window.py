"""The window of a run: the last evaluations, whose mean is the result.

One evaluation is noisy, and the best one would be chosen with the test data. The initial model (round 0) is no result
of training, so its evaluation never counts.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT_WINDOW = 10
"""Evaluations to average."""
MEASURED = {"accuracy", "loss", "personal_accuracy_mean", "held_out_accuracy_mean"}
"""Keys of an evaluation. Without a common test set or a global model, the last two may be the only ones."""
LARGEST_SHARE = 5
"""At most one evaluation in this many is averaged, so that a short run is not averaged over its rise."""


def limit_window(window: int, num_evaluations: int) -> int:
    """Return how many evaluations a run averages: `window`, but at most a fifth of all of them and at least one."""
    return max(1, min(window, num_evaluations // LARGEST_SHARE))


def count_evaluations(rounds: int, eval_every: int) -> int:
    """Return the number of evaluations of a run of `rounds` rounds, without that of the initial model."""
    return math.ceil(rounds / eval_every)


def select_evaluations(history: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records with an evaluation, without that of the initial model."""
    return [record for record in history if record["round"] > 0 and MEASURED & record.keys()]


def select_window_values(history: Sequence[Mapping[str, Any]], key: str, window: int) -> list[float]:
    """Return `key` in the last `window` evaluations that measured it.

    Returns an empty list if one of them is not finite. A run that diverged has no result; the mean of the other
    evaluations would hide it.
    """
    values = [parse_window_value(record[key]) for record in select_evaluations(history)[-window:] if key in record]
    finite = [value for value in values if value is not None]
    return finite if len(finite) == len(values) else []


def compute_window_mean(values: Sequence[float]) -> float | None:
    """Return the mean of the values in a window; None without values."""
    return statistics.fmean(values) if values else None


def compute_window_std(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation of the values in a window; None for fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else None


def parse_window_value(value: object) -> float | None:
    """Return `value` as a float if it is a finite number, else None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of more than 308 digits
        return None
