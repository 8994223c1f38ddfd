"""FedBABU: train only the body of the network, and keep the initial random head.

Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

Clients disagree most about the head. So all keep the same initial head, which is neither trained nor sent. Clients
train the body, and the server averages bodies, uniformly as the authors' code does. For evaluation each client
fine-tunes the global model, with its head, on its own samples, and discards the result.

Weight decay and momentum do not move the head either. The authors freeze it with a learning rate of 0, which has the
same effect. fedrep.py defines what the head is. The features depend on the scale of the random head, which comes from
the network's initialization, or with `--init` from the file.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from fedloom.methods.base import Options
from fedloom.methods.fedrep import FedRepSplitClient
from fedloom.methods.registry import register
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedBABUOptions(Options):
    finetune_epochs: int = Field(5, ge=0)
    """epochs in which a client fine-tunes the global model before its evaluation; 0 does not fine-tune"""
    finetune: Literal["all", "head", "body"] = "all"
    """what to fine-tune: the whole model, its head, or its body"""


@register(
    "fedbabu",
    reference="Oh et al., ICLR 2022",
    defaults={"fedavg.weighting": "uniform"},
    models_sent="2K - heads",
    new_client="A new client gets the global model and fine-tunes it for fedbabu.finetune_epochs epochs on its "
    "training samples.",
)
class FedBABUClient(FedRepSplitClient[FedBABUOptions]):
    """Train the body with a fixed random head; clients fine-tune the model before they use it."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield self.body_steps(trainer, None)

    def personalize(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        trainer.new_optimizer()  # not the one with the state that a client may keep from training
        parts = {"all": self.full_steps, "head": self.head_steps, "body": self.body_steps}
        yield parts[self.options.finetune](trainer, self.options.finetune_epochs)
