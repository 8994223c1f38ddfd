"""Metrics of a run: round times, client accuracies, divergence, and the summary."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.core.evaluation import EvaluationResult
from fedloom.utils.result_window import (
    compute_window_mean,
    compute_window_std,
    select_evaluations,
    select_window_values,
)

RESULT_KEYS = (
    "accuracy",
    "loss",
    "client_accuracy_mean",
    "client_accuracy_worst10",
    "personal_accuracy_mean",
    "personal_accuracy_worst10",
)
"""Keys of a record whose mean over the window is a result of the run."""
HELD_OUT_KEYS = ("held_out_accuracy_mean", "held_out_accuracy_worst10")
"""The same of runs with held-out clients."""
PATIENCE = 3
"""Successive rounds with at least half of the updates non-finite after which a run stops."""


def client_accuracy_metrics(
    result: EvaluationResult, label_counts: np.ndarray | None, test_owners: NDArray[np.int64] | None = None
) -> tuple[float, float] | None:
    """Return the accuracy of the global model for clients: (mean, mean over the worst 10 % of the clients).

    If `test_owners` names the client of each test sample, a client's accuracy is that on its own samples; clients
    without any are left out. Otherwise it is the accuracy per class on the test set, weighted by the client's classes:
    the expected accuracy on new samples of that client. None if the classes of the clients are not known.
    """
    if test_owners is not None:
        if not result.count_per_class.sum():
            return None
        num_tested = np.bincount(test_owners)
        num_correct = np.bincount(test_owners[result.is_correct], minlength=len(num_tested))
        return mean_and_worst_decile(num_correct[num_tested > 0] / num_tested[num_tested > 0])
    if label_counts is None or not result.count_per_class.sum():
        return None
    tested = result.count_per_class > 0
    by_class = result.correct_per_class[tested] / result.count_per_class[tested]
    held = label_counts[:, tested].astype(np.float64)
    totals = held.sum(axis=1)
    accuracies = (held @ by_class)[totals > 0] / totals[totals > 0]
    return mean_and_worst_decile(accuracies) if len(accuracies) else None


def mean_and_worst_decile(accuracies: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean over clients, and the mean over the worst 10 % of them (their number rounded up)."""
    ordered = np.sort(accuracies)
    return float(ordered.mean()), float(ordered[: ceil(len(ordered) / 10)].mean())


class RoundMetricsTimer:
    """Measure the seconds spent in each part of a round."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure the time inside the `with` block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def measure_iterator(self, source: Iterator[Any], name: str) -> Iterator[Any]:
        """Yield the items of `source`; the time to produce them counts as `name`."""
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
        """Return the seconds of all parts and the total, rounded to microseconds."""
        return {name: round(value, 6) for name, value in {**self.seconds, "total": self.total()}.items()}


def summarize_run_metrics(history: list[dict[str, Any]], window: int) -> dict[str, Any]:
    """Return the totals of a run: means over its last `window` evaluations, the last evaluation, bytes, seconds."""
    trained = [record for record in history if record["round"] > 0]
    scored = select_evaluations(history)
    accuracies = [record["accuracy"] for record in scored if record.get("accuracy") is not None]
    last = scored[-1] if scored else {}
    held_out = "held_out_scored" in last
    keys = RESULT_KEYS + (HELD_OUT_KEYS if held_out else ())
    values = {key: select_window_values(history, key, window) for key in keys}
    return {
        "rounds": trained[-1]["round"] if trained else 0,
        "window": min(window, len(scored)),
        **{key: compute_window_mean(of_key) for key, of_key in values.items()},
        **({"held_out_scored": last["held_out_scored"]} if held_out else {}),
        "accuracy_std": compute_window_std(values["accuracy"]),
        "loss_std": compute_window_std(values["loss"]),
        "last_accuracy": last.get("accuracy"),
        "last_loss": last.get("loss"),
        "best_accuracy": max(accuracies, default=None),
        "bytes_up": sum(record["bytes_up"] for record in trained),
        "bytes_down": sum(record["bytes_down"] for record in trained),
        "models_up": sum(record["models_up"] for record in trained),
        "models_down": sum(record["models_down"] for record in trained),
        "failed": sum(record["failed"] for record in trained),
        "seconds": round(sum(record["seconds"]["total"] for record in history), 3),
        **{name: trained[-1][name] for name in ("epsilon", "delta") if trained and name in trained[-1]},
    }


class DivergenceMonitor:
    """Count successive rounds in which at least half of the updates, or their training losses, are not finite."""

    def __init__(self) -> None:
        self._rounds = 0
        self._message = ""

    @property
    def message(self) -> str | None:
        """Return why the run must stop; None if it may continue."""
        return self._message if self._rounds >= PATIENCE else None

    def add_round(self, round: int, non_finite: int, received: int) -> None:
        """Add round `round`, counted from 1: of `received` updates, `non_finite` were not finite."""
        self._rounds = self._rounds + 1 if received and 2 * non_finite >= received else 0
        of = f"{non_finite} of {received} updates {'was' if received == 1 else 'were'} non-finite"
        self._message = f"training diverged in round {round}: {of}; lower --lr"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint saves."""
        return {"rounds": self._rounds, "message": self._message}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._rounds, self._message = state["rounds"], state["message"]
