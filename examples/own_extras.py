"""A method of your own with extras: a direction that travels beside the model."""

from collections.abc import Iterator, Mapping

import torch
from pydantic import Field
from torch import Tensor

from fedloom import Client, ClientUpdate, Extras, Layout, LocalSteps, LocalTrainer, Method, Options, register


class DirectionOptions(Options):
    share: float = Field(0.5, ge=0, lt=1)
    """weight of the direction of the last round in every gradient; 0 is FedAvg"""


class DirectionClient(Client[DirectionOptions]):
    """Mix the direction d into every gradient, and send back the client's own direction."""

    def upload_shapes(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        return {"d": (layout.trainable,)}

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step)
        if way := trainer.lr * trainer.steps:  # a client without samples takes no step
            w = trainer.received[: trainer.layout.trainable]
            trainer.uploads["d"].copy_((w - trainer.weights) / way)

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        if share := self.options.share:
            trainer.gradient.lerp_(trainer.extras["d"], share)


class DirectionExtras(Extras[DirectionOptions]):
    """The mean direction d of the last round."""

    def start(self) -> None:
        self.d = torch.zeros_like(self.context.initial[: self.context.layout.trainable])
        self._sum, self._count = torch.zeros_like(self.d), 0

    def send_to_client(self, round: int, client_id: int) -> Mapping[str, Tensor]:
        return {"d": self.d}

    def receive_update(self, round: int, update: ClientUpdate) -> None:
        self._sum += update.extras["d"]
        self._count += 1

    def end_round(self, round: int) -> None:
        if self._count:
            self.d = self._sum / self._count
        self._sum, self._count = torch.zeros_like(self.d), 0


register(
    Method(
        name="my-direction",
        summary="Mix the clients' mean direction of the last round into every gradient",
        reference="examples/own_extras.py",
        options=DirectionOptions,
        client=DirectionClient,
        extras=DirectionExtras,
        neutral={"share": 0.0},
    )
)
