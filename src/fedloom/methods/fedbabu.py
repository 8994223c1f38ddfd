"""FedBABU: train the body against a head that nobody trains.

Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.

Heads are where clients disagree, so the head keeps its random start, the same for all, and is neither trained nor sent.
Clients train the body alone and the server averages bodies, uniformly as the authors' code does. To be used by a client
the model is fine-tuned on that client's samples, head and all; that is done for scoring and then forgotten.

The head is frozen to the last bit: weight decay and momentum do not move it. The authors freeze it by a learning rate
of 0, which comes to the same. What counts as the head is said in fedrep.py. How far features are pushed depends on the
scale of the random head, which is that of the network's own initialisation; with `--init` it is the head in the file.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from fedloom.methods.base import Options
from fedloom.methods.fedrep import FedRepSplitClient
from fedloom.methods.registry import Method, register
from fedloom.training.trainer import LocalSteps, LocalTrainer


class FedBABUOptions(Options):
    finetune_epochs: int = Field(5, ge=0)
    """epochs in which a client fine-tunes the deployed model before it is scored; 0 scores it as it is"""
    finetune: Literal["all", "head", "body"] = "all"
    """what is fine-tuned: the whole model, its head, or its body"""


class FedBABUClient(FedRepSplitClient[FedBABUOptions]):
    """The head stands still."""

    def train(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        yield self.body_pass(bench, None)

    def personal(self, bench: LocalTrainer) -> Iterator[LocalSteps]:
        bench.new_optimizer()  # and not the one that a client may keep from its training
        parts = {"all": self.whole_pass, "head": self.head_pass, "body": self.body_pass}
        yield parts[self.options.finetune](bench, self.options.finetune_epochs)


register(
    Method(
        name="fedbabu",
        summary="train the body against a fixed random head, fine-tune to use it",
        reference="Oh et al., ICLR 2022",
        options=FedBABUOptions,
        local=FedBABUClient,
        defaults={"fedavg.weighting": "uniform"},
        models_sent="2K - heads",
        client_keeps="fixed head",
    )
)
