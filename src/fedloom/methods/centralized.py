"""Centralized: one model trains on the samples of all clients, in one place.

The upper bracket of a comparison, and ordinary training for a start model (`--init`). In each round the server samples
the clients as FedAvg's does, and the one model makes as many steps as these clients would make together. Its batches
come from the union of all clients' training samples. With `budget=epochs` a round is `--epochs` passes over this union,
whichever clients are sampled. The optimizer keeps its state from round to round.

Samples that no client trains on do not count: those of the server, of tests and of validation. The engine sees client 0
with the samples of all (runs/pool_samples.py), which is only possible in simulation. The traffic is the samples
themselves, sent once.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

import torch

from fedloom.core.tasks import ClientTask
from fedloom.errors import InputError
from fedloom.methods.base import Client, Options
from fedloom.methods.registry import Method, register
from fedloom.methods.servers import AveragingServer
from fedloom.training.batches import count_local_steps, count_validation_samples
from fedloom.training.trainer import LocalSteps, LocalTrainer


class CentralizedOptions(Options):
    budget: Literal["steps", "epochs"] = "steps"
    """training of a round: as many steps as its clients would make together, or --epochs passes over all samples"""


class CentralizedServer(AveragingServer[CentralizedOptions]):
    """Server that trains its model as client 0, which has the samples of all clients."""

    needs = "mean"

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        steps = torch.tensor([sum(map(self._count_steps, client_ids))])
        return [ClientTask(0, self.bank.rows[0], extras={"steps": steps})]

    def _count_steps(self, client_id: int) -> int:
        """Return how many steps this client would make in a round."""
        count, config = self.context.num_examples(client_id), self.context.config
        return count_local_steps(count - count_validation_samples(count, config), config)


class CentralizedClient(Client[CentralizedOptions]):
    """Client that makes the steps of all sampled clients."""

    def start(self) -> None:
        steps = self.context.config.steps
        if self.options.budget == "epochs" and steps is not None:
            raise InputError(
                f"centralized:budget=epochs counts passes over all samples, but steps is {steps}; leave out one."
            )

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        if self.options.budget == "epochs":
            yield LocalSteps(self.training_step)
        else:
            yield LocalSteps(self.training_step, steps=int(trainer.extras["steps"]))


register(
    Method(
        name="centralized",
        summary="Train one model on the samples of all clients: the upper bracket",
        reference="Baseline without federation",
        options=CentralizedOptions,
        server=CentralizedServer,
        client=CentralizedClient,
        models_sent="samples once",
        bracket="centralized",
    )
)
