"""Paired t-tests over seeds, with Holm's correction for several tests."""

from collections.abc import Sequence

import numpy as np

ENOUGH = 3
"""Common seeds needed to judge a difference. Two seeds agree by chance too easily."""
LEVEL = 0.05
"""A difference is significant if its corrected p-value is below this."""
NO_SPREAD = 1e-9
"""A standard deviation below this is rounding: all seeds gave the same difference."""


def interval_half_width(differences: Sequence[float]) -> float | None:
    """Return half the width of the 95 % t-interval of the mean.

    None for one seed, or if all seeds gave the same difference: accuracy changes in steps of one test sample, so equal
    differences show only that the measure is coarse.
    """
    error = _standard_error(differences)
    if error is None:
        return None
    from scipy.special import stdtrit  # type: ignore[import-untyped, unused-ignore]  # scipy has no types

    return float(stdtrit(len(differences) - 1, 0.975) * error)


def paired_p_value(differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of a paired t-test; None with too few seeds, 1 if all gave the same difference."""
    if len(differences) < ENOUGH:
        return None
    error = _standard_error(differences)
    if error is None:
        return 1.0
    from scipy.special import stdtr

    return float(min(1.0, 2 * stdtr(len(differences) - 1, -abs(float(np.mean(differences))) / error)))


def adjust_p_values(p_values: Sequence[float | None]) -> list[float | None]:
    """Correct the p-values of one family of tests by Holm's method. None stays None and is no test."""
    order = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, at) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        adjusted[at] = largest
    return adjusted


def format_p_value(p: float) -> str:
    """Format a p-value: p = 0.004, p < 0.001."""
    return "p < 0.001" if p < 0.0005 else f"p = {p:.3f}" if p < 0.0995 else f"p = {p:.2f}"


def _standard_error(differences: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None for one seed or without spread."""
    if len(differences) < 2 or (spread := float(np.std(differences, ddof=1))) < NO_SPREAD:
        return None
    return spread / float(np.sqrt(len(differences)))
