"""What tests of fedmr share."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom import Layout
from fedloom.banks import Bank
from fedloom.methods import Context
from fedloom.methods.fedmr import FedMROptions, FedMRServer
from fedloom.rows import Kind, digest
from fedloom.small_runs import normed_network, plain_network, small_experiment
from fedloom.streams import Streams


class Loose(nn.Module):
    """A parameter of its own beside a child, an odd number of floats, and an integer that is no counter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.child = nn.Linear(3, 2)
        self.register_buffer("steps", torch.tensor([3, 5, 7], dtype=torch.int32))


def ten_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))


Network = Callable[[], nn.Module]
NETWORKS = st.sampled_from([plain_network, normed_network, Loose, ten_layers])
COUNTS = st.integers(1, 6)
ROUNDS = st.integers(0, 1000)
SEEDS = st.integers(0, 2**32 - 1)
GRANULARITIES = st.sampled_from(["module", "tensor", "segment:1", "segment:0.5", "segment:0.25", "segment:1/3"])
quick = settings(deadline=None, max_examples=30)


@lru_cache(maxsize=1)
def some_context() -> Context:
    with small_experiment("fedavg", {}).engine_closed() as experiment:
        return experiment.rounds.context


def make(count: int, network: Network = normed_network, seed: int = 0, **options: Any) -> FedMRServer:
    """A server of `count` models of a network."""
    with Streams(0).globally("init"):
        module = network()
    layout = Layout.of(module)
    own = {"layout": layout, "initial": layout.read(module), "per_round": count, "streams": Streams(seed)}
    context = replace(some_context(), **own, make_bank=partial(Bank.memory, dtype=layout.dtype))
    return FedMRServer(context, FedMROptions(**options))


def random_rows(server: FedMRServer, seed: int) -> Tensor:
    """Models as clients may return them, integers and all."""
    layout, generator = server.context.layout, torch.Generator().manual_seed(seed)
    rows = torch.zeros(server.context.per_round, layout.size)
    rows[:, : layout.floats] = torch.randn(len(rows), layout.floats, generator=generator)
    for row in rows:
        for integers in layout.views(row, Kind.INTEGER):
            integers.copy_(torch.randint(1000, integers.shape, generator=generator))
    return rows


def marked_rows(server: FedMRServer) -> Tensor:
    """Models that say in every number which of them it is."""
    layout = server.context.layout
    rows = torch.zeros(server.context.per_round, layout.size)
    for number, row in enumerate(rows):
        for entry in layout.entries:
            entry.view(row).fill_(number)
    return rows


def combined(server: FedMRServer, round: int, v: Tensor) -> Tensor:
    """The new models, with a look at whether the old ones stay and every number is written."""
    before = digest(v)
    w, other = torch.zeros_like(v), torch.full_like(v, torch.nan)
    server.combine(round, v, w)
    server.combine(round, v, other)
    assert digest(v) == before, "the uploaded models were changed"
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
