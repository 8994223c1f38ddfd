"""The window of the last evaluations: how many they are, which ones, and what their mean says."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.config import make_config
from fedloom.utils.result_window import (
    compute_window_mean,
    compute_window_std,
    count_evaluations,
    limit_window,
    select_evaluations,
    select_window_values,
)


@pytest.mark.parametrize(
    ("rounds", "eval_every", "window", "averaged"),
    [
        (30, 1, 10, 6),
        (20, 1, 10, 4),
        (200, 1, 10, 10),
        (200, 1, 3, 3),
        (200, 10, 10, 4),
        (9, 1, 10, 1),
        (1, 1, 1, 1),
        (1, 5, 9, 1),
    ],
)
def test_the_window_of_some_runs(rounds: int, eval_every: int, window: int, averaged: int) -> None:
    assert make_config({"rounds": rounds, "eval_every": eval_every, "window": window}).result_window == averaged


@given(rounds=st.integers(1, 500), eval_every=st.integers(1, 600), window=st.integers(1, 600))
def test_a_window_is_within_its_limits(rounds: int, eval_every: int, window: int) -> None:
    evaluated = [at for at in range(1, rounds + 1) if at % eval_every == 0 or at == rounds]
    assert count_evaluations(rounds, eval_every) == len(evaluated)
    found = limit_window(window, len(evaluated))
    assert 1 <= found <= window
    assert found == 1 or 5 * found <= len(evaluated)
    assert found == window or 5 * (found + 1) > len(evaluated), "no smaller than it must be"


@given(
    values=st.lists(st.one_of(st.floats(0, 1), st.none()), max_size=30),
    before=st.floats(0, 1),
    window=st.integers(1, 12),
)
def test_the_values_are_those_of_the_last_evaluations_after_round_0(
    values: list[float | None], before: float, window: int
) -> None:
    history = [{"round": 0, "accuracy": before}]
    for at, value in enumerate(values, start=1):
        history += [{"round": 2 * at - 1}, {"round": 2 * at, "accuracy": value}]  # every second round is evaluated
    assert len(select_evaluations(history)) == len(values)
    tail = values[-window:]
    expected = [] if None in tail else tail
    found = select_window_values(history, "accuracy", window)
    assert found == expected
    if found:
        mean = compute_window_mean(found)
        assert mean == pytest.approx(sum(found) / len(found))
        assert (compute_window_std(found) is None) == (len(found) == 1)
        assert min(found) - 1e-12 <= mean <= max(found) + 1e-12


@pytest.mark.parametrize("value", [float("nan"), math.inf, None, "0.5", True, 10**400])
def test_a_window_with_a_value_that_is_no_number_has_no_mean(value: object) -> None:
    history = [{"round": 1, "loss": 0.5}, {"round": 2, "loss": value}]
    assert select_window_values(history, "loss", 2) == []
    assert compute_window_mean([]) is compute_window_std([]) is None


def test_a_key_that_only_some_evaluations_measure_is_averaged_over_those() -> None:
    history = [{"round": at, "loss": 1.0} for at in range(1, 4)]
    history[-1]["personal_accuracy_mean"] = 0.75
    assert select_window_values(history, "personal_accuracy_mean", 3) == [0.75]
