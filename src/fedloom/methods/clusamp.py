"""CluSamp: one client is drawn from each of m groups of clients with similar updates.

Fraboni et al., "Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection in Federated
Learning", ICML 2021, algorithm 2. The server keeps the last update G_i = w_i - w of each client, zero at first. Every
round, with n_i samples of client i, M = sum n_i and m clients to be asked:

    cut the Ward tree over the distances of the G_i into groups of mass sum m n_i <= M
    the m heaviest groups begin m distributions; the clients of the others are poured into what is not full,
    a client being split over two if need be, until each holds M
    draw one client from each distribution, with the probabilities r_ki / M

Every client is so drawn m n_i / M times on average, and the mean of the m models, with equal weights, is unbiased.
Masses are integers, so the sums are exact. A client with m n_i > M first gets distributions of its own.

A client that is drawn twice would do the same work twice, since its batches are those of (seed, round, client): it is
asked once and counts twice. The authors' code hands the matrix of distances to scipy as if it were a list of points,
here it is what it is. A zero update lies at angle 0 to all others.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.base import MethodContext, Options, Server
from fedloom.methods.registry import Method, register

Masses = NDArray[np.int64]
BLOCK = {"cpu": 1 << 14, "cuda": 1 << 18}
"""Columns of updates that are compared at a time."""


class CluSampOptions(Options):
    distance: Literal["angle", "l2", "l1"] = "angle"
    """how unlike two updates are: the angle between them, or the L2 or L1 norm of their difference"""


class CluSampServer(Server[CluSampOptions]):
    """FedAvg's model, the last update of each client, and their distances."""

    kept = ("bank", "G", "distances")

    def __init__(self, context: MethodContext, options: CluSampOptions) -> None:
        super().__init__(context, options)
        self.bank = context.bank(1)
        self.bank.rows[0] = context.initial
        self.G: dict[int, Tensor] = {}
        """The last update of each client that has been seen; that of the others is zero."""
        self.distances = torch.zeros(context.clients, context.clients, dtype=torch.float64)
        self._times: Counter[int] = Counter()

    def select(self, round: int) -> list[int]:
        n = np.array([self.context.samples(client) for client in range(self.context.clients)], dtype=np.int64)
        if not n.sum():
            return super().select(round)
        draw = self.context.streams.numpy("select", round)
        r = clusamp_sampling_distributions(n, self.context.per_round, self.distances.numpy())
        return [int(np.searchsorted(np.cumsum(row), draw.integers(n.sum()), side="right")) for row in r]

    def dispatch(self, round: int, clients: list[int]) -> Iterable[ClientTask]:
        self._times = Counter(clients)
        return [ClientTask(client, self.bank.rows[0]) for client in self._times]

    def collect(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        w, mean, seen = self.bank.rows[0], WeightedMean(self.context.layout), []
        trainable = self.context.layout.trainable
        for update in updates:
            mean.add(update.row, self._times[update.client])
            self.G[update.client] = update.row[:trainable] - w[:trainable]
            seen.append(update.client)
        mean.into(w)
        known = sorted(self.G)
        between = clusamp_update_distances(
            [self.G[c] for c in known], [known.index(c) for c in seen], self.options.distance
        ).cpu()
        for client, column in zip(seen, between.T, strict=True):
            row = column[-1].repeat(self.context.clients)
            row[known] = column[:-1]
            self.distances[client] = self.distances[:, client] = row

    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self.G = {client: g.to(self.bank.rows.device) for client, g in self.G.items()}

    def deploy(self) -> Tensor:
        return self.bank.rows[0]

    def models(self) -> Tensor:
        return self.bank.rows


def clusamp_update_distances(rows: list[Tensor], chosen: list[int], kind: str) -> Tensor:
    """The distances of all rows, and last of a row of zeros, from the chosen ones: (rows + 1) x chosen, in float64."""
    if not chosen:
        return torch.zeros(len(rows) + 1, 0, dtype=torch.float64)
    device = rows[0].device
    width = BLOCK[device.type]
    squares = torch.zeros(len(rows) + 1, dtype=torch.float64, device=device)
    sums = torch.zeros(len(rows) + 1, len(chosen), dtype=torch.float64, device=device)
    for start in range(0, len(rows[0]), width):
        part = [row[start : start + width].double() for row in rows]
        block = torch.stack([*part, torch.zeros_like(part[0])])
        squares += block.square().sum(1)
        sums += torch.cdist(block, block[chosen], 1.0) if kind == "l1" else block @ block[chosen].T
    if kind == "l2":
        sums = (squares[:, None] + squares[chosen] - 2 * sums).clamp_(min=0).sqrt_()
    elif kind == "angle":
        norms = (squares[:, None] * squares[chosen]).sqrt()
        sums = torch.where(norms > 0, sums / norms, 1.0).clamp_(-1, 1).arccos_()
    sums[chosen, range(len(chosen))] = 0.0  # which rounding would make a little more
    return sums


def clusamp_sampling_distributions(n: Masses, m: int, between: NDArray[np.float64]) -> Masses:
    """r: m rows that sum to sum(n) each, whose columns sum to m n_i; `between` are the clients' distances."""
    full, left = int(n.sum()), m * n
    rows: list[Masses] = []
    for client in np.flatnonzero(left >= full):  # these fill distributions alone
        while left[client] >= full:
            rows.append(np.where(np.arange(len(n)) == client, full, 0))
            left[client] -= full
    groups = sorted(_groups(left, full, between), key=lambda group: -int(left[group].sum()))
    seeds, others = groups[: m - len(rows)], groups[m - len(rows) :]
    shared = [np.where(np.isin(np.arange(len(n)), group), left, 0) for group in seeds]
    for client in (client for group in others for client in group):
        for row in shared:
            poured = min(int(left[client]), full - int(row.sum()))
            row[client] += poured
            left[client] -= poured
    return np.stack(rows + shared)


def _groups(mass: Masses, full: int, between: NDArray[np.float64]) -> list[Masses]:
    """As few groups of similar clients as the tree allows, none of more mass than `full`; without those of no mass."""
    clients = np.flatnonzero(mass)
    if len(clients) < 2:
        return [clients] if len(clients) else []
    tree = linkage(squareform(between[np.ix_(clients, clients)], checks=False), "ward")
    cuts = cut_tree(tree).T[::-1]  # from one group to one for each client
    labels = next(labels for labels in cuts if np.bincount(labels, mass[clients]).max() <= full)
    return [clients[labels == label] for label in range(labels.max() + 1)]


register(
    Method(
        name="clusamp",
        summary="draw one client from each of several groups with similar updates",
        reference="Fraboni et al., ICML 2021",
        options=CluSampOptions,
        server=CluSampServer,
        models_sent="2K",
        needs_each="groups the clients by their updates",
        server_keeps="N+1 models",
        extra_compute="server clusters",
    )
)
