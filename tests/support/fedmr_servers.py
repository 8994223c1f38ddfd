"""Servers and models for the tests of FedMR."""

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.core.layout import model_digest
from fedloom.core.rng import RngStreams
from fedloom.methods.fedmr import FedMROptions, FedMRServer
from fedloom.testing.fixtures import batch_norm_network, simple_network
from tests.support.many_models import Loose, Network, context_of


def ten_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))


NETWORKS = st.sampled_from([simple_network, batch_norm_network, Loose, ten_layers])
ROUNDS = st.integers(0, 1000)
GRANULARITIES = st.sampled_from(["module", "tensor", "segment:1", "segment:0.5", "segment:0.25", "segment:1/3"])
quick = settings(deadline=None, max_examples=30)


def make(count: int, network: Network = batch_norm_network, seed: int = 0, **options: Any) -> FedMRServer:
    """A server of `count` models of a network."""
    return FedMRServer(context_of(network, count, rng_streams=RngStreams(seed)), FedMROptions(**options))


def marked_rows(server: FedMRServer) -> Tensor:
    """Models that say in every number which of them it is."""
    layout = server.context.layout
    rows = torch.zeros(server.context.clients_per_round, layout.size)
    for number, row in enumerate(rows):
        for entry in layout.entries:
            entry.view(row).fill_(number)
    return rows


def combined(server: FedMRServer, round: int, v: Tensor) -> Tensor:
    """The new models, with a look at whether the old ones stay and every number is written."""
    before = model_digest(v)
    w, other = torch.zeros_like(v), torch.full_like(v, torch.nan)
    server.combine(round, v, w)
    server.combine(round, v, other)
    assert model_digest(v) == before, "the uploaded models were changed"
    for entry in server.context.layout.entries:
        assert torch.equal(w[:, entry.columns], other[:, entry.columns]), "the same round gives the same, everywhere"
    return w


def sources(server: FedMRServer, round: int) -> list[list[int]]:
    """For each tensor, the model that each model has it from."""
    w = combined(server, round, marked_rows(server))
    found = []
    for entry in server.context.layout.entries:
        values = [entry.view(row).unique().tolist() for row in w]
        assert all(len(value) == 1 for value in values), f"{entry.name} was torn apart"
        found.append([int(value[0]) for value in values])
    return found


def gathered(rows: Tensor, columns: list[slice]) -> list[bytes]:
    return [torch.cat([row[part] for part in columns]).numpy().tobytes() for row in rows]
