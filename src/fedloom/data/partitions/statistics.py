"""Statistics of a partition: sizes of the clients and label skew."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.partitions.base import Indices, Labels

Floats = NDArray[np.float64]

HELD = 0.01
"""Share of a client's samples from which on a class counts; single samples of a class do not."""


@dataclass(frozen=True)
class _ClientSizes:
    """How many samples the clients have."""

    smallest: int
    median: float
    mean: float
    largest: int
    std: float
    gini: float
    """0 if all have equally many, near 1 if one client has almost all."""


@dataclass(frozen=True)
class _LabelSkew:
    """How much the label distributions of the clients differ; clients without samples do not count."""

    entropy: float
    """Entropy of a client's labels in bits, mean over clients."""
    entropy_of_all: float
    classes_fewest: int
    """Fewest classes of a client, counting classes with more than 1 % of its samples."""
    classes_mean: float
    classes_most: int
    distance_to_all: float
    """Total variation distance (0 equal, 1 disjoint) between the labels of a client and of all clients, mean."""
    distance_between: float
    """Total variation distance between two clients, mean over all pairs; 0 for a single client."""


@dataclass(frozen=True)
class _PartitionStatistics:
    """Statistics of a partition."""

    clients: int
    empty: int
    """Clients without samples."""
    samples: int
    """Samples that belong to a client."""
    left_out: int
    sizes: _ClientSizes
    labels: _LabelSkew | None
    """None for a regression."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    def table_rows(self) -> list[tuple[str, str]]:
        """Return pairs of a name and a value, for a table."""
        sizes, found = self.sizes, self.labels
        rows = [
            ("clients", f"{self.clients:,}" + (f", {self.empty:,} of them empty" if self.empty else "")),
            ("samples", f"{self.samples:,}" + (f"; {self.left_out:,} are left out" if self.left_out else "")),
            ("samples of a client", f"{sizes.smallest:,} to {sizes.largest:,}, median {sizes.median:,g}"),
            ("mean ± std, Gini", f"{sizes.mean:,.1f} ± {sizes.std:,.1f}, {sizes.gini:.3f}"),
        ]
        if found is None:
            return rows
        few, most = found.classes_fewest, found.classes_most
        return [
            *rows,
            ("classes of a client", f"{few} to {most}, mean {found.classes_mean:.1f} (with more than 1 % of it)"),
            ("label entropy", f"{found.entropy:.3f} bits, mean over clients; {found.entropy_of_all:.3f} of all"),
            ("distance to all", f"{found.distance_to_all:.3f} (total variation of labels: 0 the same, 1 disjoint)"),
            ("distance of a pair", f"{found.distance_between:.3f} (the same between two clients, mean)"),
        ]


def count_partition_labels(client_indices: Sequence[Indices], labels: Labels, classes: int) -> Indices:
    """Count how often each client (row) has each class (column)."""
    counts = np.zeros((len(client_indices), classes), dtype=np.int64)
    for client_id, part in enumerate(client_indices):
        counts[client_id] = np.bincount(labels[part].astype(np.int64), minlength=classes)
    return counts


def compute_partition_statistics(
    client_indices: Sequence[Indices], labels: Labels, classes: int
) -> _PartitionStatistics:
    """Compute the statistics of a partition; `classes` is 0 for a regression."""
    held = np.array([len(part) for part in client_indices])
    sizes = _ClientSizes(
        smallest=int(held.min()),
        median=float(np.median(held)),
        mean=float(held.mean()),
        largest=int(held.max()),
        std=float(held.std()),
        gini=_spread(held.astype(np.float64)) / (2 * held.mean()) if held.any() else 0.0,
    )
    skew = _label_skew(count_partition_labels(client_indices, labels, classes)) if classes and held.any() else None
    left_out = len(labels) - int(held.sum())
    return _PartitionStatistics(len(client_indices), int(np.sum(held == 0)), int(held.sum()), left_out, sizes, skew)


def _label_skew(counts: Indices) -> _LabelSkew:
    counts = counts[counts.sum(axis=1) > 0]
    shares = counts / counts.sum(axis=1, keepdims=True)
    overall = counts.sum(axis=0) / counts.sum()
    held = np.sum(shares > HELD, axis=1)
    clients = len(counts)
    # Half the sum over classes of the mean difference of two clients. `_spread` also pairs each client with itself.
    pairs = sum(_spread(column) for column in shares.T) * clients / max(clients - 1, 1)
    return _LabelSkew(
        entropy=float(_entropy(shares).mean()),
        entropy_of_all=float(_entropy(overall)),
        classes_fewest=int(held.min()),
        classes_mean=float(held.mean()),
        classes_most=int(held.max()),
        distance_to_all=float(np.abs(shares - overall).sum(axis=1).mean() / 2),
        distance_between=float(pairs / 2),
    )


def _spread(values: Floats) -> float:
    """Return the mean of |a - b| over all ordered pairs, in n log n by sorting."""
    n = len(values)
    return float(2 * np.sum((2 * np.arange(n) - n + 1) * np.sort(values)) / n**2)


def _entropy(shares: Floats) -> Floats:
    return np.asarray(-np.sum(shares * np.log2(np.where(shares > 0, shares, 1.0)), axis=-1) + 0.0)
