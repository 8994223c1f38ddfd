"""CluSamp: sample one client from each of m groups with similar updates.

Fraboni et al., "Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection in Federated
Learning", ICML 2021, algorithm 2. The server keeps the last update G_i = w_i - w of each client, zero at first. Every
round, with n_i samples of client i, M = sum n_i and m clients to sample:

    cut the Ward tree over the distances of the G_i into groups of mass sum m n_i <= M
    the m heaviest groups start m distributions; the clients of the other groups fill these up to M,
    and a client may be split over several
    draw one client from each distribution, with the probabilities r_ki / M

So client i is drawn m n_i / M times on average, and the mean of the m models with equal weights is unbiased. Masses
are integers, so the sums are exact. A client with m n_i >= M first fills distributions of its own.

Batches depend on (seed, round, client), so a client that is drawn twice would do the same work twice. It trains once
and counts twice. The authors' code gives scipy the distance matrix as if it were a list of points; fedloom gives it as
distances. A zero update has angle 0 to all others.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.base import Options
from fedloom.methods.registry import register
from fedloom.methods.servers import AveragingServer

Masses = NDArray[np.int64]
BLOCK = {"cpu": 1 << 14, "cuda": 1 << 18}
"""How many columns of the updates are compared at a time, by device."""


class CluSampOptions(Options):
    distance: Literal["angle", "l2", "l1"] = "angle"
    """distance of two updates: the angle between them, or the L2 or L1 norm of their difference"""


@register("clusamp", reference="Fraboni et al., ICML 2021", server_state="N+1 models", extra_compute="server clusters")
class CluSampServer(AveragingServer[CluSampOptions]):
    """Sample one client from each of several groups with similar updates.

    The server keeps FedAvg's model, the last update of each client, and their distances.
    """

    needs_reason = "groups the clients by their updates"

    def start(self) -> None:
        self.G: dict[int, Tensor] = {}
        """The last update of each client that has trained; that of the others is zero."""
        self.distances = torch.zeros(self.context.num_clients, self.context.num_clients, dtype=torch.float64)
        self._times: Counter[int] = Counter()
        self._seen: list[int] = []

    def sample_clients(self, round: int) -> list[int]:
        n = np.array(
            [self.context.num_examples(client_id) for client_id in range(self.context.num_clients)], dtype=np.int64
        )
        if not n.sum():
            return super().sample_clients(round)
        draw = self.context.rng_streams.numpy("select", round)
        r = clusamp_sampling_distributions(n, self.context.clients_per_round, self.distances.numpy())
        return [int(np.searchsorted(np.cumsum(row), draw.integers(n.sum()), side="right")) for row in r]

    def dispatch(self, round: int, client_ids: list[int]) -> Iterable[ClientTask]:
        self._times = Counter(client_ids)
        return [ClientTask(client_id, self.bank.rows[0]) for client_id in self._times]

    def weight(self, update: ClientUpdate) -> float:
        return self._times[update.client_id]

    def observe(self, round: int, update: ClientUpdate) -> None:
        trainable = self.context.layout.trainable
        self.G[update.client_id] = update.row[:trainable] - self.bank.rows[0, :trainable]
        self._seen.append(update.client_id)

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        seen = self._seen = []
        super().aggregate(round, updates)
        known = sorted(self.G)
        distances = clusamp_update_distances(
            [self.G[c] for c in known], [known.index(c) for c in seen], self.options.distance
        ).cpu()
        for client_id, column in zip(seen, distances.T, strict=True):
            row = column[-1].repeat(self.context.num_clients)
            row[known] = column[:-1]
            self.distances[client_id] = self.distances[:, client_id] = row


def clusamp_update_distances(updates: list[Tensor], update_indices: list[int], metric: str) -> Tensor:
    """Return the distances of all rows, and of a row of zeros, to the chosen rows.

    The result has shape (rows + 1) x chosen, in float64.
    """
    if not update_indices:
        return torch.zeros(len(updates) + 1, 0, dtype=torch.float64)
    device = updates[0].device
    width = BLOCK[device.type]
    squares = torch.zeros(len(updates) + 1, dtype=torch.float64, device=device)
    sums = torch.zeros(len(updates) + 1, len(update_indices), dtype=torch.float64, device=device)
    for start in range(0, len(updates[0]), width):
        part = [row[start : start + width].double() for row in updates]
        block = torch.stack([*part, torch.zeros_like(part[0])])
        squares += block.square().sum(1)
        sums += torch.cdist(block, block[update_indices], 1.0) if metric == "l1" else block @ block[update_indices].T
    if metric == "l2":
        sums = (squares[:, None] + squares[update_indices] - 2 * sums).clamp_(min=0).sqrt_()
    elif metric == "angle":
        norms = (squares[:, None] * squares[update_indices]).sqrt()
        sums = torch.where(norms > 0, sums / norms, 1.0).clamp_(-1, 1).arccos_()
    sums[update_indices, range(len(update_indices))] = 0.0  # rounding would leave a small positive number
    return sums


def clusamp_sampling_distributions(n: Masses, m: int, distances: NDArray[np.float64]) -> Masses:
    """Return r: m rows that sum to sum(n) each, and whose columns sum to m n_i."""
    full, left = int(n.sum()), m * n
    rows: list[Masses] = []
    for client in np.flatnonzero(left >= full):  # these fill whole distributions alone
        while left[client] >= full:
            rows.append(np.where(np.arange(len(n)) == client, full, 0))
            left[client] -= full
    groups = sorted(_groups(left, full, distances), key=lambda group: -int(left[group].sum()))
    seeds, others = groups[: m - len(rows)], groups[m - len(rows) :]
    shared = [np.where(np.isin(np.arange(len(n)), group), left, 0) for group in seeds]
    for client in (client for group in others for client in group):
        for row in shared:
            poured = min(int(left[client]), full - int(row.sum()))
            row[client] += poured
            left[client] -= poured
    return np.stack(rows + shared)


def _groups(mass: Masses, full: int, distances: NDArray[np.float64]) -> list[Masses]:
    """Return as few groups as the tree allows, none heavier than `full`, without clients of mass 0."""
    clients = np.flatnonzero(mass)
    if len(clients) < 2:
        return [clients] if len(clients) else []
    tree = linkage(squareform(distances[np.ix_(clients, clients)], checks=False), "ward")
    cuts = cut_tree(tree).T[::-1]  # from one group for all to one per client
    labels = next(labels for labels in cuts if np.bincount(labels, mass[clients]).max() <= full)
    return [clients[labels == label] for label in range(labels.max() + 1)]
