"""Data and a network of a user who runs fedloom from Python."""

from typing import Any

import numpy as np
from torch import nn

from fedloom import FederatedDataset

SMALL: dict[str, Any] = {"rounds": 2, "clients_per_round": 3, "epochs": 1, "report": False}


def arrays(clients: int = 4, n: int = 24, classes: int = 3, seed: int = 0) -> FederatedDataset:
    """Clouds of points around one centre for each class."""
    draw = np.random.default_rng(seed)
    centres = 3 * draw.normal(size=(classes, 5))

    def cloud(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = draw.integers(0, classes, count)
        return (centres[y] + draw.normal(size=(count, 5))).astype(np.float32), y

    return FederatedDataset.from_arrays([cloud(n) for _ in range(clients)], cloud(60), classes=classes)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
