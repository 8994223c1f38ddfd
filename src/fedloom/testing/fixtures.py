"""A small federated data set, small networks, and runs of about a second."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.layout import model_digest
from fedloom.data import FederatedDataset, InputTransform, Samples, load_dataset
from fedloom.data.partitions import partition_indices
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.execute import run
from fedloom.runs.resolve import UserObjects, resolve_config, resolve_run

Given = Mapping[str, Mapping[str, Any]]
"""Options by method and key."""


class SmallFederatedDataset(FederatedDataset):
    """Eight clients with 320 of scikit-learn's digits, and 80 more on the server.

    Args:
        sizes: Largest number of samples by client, to make small or empty clients.
        poisoned: A client whose inputs all become NaN.
    """

    classes = 10
    shape = (64,)

    def __init__(self, sizes: Mapping[int, int] | None = None, poisoned: int | None = None) -> None:
        x, y, test, parts, server = _small_digits()
        self.test, self.server_data = test, server
        self.transform = InputTransform.identity()
        self._clients = [Samples(x[part], y[part]) for part in parts]
        for client_id, size in (sizes or {}).items():
            self._clients[client_id] = self._clients[client_id][:size]
        if poisoned is not None:
            bad = self._clients[poisoned]
            self._clients[poisoned] = Samples(torch.full_like(bad.x, torch.nan), bad.y)

    def __len__(self) -> int:
        return len(self._clients)

    def client_samples(self, client_id: int) -> Samples:
        return self._clients[client_id]

    def num_examples(self, client_id: int) -> int:  # known without loading, so engines start the largest client first
        return len(self._clients[client_id])

    def fingerprint(self) -> str:
        """Return a hash of the inputs of all clients."""
        return model_digest(torch.cat([s.x.flatten() for s in self._clients]))


@lru_cache(maxsize=1)
def _small_digits() -> tuple[Tensor, Tensor, Samples, list[np.ndarray], Samples]:
    digits = load_dataset("digits")
    server = Samples(digits.transform(digits.train.x[320:400]).flatten(1), digits.train.y[320:400])
    x, y = digits.transform(digits.train.x[:320]).flatten(1), digits.train.y[:320]
    parts = partition_indices("dirichlet:0.5,min=4", y.numpy(), 8, np.random.default_rng(0))
    return x, y, Samples(digits.transform(digits.test.x).flatten(1), digits.test.y), parts, server


def batch_norm_network() -> nn.Module:
    """Return a network with batch norm, which has float and integer buffers."""
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def simple_network() -> nn.Module:
    """Return a network without buffers."""
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "clients_per_round": 4,
    "epochs": 1,
    "batch_size": 8,
    "lr": 0.1,
    "engine": "sequential",
}


@dataclass(frozen=True)
class SmallRunResult:
    """The result of `small_run`."""

    digest: str
    """The SHA-256 digest of the global model."""
    loss: float
    """The final test loss; the last training loss if there is no global model."""
    records: list[dict[str, Any]]
    """The record of each round, without round 0."""


def small_run(
    method: str,
    options: Given,
    *,
    federated_data: FederatedDataset | None = None,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    **settings: Any,
) -> SmallRunResult:
    """Run a method on a small federated data set, in a temporary directory.

    Args:
        method: A method or a combination, such as "fedcross+fedprox".
        options: Options by method and name.
        federated_data: The data; a `SmallFederatedDataset` by default.
        model: A network or a function that creates one; `batch_norm_network` by default.
        **settings: Settings of `fedloom.run` that replace those of `SETTINGS`.

    Returns:
        Digest, test loss and records of the run.

    Example:
        assert small_run("fedprox", {"fedprox": {"mu": 0.0}}).digest == small_run("fedavg", {}).digest
    """
    data, model_or_factory = federated_data or SmallFederatedDataset(), model or batch_norm_network
    with tempfile.TemporaryDirectory() as place:
        values: dict[str, Any] = {**SETTINGS, **settings, "out": Path(place) / "run", "report": False}
        finished = run(method, data, model_or_factory, options=options, **values)
        loss = finished.summary["loss"] if finished.has_global_model else finished.history[-1]["train_loss"]
        return SmallRunResult(finished.digest, float(loss), finished.history[1:])


def build_small_run(method: str, options: Given, **settings: Any) -> BuiltRun:
    """Build the run of a method on a small federated data set, without starting it.

    Args:
        method: A method or a combination, such as "fedcross+fedprox".
        options: Options by method and name.
        **settings: Settings that replace those of `SETTINGS`; `federated_data` and `model` as in `small_run`.

    Returns:
        The built run; `engine_closed` closes its engine at the end of a `with` block.

    Example:
        with build_small_run("fedavg", {}).engine_closed() as built_run:
            record = built_run.rounds.run_round(0)
    """
    federated_data = settings.pop("federated_data", None) or SmallFederatedDataset()
    network = settings.pop("model", batch_norm_network)
    values = {**SETTINGS, **settings, "method": method, "options": options, "clients": len(federated_data)}
    config = resolve_config({**values, "data": "small", "partition": "own", "model": "small"})
    return build_run(resolve_run(config, UserObjects(federated_data, network)))
