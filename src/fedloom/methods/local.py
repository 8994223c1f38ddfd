"""Local: each client trains a model of its own, and nothing is sent.

The lower bracket of a comparison. The server samples the clients of each round as FedAvg's does, and a sampled client
makes the same local steps on the same batches. But it goes on from its own model of the last time. So a client makes as
many steps as it would make in the federation.

All columns of the model are personal, so they never travel: there is no global model, and each client is evaluated with
its own. A client that has not been sampled yet still has the initial model.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.base import Client, Options, Server
from fedloom.methods.registry import Method, register


class LocalServer(Server[Options]):
    """Server that only says which clients train in a round."""

    needs = "mean"

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        return [ClientTask(client_id, self.context.initial) for client_id in client_ids]

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        for _ in updates:  # nothing is sent: each client has stored its model
            pass

    def global_model(self) -> Tensor:
        return self.context.initial

    def models(self) -> Tensor:
        return self.context.initial.unsqueeze(0)


class LocalClient(Client[Options]):
    """Client that keeps its whole model."""

    def personal_columns(self, layout: Layout) -> list[slice]:
        return [slice(0, layout.size)]


register(
    Method(
        name="local",
        summary="Each client trains alone, nothing is sent: the lower bracket",
        reference="Baseline without federation",
        server=LocalServer,
        client=LocalClient,
        models_sent="0",
        bracket="local",
    )
)
