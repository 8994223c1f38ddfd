"""FedCluster: clusters of clients take turns, so that the model moves many times while each client trains once.

Chen et al., "FedCluster: Boosting the Convergence of Federated Learning via Cluster-Cycling", IEEE Big Data 2020.
Clients are split into C clusters once, at random. In a cycle each cluster has its turn, in an order drawn anew: some of
its clients train the current model, their mean is the model for the next cluster.

A turn is a round here. The paper calls a whole cycle a round: compare it by the clients asked, which every round's
record holds, and evaluate with `--eval-every C` if only the ends of cycles count. In a turn `per_round` clients of the
cluster are asked, or all of them if there are fewer. One cluster is FedAvg. As many clusters as clients is training in
sequence, each client once in a cycle.
"""

import numpy as np
from pydantic import Field

from fedloom.methods.base import MethodContext
from fedloom.methods.fedavg import FedAvgOptions, FedAvgServer
from fedloom.methods.registry import Method, register


class FedClusterOptions(FedAvgOptions):
    clusters: int = Field(10, ge=1)
    """C, the number of clusters, of nearly equal size; at most one for each client. 1 is FedAvg"""


class FedClusterServer(FedAvgServer):
    """FedAvg that asks clients of one cluster at a time."""

    options: FedClusterOptions

    def __init__(self, context: MethodContext, options: FedClusterOptions) -> None:
        super().__init__(context, options)
        count = min(options.clusters, context.clients)
        order = context.streams.numpy("fedcluster").permutation(context.clients)
        self.clusters = [sorted(int(client) for client in part) for part in np.array_split(order, count)]

    def cluster_at(self, round: int) -> int:
        """Whose turn it is."""
        cycle, turn = divmod(round, len(self.clusters))
        return int(self.context.streams.numpy("fedcluster cycle", cycle).permutation(len(self.clusters))[turn])

    def select(self, round: int) -> list[int]:
        members = self.clusters[self.cluster_at(round)]
        draw = self.context.streams.numpy("select", round)
        chosen = draw.choice(len(members), min(self.context.per_round, len(members)), replace=False)
        return [members[int(i)] for i in chosen]


register(
    Method(
        name="fedcluster",
        summary="clusters of clients take turns on one model",
        reference="Chen et al., IEEE Big Data 2020",
        options=FedClusterOptions,
        server=FedClusterServer,
        neutral={"clusters": 1},
        models_sent="2K",
        needs_each="",
    )
)
