"""Metrics: how clients fare, against numbers worked out by hand, and the totals of a run."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.evaluation import EvaluationResult
from fedloom.runs.metrics import RoundMetricsTimer, client_accuracy_metrics, summarize_run_metrics


def score(hits: list[int], seen: list[int]) -> EvaluationResult:
    return EvaluationResult(1.0, sum(seen), np.array(hits, dtype=np.int64), np.array(seen, dtype=np.int64))


def test_client_accuracy_by_hand() -> None:
    # By class 1/2, 3/4, 1; the clients have all of class 0, half and half of 1 and 2, and one of each.
    counts = np.array([[4, 0, 0], [0, 3, 3], [1, 1, 1]])
    among = client_accuracy_metrics(score([1, 3, 5], [2, 4, 5]), counts)
    assert among is not None
    mean, worst = among
    assert mean == pytest.approx((0.5 + 0.875 + 0.75) / 3)
    assert worst == pytest.approx(0.5)


def test_the_worst_tenth_is_rounded_up() -> None:
    # Eleven clients: the worst two. Client k has k of the class that is always right, of 10.
    counts = np.array([[10 - k, k] for k in range(11)])
    among = client_accuracy_metrics(score([0, 7], [3, 7]), counts)
    assert among == (pytest.approx(0.5), pytest.approx((0.0 + 0.1) / 2))


def test_classes_that_were_not_tested_do_not_count() -> None:
    counts = np.array([[5, 5, 90], [0, 0, 8], [10, 0, 0]])
    among = client_accuracy_metrics(score([1, 4, 0], [2, 4, 0]), counts)
    assert among == (pytest.approx((0.75 + 0.5) / 2), pytest.approx(0.5)), "a client with untested classes only is out"


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=40))
@settings(deadline=None, max_examples=80)
def test_clients_with_test_samples_of_their_own_are_counted_by_them(tested: list[tuple[int, bool]]) -> None:
    owners, right = np.array([owner for owner, _ in tested]), np.array([hit for _, hit in tested])
    one_class = np.array([int(right.sum())]), np.array([len(right)])
    each = sorted(right[owners == owner].mean() for owner in set(owners.tolist()))
    worst = each[: -(-len(each) // 10)]
    found = client_accuracy_metrics(EvaluationResult(1.0, len(right), *one_class, right), np.zeros((13, 1)), owners)
    assert found == (pytest.approx(np.mean(each)), pytest.approx(np.mean(worst)))


def test_a_regression_with_owners_has_no_accuracy() -> None:
    assert client_accuracy_metrics(score([], []), None, np.array([0, 1])) is None


def test_the_accuracy_for_a_mixture_by_hand() -> None:
    tested = score([1, 3, 0], [2, 4, 0])
    assert tested.accuracy_for(np.array([6, 2, 90])) == pytest.approx((6 * 0.5 + 2 * 0.75) / 8)
    assert tested.accuracy_for(np.array([0, 0, 5])) is None, "the class was not tested"
    assert tested.accuracy_for(tested.count_per_class) == pytest.approx(4 / 6)


def test_empty_clients_are_left_out() -> None:
    counts = np.array([[0, 0], [2, 0], [0, 0]])
    assert client_accuracy_metrics(score([1, 1], [2, 1]), counts) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("hits", "seen", "counts"),
    [
        ([1, 1], [1, 1], None),
        ([0, 0], [0, 0], [[1, 1]]),
        ([1, 0], [1, 0], [[0, 5]]),
        ([1, 1], [1, 1], [[0, 0]]),
        ([], [], np.zeros((2, 0))),
    ],
)
def test_nothing_known_is_none(hits: list[int], seen: list[int], counts: Any) -> None:
    assert client_accuracy_metrics(score(hits, seen), None if counts is None else np.array(counts)) is None


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=3),
    st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=25),
)
@settings(deadline=None, max_examples=80)
def test_client_accuracy_matches_the_definition(classes: list[tuple[int, int]], counts: list[list[int]]) -> None:
    hits, seen = [min(pair) for pair in classes], [max(pair) for pair in classes]
    each = []
    for held in counts:
        tested = [k for k in range(3) if seen[k]]
        total = sum(held[k] for k in tested)
        if total:
            each.append(sum(held[k] * hits[k] / seen[k] for k in tested) / total)
    among = client_accuracy_metrics(score(hits, seen), np.array(counts))
    if not each:
        assert among is None
        return
    worst = sorted(each)[: -(-len(each) // 10)]
    assert among == (pytest.approx(sum(each) / len(each)), pytest.approx(sum(worst) / len(worst)))
    assert among[1] <= among[0] + 1e-12


# the clock


def test_the_clock_adds_up_parts_and_waiting() -> None:
    clock = RoundMetricsTimer()
    with clock.measure("a"):
        time.sleep(0.01)
    with pytest.raises(KeyError), clock.measure("a"):
        raise KeyError("a part that fails is timed too")
    clock.add("b", 2.0)
    clock.add("b", -0.5)

    def slow() -> Iterator[int]:
        for item in range(3):
            time.sleep(0.005)
            yield item

    taken = []
    for item in clock.measure_iterator(slow(), "wait"):
        taken.append(item)
        time.sleep(0.02)
    assert taken == [0, 1, 2]
    report = clock.report()
    assert set(report) == {"a", "b", "wait", "total"}
    assert report["a"] >= 0.01
    assert report["b"] == 1.5
    assert report["wait"] >= 0.015
    assert report["total"] >= report["a"] + report["wait"] + 0.06 - 1e-5, "work between the items is not waiting"
    assert report["wait"] < report["total"] - 0.06 + 1e-5


# totals


def record(round: int, **values: Any) -> dict[str, Any]:
    base = {"bytes_up": 10, "bytes_down": 20, "models_up": 1.5, "models_down": 2.0, "failed": 1}
    return {"round": round, **(base if round else {}), "seconds": {"total": 0.25}, **values}


def test_totals_are_of_trained_rounds_and_results_are_means_over_the_window() -> None:
    history = [
        record(0, accuracy=0.9, loss=2.3),
        record(1, accuracy=0.2, loss=1.5),
        record(2, accuracy=0.8, loss=0.5, client_accuracy_mean=0.7, client_accuracy_worst10=0.2),
        record(
            3,
            accuracy=0.6,
            loss=0.9,
            client_accuracy_mean=0.5,
            client_accuracy_worst10=0.1,
            personal_accuracy_mean=0.7,
            personal_accuracy_worst10=0.3,
        ),
        record(4),
    ]
    assert summarize_run_metrics(history, 2) == {
        "rounds": 4,
        "window": 2,
        "accuracy": pytest.approx(0.7),
        "loss": pytest.approx(0.7),
        "client_accuracy_mean": pytest.approx(0.6),
        "client_accuracy_worst10": pytest.approx(0.15),
        "personal_accuracy_mean": 0.7,
        "personal_accuracy_worst10": 0.3,
        "accuracy_std": pytest.approx(0.02**0.5),
        "loss_std": pytest.approx(0.08**0.5),
        "last_accuracy": 0.6,
        "last_loss": 0.9,
        "best_accuracy": 0.8,
        "bytes_up": 40,
        "bytes_down": 80,
        "models_up": 6.0,
        "models_down": 8.0,
        "failed": 4,
        "seconds": 1.25,
    }
    last = summarize_run_metrics(history, 1)
    assert (last["window"], last["accuracy"], last["accuracy_std"]) == (1, 0.6, None)


def test_totals_of_nothing_and_of_a_run_without_scores() -> None:
    nothing = summarize_run_metrics([], 3)
    assert nothing["rounds"] == nothing["window"] == 0
    assert nothing["accuracy"] is nothing["loss"] is nothing["best_accuracy"] is nothing["last_accuracy"] is None
    unscored = summarize_run_metrics([record(0), record(1)], 3)
    assert (unscored["rounds"], unscored["bytes_up"], unscored["accuracy"]) == (1, 10, None)


def test_totals_of_a_regression_have_a_loss_and_no_accuracy() -> None:
    totals = summarize_run_metrics([record(0, accuracy=None, loss=4.0), record(1, accuracy=None, loss=3.0)], 1)
    assert (totals["loss"], totals["last_loss"], totals["accuracy"], totals["best_accuracy"]) == (3.0, 3.0, None, None)


def test_a_loss_that_overflowed_in_the_window_leaves_no_mean() -> None:
    history = [record(1, accuracy=0.5, loss=1.0), record(2, accuracy=0.4, loss=None)]
    totals = summarize_run_metrics(history, 2)
    assert (totals["accuracy"], totals["loss"], totals["loss_std"]) == (pytest.approx(0.45), None, None)
