"""FedCluster: clusters of clients train one model in turn.

So the model is updated many times per cycle.

Chen et al., "FedCluster: Boosting the Convergence of Federated Learning via Cluster-Cycling", IEEE Big Data 2020.
Clients are split into C clusters once, at random. In a cycle each cluster has one turn, in a new random order. Some of
its clients train the current model, and their mean is the model for the next cluster.

Here a turn is a round; in the paper a whole cycle is one. So compare methods by the number of sampled clients, which
every record holds, and set `--eval-every C` if only the ends of cycles count. A turn samples `clients_per_round`
clients of the cluster, or all of them if there are fewer. One cluster is FedAvg. With as many clusters as clients, the
clients train one after the other, each once per cycle.
"""

import numpy as np
from pydantic import Field

from fedloom.methods.fedavg import FedAvgOptions, FedAvgServer
from fedloom.methods.registry import register


class FedClusterOptions(FedAvgOptions):
    clusters: int = Field(10, ge=1)
    """number of clusters (C), of nearly equal size, at most one per client; 1 is FedAvg"""


@register("fedcluster", reference="Chen et al., IEEE Big Data 2020", neutral={"clusters": 1})
class FedClusterServer(FedAvgServer[FedClusterOptions]):
    """Clusters of clients train one model in turn."""

    def start(self) -> None:
        context = self.context
        count = min(self.options.clusters, context.num_clients)
        order = context.rng_streams.numpy("fedcluster").permutation(context.num_clients)
        self._clusters = [sorted(int(client_id) for client_id in part) for part in np.array_split(order, count)]

    def cluster_at(self, round: int) -> int:
        """Return the index of the cluster whose turn it is."""
        cycle, turn = divmod(round, len(self._clusters))
        return int(self.context.rng_streams.numpy("fedcluster cycle", cycle).permutation(len(self._clusters))[turn])

    def sample_clients(self, round: int) -> list[int]:
        members = self._clusters[self.cluster_at(round)]
        draw = self.context.rng_streams.numpy("select", round)
        chosen = draw.choice(len(members), min(self.context.clients_per_round, len(members)), replace=False)
        return [members[int(i)] for i in chosen]
