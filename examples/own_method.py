"""Two methods of your own in one file: one defines a client, the other a server.

    fedloom run my-noise --import examples/own_method.py
    fedloom run my-momentum --import examples/own_method.py --set my-momentum.beta=0.5
    fedloom compare fedavg my-momentum+my-noise --import examples/own_method.py

docs/write-a-method.md explains them.
"""

import torch
from pydantic import Field
from torch import Tensor

from fedloom import AveragingServer, Client, LocalTrainer, Method, Options, register

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


class MomentumServer(AveragingServer[MomentumOptions]):
    """Treat the step from the old model to the mean of the client models as a gradient, and apply momentum to it."""

    state_attributes = ("bank", "velocity")

    def start(self) -> None:
        self.velocity = self.zeros()

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        if not self.options.beta:
            return mean
        self.velocity.mul_(self.options.beta).add_(mean - old)
        return old + self.velocity

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
