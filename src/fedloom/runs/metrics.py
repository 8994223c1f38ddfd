"""What is measured in a round, and what the numbers mean."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.evaluation import EvaluationResult


def client_accuracy_metrics(
    score: EvaluationResult, counts: np.ndarray | None, owners: NDArray[np.int64] | None = None
) -> tuple[float, float] | None:
    """How clients fare with the deployed model: (mean over clients, mean over the worst 10 % of them).

    Where `owners` says whose each test sample is, a client's accuracy is that on its own; a client without any is left
    out. Otherwise it is that of each class on the test set, weighted by how often the client has the class: what the
    client may expect on new samples of its own mixture of classes. None when the mixtures are not known.
    """
    if owners is not None:
        if not score.seen.sum():
            return None
        own = np.bincount(owners)
        right = np.bincount(owners[score.right], minlength=len(own))
        return mean_and_worst_decile(right[own > 0] / own[own > 0])
    if counts is None or not score.seen.sum():
        return None
    tested = score.seen > 0
    by_class = score.hits[tested] / score.seen[tested]
    held = counts[:, tested].astype(np.float64)
    totals = held.sum(axis=1)
    accuracies = (held @ by_class)[totals > 0] / totals[totals > 0]
    return mean_and_worst_decile(accuracies) if len(accuracies) else None


def mean_and_worst_decile(accuracies: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """The mean over clients, and the mean over the worst 10 % of them, rounded up."""
    ordered = np.sort(accuracies)
    return float(ordered.mean()), float(ordered[: ceil(len(ordered) / 10)].mean())


class RoundTimer:
    """Seconds spent in each part of a round."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Time that was taken elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def waiting(self, source: Iterator[Any], name: str) -> Iterator[Any]:
        """The items of `source`; the time it takes to make them counts as `name`."""
        while True:
            start = time.perf_counter()
            try:
                item = next(source)
            except StopIteration:
                return
            finally:
                self.add(name, time.perf_counter() - start)
            yield item

    def total(self) -> float:
        return time.perf_counter() - self._start

    def report(self) -> dict[str, float]:
        """All parts and the total, rounded to microseconds."""
        return {name: round(value, 6) for name, value in {**self.seconds, "total": self.total()}.items()}


def summarize_run_metrics(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The totals of a run from its rounds: accuracy and loss of the last evaluation, bytes, seconds."""
    trained = [record for record in history if record["round"] > 0]
    scored = [record for record in history if "loss" in record]
    accuracies = [record["accuracy"] for record in scored if record.get("accuracy") is not None]
    last = scored[-1] if scored else {}
    return {
        "rounds": trained[-1]["round"] if trained else 0,
        "accuracy": last.get("accuracy"),
        "loss": last.get("loss"),
        "best_accuracy": max(accuracies, default=None),
        "client_accuracy_mean": last.get("client_accuracy_mean"),
        "client_accuracy_worst10": last.get("client_accuracy_worst10"),
        "personal_accuracy_mean": last.get("personal_accuracy_mean"),
        "personal_accuracy_worst10": last.get("personal_accuracy_worst10"),
        "bytes_up": sum(record["bytes_up"] for record in trained),
        "bytes_down": sum(record["bytes_down"] for record in trained),
        "models_up": sum(record["models_up"] for record in trained),
        "models_down": sum(record["models_down"] for record in trained),
        "lost": sum(record["lost"] for record in trained),
        "seconds": round(sum(record["seconds"]["total"] for record in history), 3),
        **{name: trained[-1][name] for name in ("epsilon", "delta") if trained and name in trained[-1]},
    }
