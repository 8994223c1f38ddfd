"""FedAvg: clients train the server's model, and the server averages what comes back.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

The weights of the mean are over the clients that answered, not over all of them. The paper weights by samples;
several later papers average uniformly, hence the option. `server_lr` (1 in the paper) goes on from the old model
towards the mean by that factor; it moves trainable parameters only, because an extrapolated running variance may
turn negative.
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
    """how clients count in the mean: by their samples, or all alike"""
    server_lr: float = Field(1.0, gt=0)
    """how far to go from the old model towards the mean; 1 is the mean itself"""


class FedAvgServer(Server[FedAvgOptions]):
    """One model, averaged."""

    kept: ClassVar[tuple[str, ...]] = ("bank",)

    def __init__(self, context: MethodContext, options: FedAvgOptions) -> None:
        super().__init__(context, options)
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client, self.bank.rows[0]) for client in clients]

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        w = self.bank.rows[0]
        mean = WeightedMean(self.context.layout)
        for update in updates:
            mean.add(update.row, update.samples if self.options.weighting == "samples" else 1)
        old = w[: self.context.layout.trainable].clone() if self.options.server_lr != 1 else None
        if mean.into(w) and old is not None:
            new = w[: old.numel()]
            new.sub_(old).mul_(self.options.server_lr).add_(old)

    def deploy(self) -> Tensor:
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
        local=Client,
        models_sent="2K",
        needs_each="",
    )
)
