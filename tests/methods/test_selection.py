"""The choice among cached models: against explicit vectors and brute force, and within its time."""

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.methods import selection
from fedloom.methods.selection import Array, Choice, Fixed, enumerate_all, objective, solve

Problem = tuple[list[Array], Array, Array, Fixed, float]
seeds = st.integers(0, 2**32 - 1)


def from_vectors(
    losses: list[Array], candidates: list[Array], fixed: Array, fixed_losses: Array, L: float = 1.0
) -> Problem:
    rows, total = np.concatenate(candidates), fixed.sum(0)
    known = Fixed(len(fixed), float(fixed_losses.sum()), float((fixed**2).sum()), float(total @ total))
    return losses, rows @ rows.T, rows @ total, known, L


def random_vectors(seed: int, most: int, K: int = 3) -> tuple[list[Array], list[Array], Array, Array]:
    """Losses and candidates of 1 to `most` clients with 1 to K candidates each, and 0 to 3 fixed models."""
    rng = np.random.default_rng(seed)
    P, d, m0 = int(rng.integers(1, most + 1)), int(rng.integers(1, 20)), int(rng.integers(0, 4))
    sizes = rng.integers(1, K + 1, P)
    shared = rng.normal(size=d)
    losses = [rng.random(k) for k in sizes]
    candidates = [shared + rng.normal(size=d) / 2 + rng.normal(size=(k, d)) for k in sizes]
    return losses, candidates, shared + rng.normal(size=(m0, d)), rng.random(m0)


def large(P: int, d: int, seed: int, shared: bool, K: int = 3) -> Problem:
    """Clients that drift from a shared model, or candidates without any structure."""
    rng = np.random.default_rng(seed)
    candidates = rng.normal(size=(P, K, d))
    if shared:
        candidates = rng.normal(size=d) + 0.7 * rng.normal(size=(P, 1, d)) + 0.5 * candidates
    losses = rng.random((P, K)) * (0.5 if shared else 0.1)
    return from_vectors(list(losses), list(candidates), np.zeros((0, d)), np.zeros(0))


def eq_6(losses: list[Array], candidates: list[Array], fixed: Array, F: Array, L: float, picks: Any) -> float:
    """Mean loss plus L/2 times the mean squared distance to the mean, on the vectors themselves."""
    chosen = np.stack([*fixed, *(own[pick] for own, pick in zip(candidates, picks, strict=True))])
    loss = [*F, *(own[pick] for own, pick in zip(losses, picks, strict=True))]
    return float(np.mean(loss) + L / 2 * np.mean(((chosen - chosen.mean(0)) ** 2).sum(1)))


def check(choice: Choice, problem: Problem) -> None:
    assert all(0 <= pick < len(own) for pick, own in zip(choice.picks, problem[0], strict=True))
    assert choice.objective == objective(*problem, choice.picks)
    assert np.isfinite(choice.bound)
    assert choice.gap >= 0
    assert choice.proven == (choice.gap == 0)


@pytest.fixture
def always_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems, too, go through branch and bound; else `solve` would only enumerate them."""
    monkeypatch.setattr(selection, "LEAF", 12)


def test_by_hand() -> None:
    """Clients at {0, 3} and {1, 5} on a line, one fixed model at 2: the means and variances can be seen."""
    problem = from_vectors(
        [np.array([0.0, 0.3]), np.array([0.6, 0.0])], [np.array([[0.0], [3.0]]), np.array([[1.0], [5.0]])],
        np.array([[2.0]]), np.array([0.3]), L=3.0,
    )  # fmt: skip
    values = [objective(*problem, picks) for picks in itertools.product(range(2), repeat=2)]
    # Points 0 1 2, 0 5 2, 3 1 2, 3 5 2: sums of squared distances 2, 38/3, 2, 14/3; J = (losses + 3/2 of that) / 3.
    assert values == pytest.approx([(0.9 + 3) / 3, (0.3 + 19) / 3, (1.2 + 3) / 3, (0.6 + 7) / 3])
    assert enumerate_all(*problem).picks == (0, 0)
    assert enumerate_all(*problem).combinations == 4


@given(seeds, st.floats(0, 100))
@settings(max_examples=40, deadline=None)
def test_eq_5_is_eq_6_and_enumeration_is_brute_force(seed: int, L: float) -> None:
    vectors = random_vectors(seed, 5)
    problem = from_vectors(*vectors, L=L)
    values = {}
    for picks in itertools.product(*(range(len(own)) for own in vectors[0])):
        values[picks] = eq_6(*vectors, L, picks)
        assert objective(*problem, picks) == pytest.approx(values[picks], rel=1e-9, abs=1e-9)
    choice = enumerate_all(*problem)
    check(choice, problem)
    assert choice.objective == pytest.approx(min(values.values()), rel=1e-9, abs=1e-9)
    assert choice.combinations == len(values)
    assert choice.proven


@given(seeds, st.sampled_from([0.0, 0.1, 1.0, 10.0]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_branch_and_bound_is_enumeration(seed: int, L: float, many_ties: bool) -> None:
    losses, candidates, fixed, F = random_vectors(seed, 9)
    if many_ties:  # small integers: many choices are exactly equal
        losses, candidates, fixed = [own * 0 for own in losses], [np.round(own) for own in candidates], np.round(fixed)
    problem = from_vectors(losses, candidates, fixed, F, L)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "LEAF", 12)
        choice = solve(*problem)
    check(choice, problem)
    assert choice.proven
    assert choice.picks == enumerate_all(*problem).picks


@pytest.mark.usefixtures("always_branch")
@pytest.mark.parametrize("P", [9, 12])
@pytest.mark.parametrize(("d", "shared"), [(5, False), (50, True), (500, False)])
def test_branch_and_bound_is_enumeration_at_full_size(d: int, shared: bool, P: int) -> None:
    problem = large(P, d, 7, shared)
    assert solve(*problem).picks == enumerate_all(*problem).picks


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_neither_a_common_shift_nor_a_client_s_loss_level_changes_the_picks(seed: int) -> None:
    losses, candidates, fixed, F = random_vectors(seed, 6)
    plain = solve(*from_vectors(losses, candidates, fixed, F))
    shift = np.random.default_rng(seed + 1).normal(size=fixed.shape[1]) * 10
    moved = solve(*from_vectors(losses, [own + shift for own in candidates], fixed + shift, F))
    assert moved.picks == plain.picks
    assert moved.objective == pytest.approx(plain.objective)
    raised = solve(*from_vectors([losses[0] + 5.0, *losses[1:]], candidates, fixed, F))
    assert raised.picks == plain.picks
    assert raised.objective == pytest.approx(plain.objective + 5.0 / (len(losses) + len(fixed)))


@pytest.mark.parametrize("P", [6, 30])
def test_without_L_each_client_has_its_lowest_loss(P: int) -> None:
    losses, gram, with_fixed, fixed, _ = large(P, 50, 3, True)
    assert solve(losses, gram, with_fixed, fixed, 0.0).picks == tuple(int(np.argmin(own)) for own in losses)


def test_a_huge_L_is_the_least_variance() -> None:
    _, candidates, fixed, F = random_vectors(11, 5)
    problem = from_vectors([np.full(len(own), 0.5) for own in candidates], candidates, fixed, F, 1e6)
    variance = {
        picks: np.stack([*fixed, *(own[p] for own, p in zip(candidates, picks, strict=True))]).var(0).sum()
        for picks in itertools.product(*(range(len(own)) for own in candidates))
    }
    assert solve(*problem).picks == min(variance, key=lambda picks: variance[picks])


def test_a_single_client_and_a_single_candidate() -> None:
    one = from_vectors([np.array([0.2, 0.1, 0.3])], [np.eye(3)], np.zeros((0, 3)), np.zeros(0))
    assert solve(*one).picks == (1,)  # alone, a client is its own mean: only the loss counts
    assert solve(*one).objective == pytest.approx(0.1)
    alone = from_vectors([np.array([0.2])], [np.ones((1, 3))], np.zeros((0, 3)), np.zeros(0))
    assert solve(*alone) == Choice((0,), pytest.approx(0.2), pytest.approx(0.2), 1, True)  # type: ignore[arg-type]


@pytest.mark.parametrize("P", [4, 30, 60])
@pytest.mark.parametrize("L", [0.0, 1.0])
def test_ties_go_to_the_newest(P: int, L: float) -> None:
    """All equal; then two equal candidates of each client, of which the newer must win even where all have them."""
    equal = from_vectors([np.ones(3)] * P, [np.full((3, 4), 0.1)] * P, np.zeros((0, 4)), np.zeros(0), L)
    assert solve(*equal).picks == (2,) * P
    rng = np.random.default_rng(5)
    own = [np.repeat(rng.normal(size=(2, 50)), [1, 2], axis=0)[[1, 0, 2]] for _ in range(P)]  # 0 and 2 are equal
    losses = [np.repeat(rng.random(2), [1, 2])[[1, 0, 2]] for _ in range(P)]
    choice = solve(*from_vectors(losses, own, np.zeros((0, 50)), np.zeros(0), L), time_limit=5.0)
    assert choice.proven
    assert 0 not in choice.picks


def test_differences_within_rounding_are_ties() -> None:
    losses = [np.array([0.3, 0.3 + 1e-15]), np.array([0.3, 0.3 + 1e-9])]
    problem = from_vectors(losses, [np.ones((2, 2))] * 2, np.zeros((0, 2)), np.zeros(0))
    assert enumerate_all(*problem).picks == (1, 0)


@pytest.mark.parametrize(("d", "shared"), [(50, True), (5, False), (500, False)])
def test_thirty_clients_are_solved(d: int, shared: bool) -> None:
    problem = large(30, d, 0, shared)
    choice = solve(*problem, time_limit=3.0)
    check(choice, problem)
    # Whatever was found must not be improved by any change of one client.
    for n, a in itertools.product(range(30), range(3)):
        changed = [*choice.picks[:n], a, *choice.picks[n + 1 :]]
        assert objective(*problem, changed) >= choice.objective - 1e-9
    assert choice.objective <= objective(*problem, [2] * 30)
    if choice.proven:  # then it does not depend on the clock
        assert solve(*problem, time_limit=60.0) == choice


@pytest.mark.parametrize("open_nodes", [2000, 5])
def test_the_time_limit_ends_the_search_with_a_bound(open_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal norms and losses leave nothing but the pairs: no bound is close, and the search cannot end."""
    monkeypatch.setattr(selection, "OPEN_NODES", open_nodes)
    rows = np.random.default_rng(0).normal(size=(40, 4, 300))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    problem = from_vectors([np.zeros(4)] * 40, list(rows), np.zeros((0, 300)), np.zeros(0))
    for limit in (0.0, 0.5):
        began = time.monotonic()
        choice = solve(*problem, time_limit=limit)
        assert time.monotonic() - began < limit + 1.0
        check(choice, problem)
        assert not choice.proven
        assert 0 < choice.bound < choice.objective


def test_enumeration_is_fast() -> None:
    problem = large(10, 50, 0, True)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        enumerate_all(*problem)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.05


def test_what_does_not_fit_is_refused() -> None:
    losses, gram, with_fixed, fixed, L = large(2, 3, 0, False)
    with pytest.raises(ValueError, match="do not fit"):
        enumerate_all(losses[:1], gram, with_fixed, fixed, L)
    with pytest.raises(ValueError, match="do not fit"):
        solve([], np.zeros((0, 0)), np.zeros(0), fixed, L)
