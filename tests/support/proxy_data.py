"""Parts of methods that use server data, with made-up client updates."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.config import make_config
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.data import Samples
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.resolve import UserObjects, resolve_run
from fedloom.testing.fixtures import SETTINGS, SmallFederatedDataset, simple_network


@contextmanager
def put_together(
    method: str,
    options: dict[str, Any],
    model: Callable[[], nn.Module] = simple_network,
    server_data: Samples | None = None,
) -> Iterator[BuiltRun]:
    """The parts of a method, on the small federation with this data on the server."""
    federation = SmallFederatedDataset()
    if server_data is not None:
        federation.server_data = server_data
    values = {**SETTINGS, "method": method, "options": {method.split("+")[-1]: options}, "clients": len(federation)}
    config = make_config({**values, "data": "small", "partition": "own", "model": "small"})
    with build_run(resolve_run(config, UserObjects(federation, model))).engine_closed() as experiment:
        yield experiment


def answers(experiment: BuiltRun, rows: Sequence[Tensor], samples: Sequence[int] | None = None) -> list[ClientUpdate]:
    """Updates with these models, of clients 0, 1, ..."""
    received = experiment.rounds.parts.server.global_model().clone()
    sizes = samples or [10] * len(rows)
    return [
        ClientUpdate(ClientTask(client, received), row, num_examples=size, loss=1.0, steps=1)
        for client, (row, size) in enumerate(zip(rows, sizes, strict=True))
    ]


def noisy(experiment: BuiltRun, count: int, scale: float = 0.1) -> list[Tensor]:
    """Models around the initial one; integer buffers as they were, running variances above zero."""
    rows = []
    for number in range(count):
        row = experiment.rounds.context.initial.clone()
        noise = torch.randn(experiment.layout.floats, generator=torch.Generator().manual_seed(number))
        row[: experiment.layout.trainable] += scale * noise[: experiment.layout.trainable]
        row[experiment.layout.trainable : experiment.layout.floats] += (number + 1) * 0.1
        rows.append(row)
    return rows


def always(experiment: BuiltRun, label: int) -> Tensor:
    """A model of `plain_network` that says `label` to everything."""
    row = torch.zeros_like(experiment.rounds.context.initial)
    experiment.layout.views(row)[-1][label] = 1
    return row


def play(experiment: BuiltRun, updates: list[ClientUpdate], round: int = 0) -> Tensor:
    """One round with these answers, refiner and all; the deployed model."""
    parts = experiment.rounds.parts

    def handed() -> Iterator[ClientUpdate]:
        for update in updates:
            if parts.refiner is not None:
                parts.refiner.receive_update(round, update)
            yield update

    parts.server.aggregate(round, handed())
    if parts.refiner is not None:
        parts.refiner.refine(round, parts.server)
    return parts.server.global_model().clone()
