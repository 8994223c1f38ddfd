"""Tests of FedCDA's selection against brute force, and of its time and memory."""

import itertools
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.methods._support.model_selection import (
    MOST,
    Array,
    SelectedModelSums,
    enumerate_model_selections,
    model_selection_batch_size,
)

Problem = tuple[list[Array], Array, Array, SelectedModelSums, float]
Vectors = tuple[list[Array], list[Array], Array, Array]
seeds = st.integers(0, 2**32 - 1)


def from_vectors(
    losses: list[Array], candidates: list[Array], fixed: Array, fixed_losses: Array, L: float = 1.0
) -> Problem:
    rows = np.concatenate(candidates)
    known = SelectedModelSums(len(fixed), float(fixed_losses.sum()), float((fixed**2).sum()))
    return losses, rows @ rows.T, rows @ fixed.sum(0), known, L


def random_vectors(seed: int, most: int, K: int = 3) -> Vectors:
    """Losses and candidates of 1 to `most` clients with 1 to K candidates each, and 0 to 3 fixed models."""
    rng = np.random.default_rng(seed)
    P, d, m0 = int(rng.integers(1, most + 1)), int(rng.integers(1, 20)), int(rng.integers(0, 4))
    sizes = rng.integers(1, K + 1, P)
    shared = rng.normal(size=d)
    losses = [rng.random(k) for k in sizes]
    candidates = [shared + rng.normal(size=d) / 2 + rng.normal(size=(k, d)) for k in sizes]
    return losses, candidates, shared + rng.normal(size=(m0, d)), rng.random(m0)


def large(P: int, d: int, K: int = 3) -> Problem:
    """Clients that drift from a shared model."""
    rng = np.random.default_rng(0)
    candidates = rng.normal(size=d) + 0.7 * rng.normal(size=(P, 1, d)) + 0.5 * rng.normal(size=(P, K, d))
    return from_vectors(list(rng.random((P, K)) * 0.5), list(candidates), np.zeros((0, d)), np.zeros(0))


def eq_6(losses: list[Array], candidates: list[Array], fixed: Array, F: Array, L: float, picks: Any) -> float:
    """Mean loss plus L/2 times the mean squared distance to the mean, on the vectors themselves."""
    chosen = np.stack([*fixed, *(own[pick] for own, pick in zip(candidates, picks, strict=True))])
    loss = [*F, *(own[pick] for own, pick in zip(losses, picks, strict=True))]
    return float(np.mean(loss) + L / 2 * np.mean(((chosen - chosen.mean(0)) ** 2).sum(1)))


def values_of(vectors: Vectors, L: float) -> dict[tuple[int, ...], float]:
    """J of every combination, one after the other."""
    return {picks: eq_6(*vectors, L, picks) for picks in itertools.product(*(range(len(own)) for own in vectors[0]))}


def test_by_hand() -> None:
    """Clients at {0, 3} and {1, 5} on a line, one fixed model at 2: the means and variances can be seen."""
    losses, candidates = (
        [np.array([0.0, 0.3]), np.array([0.6, 0.0])],
        [np.array([[0.0], [3.0]]), np.array([[1.0], [5]])],
    )
    vectors = losses, candidates, np.array([[2.0]]), np.array([0.3])
    # Points 0 1 2, 0 5 2, 3 1 2, 3 5 2: sums of squared distances 2, 38/3, 2, 14/3; J = (losses + 3/2 of that) / 3.
    wanted = [(0.9 + 3) / 3, (0.3 + 19) / 3, (1.2 + 3) / 3, (0.6 + 7) / 3]
    assert list(values_of(vectors, 3.0).values()) == pytest.approx(wanted)
    assert enumerate_model_selections(*from_vectors(*vectors, L=3.0)) == (0, 0)


@given(seeds, st.floats(0, 100))
@settings(max_examples=60, deadline=None)
def test_it_finds_what_brute_force_finds(seed: int, L: float) -> None:
    vectors = random_vectors(seed, 6)
    values = values_of(vectors, L)
    picks = enumerate_model_selections(*from_vectors(*vectors, L=L))
    assert values[picks] == pytest.approx(min(values.values()), rel=1e-9, abs=1e-9)


@given(seeds, st.sampled_from([0.0, 1.0, 10.0]))
@settings(max_examples=60, deadline=None)
def test_of_equal_choices_it_takes_the_newest(seed: int, L: float) -> None:
    """With vectors of small integers many choices are equal, and the others are far worse than rounding."""
    losses, candidates, fixed, F = random_vectors(seed, 6)
    vectors = [own * 0 for own in losses], [np.round(own) for own in candidates], np.round(fixed), F
    values = values_of(vectors, L)
    least = min(values.values())
    newest = max(picks for picks, value in values.items() if value <= least + 1e-9)
    assert enumerate_model_selections(*from_vectors(*vectors, L=L)) == newest


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_neither_a_common_shift_nor_a_client_s_loss_level_changes_the_picks(seed: int) -> None:
    losses, candidates, fixed, F = random_vectors(seed, 6)
    plain = enumerate_model_selections(*from_vectors(losses, candidates, fixed, F))
    shift = np.random.default_rng(seed + 1).normal(size=fixed.shape[1]) * 10
    assert (
        enumerate_model_selections(*from_vectors(losses, [own + shift for own in candidates], fixed + shift, F))
        == plain
    )
    assert enumerate_model_selections(*from_vectors([losses[0] + 5.0, *losses[1:]], candidates, fixed, F)) == plain


def test_without_L_each_client_has_its_lowest_loss() -> None:
    losses, gram, with_fixed, fixed, _ = large(12, 50)
    assert enumerate_model_selections(losses, gram, with_fixed, fixed, 0.0) == tuple(
        int(np.argmin(own)) for own in losses
    )


def test_a_huge_L_is_the_least_variance() -> None:
    _, candidates, fixed, F = random_vectors(11, 5)
    problem = from_vectors([np.full(len(own), 0.5) for own in candidates], candidates, fixed, F, 1e6)
    variance = {
        picks: np.stack([*fixed, *(own[p] for own, p in zip(candidates, picks, strict=True))]).var(0).sum()
        for picks in itertools.product(*(range(len(own)) for own in candidates))
    }
    assert enumerate_model_selections(*problem) == min(variance, key=lambda picks: variance[picks])


def test_a_single_client_and_a_single_candidate() -> None:
    one = from_vectors([np.array([0.2, 0.1, 0.3])], [np.eye(3)], np.zeros((0, 3)), np.zeros(0))
    assert enumerate_model_selections(*one) == (1,)  # alone, a client is its own mean: only the loss counts
    alone = from_vectors([np.array([0.2])], [np.ones((1, 3))], np.zeros((0, 3)), np.zeros(0))
    assert enumerate_model_selections(*alone) == (0,)


@pytest.mark.parametrize("P", [4, 12])
@pytest.mark.parametrize("L", [0.0, 1.0])
def test_ties_go_to_the_newest(P: int, L: float) -> None:
    """All equal; then two equal candidates of each client, of which the newer must win even where all have them."""
    equal = from_vectors([np.ones(3)] * P, [np.full((3, 4), 0.1)] * P, np.zeros((0, 4)), np.zeros(0), L)
    assert enumerate_model_selections(*equal) == (2,) * P
    rng = np.random.default_rng(5)
    own = [np.repeat(rng.normal(size=(2, 50)), [1, 2], axis=0)[[1, 0, 2]] for _ in range(P)]  # 0 and 2 are equal
    losses = [np.repeat(rng.random(2), [1, 2])[[1, 0, 2]] for _ in range(P)]
    assert 0 not in enumerate_model_selections(*from_vectors(losses, own, np.zeros((0, 50)), np.zeros(0), L))


def test_differences_within_rounding_are_ties() -> None:
    losses = [np.array([0.3, 0.3 + 1e-15]), np.array([0.3, 0.3 + 1e-9])]
    problem = from_vectors(losses, [np.ones((2, 2))] * 2, np.zeros((0, 2)), np.zeros(0))
    assert enumerate_model_selections(*problem) == (1, 0)


@given(st.integers(2, 2 * MOST))
def test_the_largest_batch_has_as_many_combinations_as_there_may_be(models: int) -> None:
    clients = model_selection_batch_size(models)
    assert clients >= 1
    assert clients == 1 or models**clients <= MOST
    assert models ** (clients + 1) > MOST


def test_enumeration_is_fast() -> None:
    problem = large(10, 50)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        enumerate_model_selections(*problem)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.05


def test_the_largest_choice_takes_little_memory() -> None:
    assert model_selection_batch_size(4) == 10
    problem = large(10, 50, K=4)
    tracemalloc.start()
    enumerate_model_selections(*problem)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 8 * MOST


def test_what_does_not_fit_is_refused() -> None:
    losses, gram, with_fixed, fixed, L = large(2, 3)
    with pytest.raises(ValueError, match="do not fit"):
        enumerate_model_selections(losses[:1], gram, with_fixed, fixed, L)
    with pytest.raises(ValueError, match="do not fit"):
        enumerate_model_selections([], np.zeros((0, 0)), np.zeros(0), fixed, L)
