"""FedAvg: clients train the server's model, and the server averages the results.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

The weights of the mean are over the clients that returned an update, not over all of them. The paper weights by
samples; several later papers average uniformly, hence the option. `server_lr` (1 in the paper) scales the step from the
old model to the mean, for trainable parameters only: an extrapolated running variance may turn negative.
"""

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.base import Client, MethodContext, Options, Server
from fedloom.methods.registry import Method, register


class FedAvgOptions(Options):
    weighting: Literal["samples", "uniform"] = "samples"
    """weights of the clients in the mean: their numbers of samples, or all equal"""
    server_lr: float = Field(1.0, gt=0)
    """factor on the step from the old model to the mean; 1 is the mean itself"""


class FedAvgServer(Server[FedAvgOptions]):
    """One model, the weighted mean of the client models."""

    state_attributes: ClassVar[tuple[str, ...]] = ("bank",)

    def __init__(self, context: MethodContext, options: FedAvgOptions) -> None:
        super().__init__(context, options)
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client_id, self.bank.rows[0]) for client_id in client_ids]

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        w = self.bank.rows[0]
        mean = WeightedMean(self.context.layout)
        for update in updates:
            mean.add(update.row, update.num_examples if self.options.weighting == "samples" else 1)
        old = w[: self.context.layout.trainable].clone() if self.options.server_lr != 1 else None
        if mean.write_to(w) and old is not None:
            new = w[: old.numel()]
            new.sub_(old).mul_(self.options.server_lr).add_(old)

    def global_model(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows


register(
    Method(
        name="fedavg",
        summary="train locally, average",
        reference="McMahan et al., AISTATS 2017",
        options=FedAvgOptions,
        server=FedAvgServer,
        client=Client,
        models_sent="2K",
        uses_single_updates="",
    )
)
