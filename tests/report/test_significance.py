"""Paired t-tests and Holm's correction, against tables and against scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from fedloom.report.significance import adjust_p_values, format_p_value, interval_half_width, paired_p_value

GAPS = st.lists(st.integers(-1000, 1000).map(lambda n: n / 1000), min_size=1, max_size=12)


@given(GAPS)
def test_p_values_and_intervals_are_those_of_scipy(gaps):
    p, half = paired_p_value(gaps), interval_half_width(gaps)
    if len(gaps) < 2 or len(set(gaps)) == 1:
        assert half is None
        assert p == (1.0 if len(gaps) >= 3 else None)
        return
    expected = ttest_1samp(gaps, 0.0)
    low, high = expected.confidence_interval(0.95)
    assert half == pytest.approx((high - low) / 2)
    assert p == (pytest.approx(expected.pvalue) if len(gaps) >= 3 else None)


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1; a corrected value never falls below the one before it.
    assert adjust_p_values([0.04, 0.01, None, 0.03, 0.02]) == pytest.approx([0.06, 0.04, None, 0.06, 0.06])
    assert adjust_p_values([0.5, 0.9]) == [1.0, 1.0]
    assert adjust_p_values([]) == []


@given(st.lists(st.one_of(st.floats(0, 1), st.none()), max_size=8))
def test_holm_lies_between_no_correction_and_bonferroni_and_keeps_the_order(p_values):
    adjusted = adjust_p_values(p_values)
    pairs = [(p, q) for p, q in zip(p_values, adjusted, strict=True) if p is not None]
    assert [q is None for q in adjusted] == [p is None for p in p_values]
    assert all(p <= q <= min(1, p * len(pairs)) + 1e-12 for p, q in pairs)
    assert [q for _, q in sorted(pairs)] == sorted(q for _, q in pairs)


def test_of_ten_true_null_hypotheses_rarely_one_is_rejected():
    """In 400 families of ten tests each, about 5 % have any false claim. Uncorrected it would be 40 %."""
    draw = np.random.default_rng(0)
    families = [[paired_p_value(draw.normal(size=5)) for _ in range(10)] for _ in range(400)]
    false = np.mean([min(adjust_p_values(family)) < 0.05 for family in families])
    assert false < 0.08
    assert np.mean([min(family) < 0.05 for family in families]) > 0.3


@pytest.mark.parametrize(
    ("p", "text"),
    [(0.0001, "p < 0.001"), (0.004, "p = 0.004"), (0.0896, "p = 0.090"), (0.371, "p = 0.37"), (1.0, "p = 1.00")],
)
def test_p_values_as_text(p, text):
    assert format_p_value(p) == text
