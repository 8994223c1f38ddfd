"""fedloom in the comparison: a run as users start it."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

import fedloom
from benchmarks.peers.job import CLASSES, INITIAL, Job, RoundClock
from fedloom import ClientUpdate, Samples
from fedloom.data import InputTransform, PartitionedDataset
from fedloom.methods import methods, register
from fedloom.methods.fedavg import FedAvgServer
from fedloom.runs.callback import Callback


class _CountingServer(FedAvgServer):
    """FedAvg's server that counts the training steps."""

    steps = 0

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        def counted() -> Iterator[ClientUpdate]:
            for update in updates:
                _CountingServer.steps += update.steps
                yield update

        super().aggregate(round, counted())


class _EndRound(Callback):
    def __init__(self, clock: RoundClock) -> None:
        self.clock = clock

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        if record["round"] > 0:  # round 0 is the record of the initial model
            self.clock.end_round()


def train(job: Job, clock: RoundClock, engine: str = "auto") -> tuple[dict[str, Tensor], int]:
    """Train, and return the weights and the number of steps."""
    settings = job.settings
    size = settings.samples_per_client
    data = PartitionedDataset(
        Samples(job.x.unsqueeze(-1), job.y),
        [np.arange(client * size, (client + 1) * size) for client in range(settings.clients)],
        classes=CLASSES,
        transform=InputTransform((settings.mean,), (settings.std,)),
    )
    register(replace(methods()["fedavg"], name="fedavg-counted", server=_CountingServer))
    model, init = (job.network(), None) if settings.smooth else ("cnn", str(job.folder / INITIAL))
    run = fedloom.run(
        "fedavg-counted", data, model,
        init=init, rounds=settings.rounds + 1, clients_per_round=settings.clients_per_round,
        epochs=settings.epochs, batch_size=settings.batch_size, lr=settings.lr, seed=settings.seed, engine=engine,
        device="cpu", callbacks=[_EndRound(clock)], report=False, out=job.folder / f"run-{engine}",
    )  # fmt: skip
    return dict(run.model().state_dict()), _CountingServer.steps
