"""FedAvg: clients train the server's model, and the server averages the results.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

The weights of the mean are over the clients that returned an update, not over all of them. The paper weights by
samples; several later papers average uniformly, hence the option. `server_lr` (1 in the paper) scales the step from the
old model to the mean, for trainable parameters only: an extrapolated running variance may turn negative.
"""

from typing import Generic, Literal, TypeVar

from pydantic import Field
from torch import Tensor

from fedloom.core.tasks import ClientUpdate
from fedloom.methods.base import Client, Options
from fedloom.methods.registry import Method, register
from fedloom.methods.servers import AveragingServer


class FedAvgOptions(Options):
    weighting: Literal["samples", "uniform"] = "samples"
    """weights of the clients in the mean: their numbers of samples, or all equal"""
    server_lr: float = Field(1.0, gt=0)
    """factor on the step from the old model to the mean; 1 is the mean itself"""


A = TypeVar("A", bound=FedAvgOptions)


class FedAvgServer(AveragingServer[A], Generic[A]):
    """One model, the weighted mean of the client models."""

    needs = "mean"

    def weight(self, update: ClientUpdate) -> float:
        return update.num_examples if self.options.weighting == "samples" else 1

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        server_lr = self.options.server_lr
        return mean if server_lr == 1 else (mean - old).mul_(server_lr).add_(old)


register(
    Method(
        name="fedavg",
        summary="Train locally, average",
        reference="McMahan et al., AISTATS 2017",
        options=FedAvgOptions,
        server=FedAvgServer,
        client=Client,
    )
)
