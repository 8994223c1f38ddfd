"""Tests of partition statistics, by hand and by their definitions."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.partitions.statistics import compute_partition_statistics, count_partition_labels


def test_by_hand() -> None:
    labels = np.array([0, 0, 1, 1, 2, 2, 3, 3, 0])
    parts = [np.array([0, 1]), np.array([2, 3, 4, 5]), np.array([6, 8]), np.array([], dtype=np.int64)]
    assert count_partition_labels(parts, labels, 4).tolist() == [[2, 0, 0, 0], [0, 2, 2, 0], [1, 0, 0, 1], [0, 0, 0, 0]]
    found = compute_partition_statistics(parts, labels, 4)
    assert (found.clients, found.empty, found.samples, found.left_out) == (4, 1, 8, 1)
    assert (found.sizes.smallest, found.sizes.median, found.sizes.mean, found.sizes.largest) == (0, 2, 2, 4)
    assert found.sizes.std == pytest.approx(np.sqrt(2))
    # Differences of the six pairs: 2, 0, 2, 2, 4, 2; each counts twice among 16, over twice the mean.
    assert found.sizes.gini == pytest.approx(2 * 12 / 16 / 4)
    skew = found.labels
    assert skew is not None
    assert skew.entropy == pytest.approx((0 + 1 + 1) / 3)
    shares = np.array([3, 2, 2, 1]) / 8
    assert skew.entropy_of_all == pytest.approx(-np.sum(shares * np.log2(shares)))
    assert (skew.classes_fewest, skew.classes_mean, skew.classes_most) == (1, pytest.approx(5 / 3), 2)
    assert skew.distance_to_all == pytest.approx((5 / 8 + 4 / 8 + 4 / 8) / 3)
    assert skew.distance_between == pytest.approx((1 + 0.5 + 1) / 3)


def test_the_odd_sample_is_not_a_class() -> None:
    labels = np.array([0] * 99 + [1] * 3)
    found = compute_partition_statistics([np.arange(100), np.arange(100, 102)], labels, 2).labels
    assert found is not None
    assert (found.classes_fewest, found.classes_most) == (1, 1)


@settings(max_examples=50, deadline=None)
@given(clients=st.integers(1, 12), classes=st.integers(1, 6), seed=st.integers(0, 1000))
def test_distances_are_those_of_all_pairs(clients: int, classes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, owner = rng.integers(0, classes, 80), rng.integers(0, clients, 80)
    parts = [np.flatnonzero(owner == client) for client in range(clients)]
    found = compute_partition_statistics(parts, labels, classes)
    held = np.array([len(part) for part in parts])
    assert found.sizes.gini == pytest.approx(np.abs(held[:, None] - held).mean() / (2 * held.mean()))
    shares = [np.bincount(labels[part], minlength=classes) / len(part) for part in parts if len(part)]
    pairs = [np.abs(a - b).sum() / 2 for a, b in combinations(shares, 2)]
    assert found.labels is not None
    assert found.labels.distance_between == pytest.approx(np.mean(pairs) if pairs else 0.0)
    assert 0 <= found.labels.distance_to_all <= 1


def test_numbers_to_predict_have_no_label_skew() -> None:
    found = compute_partition_statistics([np.arange(5), np.arange(5, 10)], np.linspace(0, 1, 10), 0)
    assert found.labels is None
    assert [name for name, _ in found.table_rows()] == ["clients", "samples", "samples of a client", "mean ± std, Gini"]


def test_a_partition_without_samples() -> None:
    found = compute_partition_statistics([np.zeros(0, dtype=np.int64)] * 2, np.arange(4), 4)
    assert (found.empty, found.left_out, found.sizes.gini, found.labels) == (2, 4, 0.0, None)


def test_the_table_says_what_is_unusual() -> None:
    labels = np.arange(10) % 2
    rows = dict(compute_partition_statistics([np.arange(6), np.arange(6, 6)], labels, 2).table_rows())
    assert rows["clients"] == "2, 1 of them empty"
    assert rows["samples"] == "6; 4 are left out"
    assert dict(compute_partition_statistics([np.arange(10)], labels, 2).table_rows())["samples"] == "10"
