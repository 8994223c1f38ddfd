"""Servers and models for the tests of FedCross."""

from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom import ClientTask, ClientUpdate
from fedloom.core.layout import TensorKind, model_digest
from fedloom.methods.fedcross import FedCrossOptions, FedCrossServer
from fedloom.testing.fixtures import batch_norm_network, simple_network
from tests.support.many_models import Loose, Network, context_of, random_rows

NETWORKS = st.sampled_from([simple_network, batch_norm_network, Loose, lambda: nn.Linear(2, 1)])
SEVERAL = st.integers(2, 6)
ROUNDS = st.integers(0, 40)
ALPHAS = st.floats(0.5, 1)
SELECTIONS = st.sampled_from(["in-order", "lowest", "highest"])
SIMILARITIES = st.sampled_from(["global", "layerwise", "euclidean"])
quick = settings(deadline=None, max_examples=25)


def make(count: int, network: Network = batch_norm_network, **options: Any) -> FedCrossServer:
    """A server of `count` models of a network."""
    return FedCrossServer(context_of(network, count), FedCrossOptions(**options))


def combined(server: FedCrossServer, round: int, v: Tensor) -> Tensor:
    """The new models, with a look at whether the old ones stay."""
    w, before = torch.full_like(v, torch.nan), model_digest(v)
    server.combine(round, v, w)
    assert model_digest(v) == before, "the uploaded models were changed"
    return w


def answers(server: FedCrossServer, jobs: list[ClientTask], seed: int) -> list[ClientUpdate]:
    rows = random_rows(server, seed)
    return [ClientUpdate(job, rows[job.model_index], num_examples=1, loss=1.0, steps=1) for job in jobs]


def plain_gaps(server: FedCrossServer, v: Tensor) -> np.ndarray:
    """1 - similarity by the definition, in float64; of the Euclidean one the squared distance."""
    layout, wide = server.context.layout, v.numpy().astype(np.float64)
    if server.options.similarity == "euclidean":
        rows = wide[:, : layout.trainable]
        return ((rows[:, None] - rows[None]) ** 2).sum(2)
    columns = {"": list(range(layout.trainable))}
    if server.options.similarity == "layerwise":
        columns = {}
        for entry in layout.entries:
            if entry.kind is TensorKind.PARAMETER:
                columns.setdefault(entry.layer, []).extend(range(entry.columns.start, entry.columns.stop))
    cosines = []
    for part in columns.values():
        unit = wide[:, part] / np.linalg.norm(wide[:, part], axis=1, keepdims=True)
        cosines.append(unit @ unit.T)
    return 1 - np.mean(cosines, axis=0)
