"""Two methods of one's own in one file: a client's part and a server's part.

    fedloom run my-noise --import examples/own_method.py
    fedloom run my-momentum --import examples/own_method.py --set my-momentum.beta=0.5
    fedloom compare fedavg my-momentum+my-noise --import examples/own_method.py

docs/write-a-method.md explains every line.
"""

from collections.abc import Iterable, Iterator

import torch
from pydantic import Field
from torch import Tensor

from fedloom import (
    Client,
    ClientTask,
    ClientUpdate,
    LocalTrainer,
    Method,
    MethodContext,
    Options,
    Server,
    WeightedMean,
    register,
)

# A client's part: Gaussian noise on every gradient


class NoiseOptions(Options):
    scale: float = Field(0.01, ge=0)
    """standard deviation of the noise on a gradient; 0 is FedAvg"""


class NoiseLocal(Client[NoiseOptions]):
    """Ordinary training; each gradient gets noise from a stream that belongs to this round, client and step."""

    def correct(self, bench: LocalTrainer) -> None:
        if scale := self.options.scale:
            draw = self.context.streams.pytorch(f"my-noise {bench.steps}", bench.round, bench.client, bench.device)
            g = bench.gradient
            g.add_(torch.randn(g.shape, generator=draw, dtype=g.dtype, device=g.device), alpha=scale)


register(
    Method(
        name="my-noise",
        summary="noise on every gradient of the clients",
        reference="examples/own_method.py",
        options=NoiseOptions,
        local=NoiseLocal,
        neutral={"scale": 0.0},
        models_sent="2K",
    )
)

# A server's part: FedAvgM, the server moves with momentum (Hsu, Qi and Brown, arXiv:1909.06335)


class MomentumOptions(Options):
    beta: float = Field(0.9, ge=0, lt=1)
    """momentum of the server; 0 is FedAvg"""


class MomentumServer(Server[MomentumOptions]):
    """One model; the way from it to the mean of the clients is a gradient, and the server keeps a velocity."""

    kept = ("bank", "velocity")

    def __init__(self, context: MethodContext, options: MomentumOptions) -> None:
        super().__init__(context, options)
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial
        self.velocity = torch.zeros_like(self.bank.rows[0, : context.layout.trainable])

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client, self.bank.rows[0]) for client in clients]

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        w, trainable = self.bank.rows[0], self.context.layout.trainable
        old = w[:trainable].clone()
        mean = WeightedMean(self.context.layout)
        for update in updates:
            mean.add(update.row, update.samples)
        if not mean.into(w):  # nobody answered: the model stays, and so does the velocity
            return
        # w is now the mean. Batch norm's statistics and counters stay so; only what is trained has momentum.
        if beta := self.options.beta:
            self.velocity.mul_(beta).add_(w[:trainable] - old)
            w[:trainable] = old + self.velocity

    def deploy(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows

    def diagnostics(self) -> dict[str, float]:
        return {"speed": float(self.velocity.norm())}


register(
    Method(
        name="my-momentum",
        summary="the server moves with momentum (FedAvgM)",
        reference="Hsu et al., 2019",
        options=MomentumOptions,
        server=MomentumServer,
        neutral={"beta": 0.0},
        models_sent="2K",
    )
)
