"""Networks, contexts and client models for tests of servers with many models."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom import Layout, Server
from fedloom.core.bank import Bank
from fedloom.core.layout import TensorKind
from fedloom.core.rng import RngStreams
from fedloom.methods import MethodContext
from fedloom.testing.fixtures import build_small_run

Network = Callable[[], nn.Module]
COUNTS = st.integers(1, 6)
SEEDS = st.integers(0, 2**32 - 1)


class Loose(nn.Module):
    """A parameter of its own beside a child, an odd number of floats, and an integer that is no counter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.child = nn.Linear(3, 2)
        self.register_buffer("steps", torch.tensor([3, 5, 7], dtype=torch.int32))


@lru_cache(maxsize=1)
def some_context() -> MethodContext:
    with build_small_run("fedavg", {}).engine_closed() as experiment:
        return experiment.rounds.context


def context_of(network: Network, count: int, **more: Any) -> MethodContext:
    """For a server of `count` models of a network."""
    with RngStreams(0).seed_global_rng("init"):
        module = network()
    layout = Layout.of(module)
    own = {"layout": layout, "initial": layout.read(module), "clients_per_round": count}
    server = replace(some_context().server, make_bank=partial(Bank.memory, dtype=layout.dtype))
    if "rounds" in more:  # a property, which notes that it was read
        own["planned_rounds"] = more.pop("rounds")
    return replace(some_context(), **own, server=server, **more)


def random_rows(server: Server[Any], seed: int) -> Tensor:
    """Models as clients may return them, integers and all."""
    layout, generator = server.context.layout, torch.Generator().manual_seed(seed)
    rows = torch.zeros(server.context.clients_per_round, layout.size)
    rows[:, : layout.floats] = torch.randn(len(rows), layout.floats, generator=generator)
    for row in rows:
        for integers in layout.views(row, TensorKind.INTEGER):
            integers.copy_(torch.randint(1000, integers.shape, generator=generator))
    return rows
