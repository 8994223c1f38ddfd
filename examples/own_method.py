"""Two methods of your own in one file: one defines a client, the other a server.

    fedloom run my-noise --import examples/own_method.py
    fedloom run my-momentum --import examples/own_method.py --set my-momentum.beta=0.5
    fedloom compare fedavg my-momentum+my-noise --import examples/own_method.py

docs/write-a-method.md explains them.
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

# A client: add Gaussian noise to every gradient


class NoiseOptions(Options):
    scale: float = Field(0.01, ge=0)
    """standard deviation of the noise added to each gradient; 0 is FedAvg"""


class NoiseClient(Client[NoiseOptions]):
    """Train as FedAvg does, with noise on each gradient. Round, client and step are the key of the noise."""

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        if scale := self.options.scale:
            draw = self.context.rng_streams.pytorch(
                f"my-noise {trainer.steps}", trainer.round, trainer.client_id, trainer.device
            )
            g = trainer.gradient
            g.add_(torch.randn(g.shape, generator=draw, dtype=g.dtype, device=g.device), alpha=scale)


register(
    Method(
        name="my-noise",
        summary="add Gaussian noise to every gradient of the clients",
        reference="examples/own_method.py",
        options=NoiseOptions,
        client=NoiseClient,
        neutral={"scale": 0.0},  # with this option it equals FedAvg
        models_sent="2K",  # K models down and K up, for K clients per round
    )
)

# A server: FedAvgM, momentum on the server (Hsu, Qi and Brown, arXiv:1909.06335)


class MomentumOptions(Options):
    beta: float = Field(0.9, ge=0, lt=1)
    """momentum on the server; 0 is FedAvg"""


class MomentumServer(Server[MomentumOptions]):
    """Treat the step from the old model to the mean of the client models as a gradient, and apply momentum to it."""

    state_attributes = ("bank", "velocity")

    def __init__(self, context: MethodContext, options: MomentumOptions) -> None:
        super().__init__(context, options)
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial
        self.velocity = torch.zeros_like(self.bank.rows[0, : context.layout.trainable])

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client_id, self.bank.rows[0]) for client_id in client_ids]

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        w, trainable = self.bank.rows[0], self.context.layout.trainable
        old = w[:trainable].clone()
        mean = WeightedMean(self.context.layout)
        for update in updates:
            mean.add(update.row, update.num_examples)
        if not mean.write_to(w):  # no client answered: keep the model and the velocity
            return
        # w now holds the mean. Momentum applies to the trainable parameters only, not to batch norm's buffers.
        if beta := self.options.beta:
            self.velocity.mul_(beta).add_(w[:trainable] - old)
            w[:trainable] = old + self.velocity

    def global_model(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows

    def diagnostics(self) -> dict[str, float]:
        return {"speed": float(self.velocity.norm())}


register(
    Method(
        name="my-momentum",
        summary="apply momentum on the server (FedAvgM)",
        reference="Hsu et al., 2019",
        options=MomentumOptions,
        server=MomentumServer,
        neutral={"beta": 0.0},
        models_sent="2K",
    )
)
