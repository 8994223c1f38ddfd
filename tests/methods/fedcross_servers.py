"""What tests of fedcross share."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom import Job, Layout, Update
from fedloom.banks import Bank
from fedloom.methods import Context
from fedloom.methods.fedcross import FedCrossOptions, FedCrossServer
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


Network = Callable[[], nn.Module]
NETWORKS = st.sampled_from([plain_network, normed_network, Loose, lambda: nn.Linear(2, 1)])
COUNTS = st.integers(1, 6)
SEVERAL = st.integers(2, 6)
ROUNDS = st.integers(0, 40)
SEEDS = st.integers(0, 2**32 - 1)
ALPHAS = st.floats(0.5, 1)
SELECTIONS = st.sampled_from(["in-order", "lowest", "highest"])
SIMILARITIES = st.sampled_from(["global", "layerwise"])
quick = settings(deadline=None, max_examples=25)


@lru_cache(maxsize=1)
def some_context() -> Context:
    with small_experiment("fedavg", {}).engine_closed() as experiment:
        return experiment.rounds.context


def make(count: int, network: Network = normed_network, **options: Any) -> FedCrossServer:
    """A server of `count` models of a network."""
    with Streams(0).globally("init"):
        module = network()
    layout = Layout.of(module)
    bank = partial(Bank.memory, dtype=layout.dtype)
    context = replace(some_context(), layout=layout, initial=layout.read(module), per_round=count, make_bank=bank)
    return FedCrossServer(context, FedCrossOptions(**options))


def random_rows(server: FedCrossServer, seed: int) -> Tensor:
    """Models as clients may return them, integers and all."""
    layout, generator = server.context.layout, torch.Generator().manual_seed(seed)
    rows = torch.zeros(server.context.per_round, layout.size)
    rows[:, : layout.floats] = torch.randn(len(rows), layout.floats, generator=generator)
    for row in rows:
        for integers in layout.views(row, Kind.INTEGER):
            integers.copy_(torch.randint(1000, integers.shape, generator=generator))
    return rows


def combined(server: FedCrossServer, round: int, v: Tensor) -> Tensor:
    """The new models, with a look at whether the old ones stay."""
    w, before = torch.full_like(v, torch.nan), digest(v)
    server.combine(round, v, w)
    assert digest(v) == before, "the uploaded models were changed"
    return w


def answers(server: FedCrossServer, jobs: list[Job], seed: int) -> list[Update]:
    rows = random_rows(server, seed)
    return [Update(job, rows[job.slot], samples=1, loss=1.0, steps=1) for job in jobs]


def plain_gaps(server: FedCrossServer, v: Tensor) -> np.ndarray:
    """1 - similarity by the definition, in float64."""
    layout, wide = server.context.layout, v.numpy().astype(np.float64)
    columns = {"": list(range(layout.trainable))}
    if server.options.similarity == "layerwise":
        columns = {}
        for entry in layout.entries:
            if entry.kind is Kind.PARAMETER:
                columns.setdefault(entry.unit, []).extend(range(entry.columns.start, entry.columns.stop))
    cosines = []
    for part in columns.values():
        unit = wide[:, part] / np.linalg.norm(wide[:, part], axis=1, keepdims=True)
        cosines.append(unit @ unit.T)
    return 1 - np.mean(cosines, axis=0)
