"""A small federation, networks with everything that needs care, and runs on them that take a second."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.config import make_config
from fedloom.core.layout import model_digest
from fedloom.data import FederatedDataset, InputTransform, Samples, load_dataset
from fedloom.data.partitions import partition_indices
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.execute import run
from fedloom.runs.resolve import UserObjects

Given = Mapping[str, Mapping[str, Any]]
"""Options by method and key."""


class SmallFederatedDataset(FederatedDataset):
    """A part of the digits over eight clients; some are given fewer samples, or samples that are not numbers."""

    classes = 10
    shape = (64,)

    def __init__(self, sizes: Mapping[int, int] | None = None, poisoned: int | None = None) -> None:
        x, y, test, parts, server = _small_digits()
        self.test, self.server_data = test, server
        self.prepare = InputTransform.identity()
        self._clients = [Samples(x[part], y[part]) for part in parts]
        for client, size in (sizes or {}).items():
            self._clients[client] = self._clients[client][:size]
        if poisoned is not None:
            bad = self._clients[poisoned]
            self._clients[poisoned] = Samples(torch.full_like(bad.x, torch.nan), bad.y)

    def __len__(self) -> int:
        return len(self._clients)

    def client(self, k: int) -> Samples:
        return self._clients[k]

    def samples(self, k: int) -> int:
        return len(self._clients[k])

    def content(self) -> str:
        """A fingerprint of all samples."""
        return model_digest(torch.cat([s.x.flatten() for s in self._clients]))


@lru_cache(maxsize=1)
def _small_digits() -> tuple[Tensor, Tensor, Samples, list[np.ndarray], Samples]:
    digits = load_dataset("digits")
    server = Samples(digits.prepare(digits.train.x[320:400]).flatten(1), digits.train.y[320:400])
    x, y = digits.prepare(digits.train.x[:320]).flatten(1), digits.train.y[:320]
    parts = partition_indices("dirichlet:0.5,min=4", y.numpy(), 8, np.random.default_rng(0))
    return x, y, Samples(digits.prepare(digits.test.x).flatten(1), digits.test.y), parts, server


def batch_norm_network() -> nn.Module:
    """A network with batch norm: float and integer buffers."""
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def simple_network() -> nn.Module:
    """A network of parameters only."""
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


SETTINGS: dict[str, Any] = {"rounds": 4, "per_round": 4, "epochs": 1, "batch_size": 8, "lr": 0.1, "engine": "plain"}


@dataclass(frozen=True)
class SmallRunResult:
    """What is left of a run when its folder has gone."""

    digest: str
    loss: float
    records: list[dict[str, Any]]
    """One a round, without round 0."""


def small_run(
    method: str,
    options: Given,
    *,
    federation: FederatedDataset | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    **settings: Any,
) -> SmallRunResult:
    """A run of a method on the small federation."""
    data, network = federation or SmallFederatedDataset(), model or batch_norm_network
    with tempfile.TemporaryDirectory() as place:
        values: dict[str, Any] = {**SETTINGS, **settings, "out": Path(place) / "run", "report": False}
        finished = run(method, data, network, options=options, **values)
        return SmallRunResult(finished.digest, float(finished.summary["loss"]), finished.history[1:])


def build_small_run(method: str, options: Given, **settings: Any) -> BuiltRun:
    """The parts of a method, put together but not yet run."""
    federation = settings.pop("federation", None) or SmallFederatedDataset()
    network = settings.pop("model", batch_norm_network)
    values = {**SETTINGS, **settings, "method": method, "options": options, "clients": len(federation)}
    return build_run(
        make_config({**values, "data": "small", "partition": "own", "model": "small"}), UserObjects(federation, network)
    )
