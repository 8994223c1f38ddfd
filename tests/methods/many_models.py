"""What tests of servers with many models share: networks, contexts, and models as clients return them."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom import Layout, Server
from fedloom.banks import Bank
from fedloom.methods import Context
from fedloom.rows import Kind
from fedloom.small_runs import small_experiment
from fedloom.streams import Streams

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
def some_context() -> Context:
    with small_experiment("fedavg", {}).engine_closed() as experiment:
        return experiment.rounds.context


def context_of(network: Network, count: int, **more: Any) -> Context:
    """For a server of `count` models of a network."""
    with Streams(0).globally("init"):
        module = network()
    layout = Layout.of(module)
    own = {"layout": layout, "initial": layout.read(module), "per_round": count}
    return replace(some_context(), **own, make_bank=partial(Bank.memory, dtype=layout.dtype), **more)


def random_rows(server: Server[Any], seed: int) -> Tensor:
    """Models as clients may return them, integers and all."""
    layout, generator = server.context.layout, torch.Generator().manual_seed(seed)
    rows = torch.zeros(server.context.per_round, layout.size)
    rows[:, : layout.floats] = torch.randn(len(rows), layout.floats, generator=generator)
    for row in rows:
        for integers in layout.views(row, Kind.INTEGER):
            integers.copy_(torch.randint(1000, integers.shape, generator=generator))
    return rows
