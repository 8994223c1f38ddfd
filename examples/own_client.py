"""A client method of your own: Gaussian noise on every gradient."""

import torch
from pydantic import Field

from fedloom import Client, LocalTrainer, Options, register


class NoiseOptions(Options):
    scale: float = Field(0.01, ge=0)
    """standard deviation of the noise on each gradient; 0 is FedAvg"""


@register("my-noise", reference="examples/own_client.py", neutral={"scale": 0.0})
class NoiseClient(Client[NoiseOptions]):
    """Add Gaussian noise to every gradient of the clients."""

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        if scale := self.options.scale:
            purpose = f"my-noise {trainer.steps}"  # with round and client it makes the key of the noise
            draw = self.context.rng_streams.pytorch(purpose, trainer.round, trainer.client_id, trainer.device)
            g = trainer.gradient
            g.add_(torch.randn(g.shape, generator=draw, dtype=g.dtype, device=g.device), alpha=scale)
