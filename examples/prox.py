"""FedProx as a method of your own: the README shows this file."""

from pydantic import Field

from fedloom import Client, LocalTrainer, Method, Options, register


class ProxOptions(Options):
    mu: float = Field(0.01, ge=0)
    """weight of the proximal term; 0 is FedAvg"""


class ProxClient(Client[ProxOptions]):
    """Pull each client back to the model w that it received: min f(v) + mu/2 ||v - w||^2."""

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        w = trainer.received[: trainer.layout.trainable]
        trainer.gradient.add_(trainer.weights - w, alpha=self.options.mu)


register(
    Method(
        name="my-prox",
        summary="add a proximal term that keeps each client close to the model it received",
        reference="Li et al., MLSys 2020",
        options=ProxOptions,
        client=ProxClient,
        models_sent="2K",  # for K clients in a round: K models down, K up
    )
)
