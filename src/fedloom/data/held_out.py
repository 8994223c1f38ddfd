"""Clients that never train: draw them, and separate them from the others."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.data.federated import FederatedDataset, PartitionedDataset
from fedloom.data.partitions.base import Indices, Rng
from fedloom.data.samples import Samples


@dataclass(frozen=True)
class HeldOutClients:
    """Clients that never train. The model is tested on them, as on clients that join after the training."""

    federated_data: FederatedDataset
    """Their samples. Their ids here are positions in `client_ids`."""
    client_ids: tuple[int, ...]
    """Their ids among all clients of the data, in random order: any first part of them is a random sample."""

    def __len__(self) -> int:
        return len(self.client_ids)

    @property
    def have_test_samples(self) -> bool:
        """Whether these clients have test samples of their own, so that a method may adapt to their other samples."""
        return self.federated_data.test_owners is not None

    def samples(self, position: int) -> tuple[Samples, Samples]:
        """Return samples to adapt to, and samples to test on: all of the client's, if it has no test samples."""
        train, owners = self.federated_data.client_samples(position), self.federated_data.test_owners
        if owners is None or self.federated_data.test is None:
            return train, train
        return train, self.federated_data.test.take(np.flatnonzero(owners == position))


def draw_held_out_clients(num_clients: int, count: int, rng: Rng) -> Indices:
    """Draw the ids of `count` clients, in random order."""
    return rng.permutation(num_clients)[:count].astype(np.int64)


def separate_held_out_clients(
    federated_data: FederatedDataset, client_ids: Indices
) -> tuple[FederatedDataset, HeldOutClients]:
    """Return the other clients, numbered from 0 in their order, and the held-out ones."""
    others = np.setdiff1d(np.arange(len(federated_data)), client_ids)
    held_out = HeldOutClients(_select_clients(federated_data, client_ids), tuple(map(int, client_ids)))
    return _select_clients(federated_data, others), held_out


def _select_clients(federated_data: FederatedDataset, client_ids: Indices) -> FederatedDataset:
    """Return some of the clients, numbered from 0 in this order, with their own test samples or the common ones."""
    if isinstance(federated_data, PartitionedDataset):
        selected: FederatedDataset = copy.copy(federated_data)
        assert isinstance(selected, PartitionedDataset)
        selected.client_indices = [federated_data.client_indices[client_id] for client_id in client_ids]
    else:
        counted = type(federated_data).num_examples is not FederatedDataset.num_examples
        selected = (_CountedSelectedClients if counted else _SelectedClients)(federated_data, client_ids)
    owners = federated_data.test_owners
    if owners is not None and federated_data.test is not None:
        position = np.full(len(federated_data), -1, dtype=np.int64)
        position[client_ids] = np.arange(len(client_ids))
        mine = np.flatnonzero(position[owners] >= 0)
        selected.test, selected.test_owners = federated_data.test.take(mine), position[owners[mine]]
    return selected


class _SelectedClients(FederatedDataset):
    """Some of the clients of another federated data set."""

    def __init__(self, federated_data: FederatedDataset, client_ids: Indices) -> None:
        self._federated_data, self._client_ids = federated_data, [int(client_id) for client_id in client_ids]
        for name in ("name", "classes", "shape", "vocabulary_size", "transform", "test", "server_data"):
            setattr(self, name, getattr(federated_data, name))

    def __len__(self) -> int:
        return len(self._client_ids)

    def client_samples(self, client_id: int) -> Samples:
        return self._federated_data.client_samples(self._client_ids[client_id])

    def label_counts(self) -> NDArray[np.int64] | None:
        counts = self._federated_data.label_counts()
        return None if counts is None else counts[self._client_ids]


class _CountedSelectedClients(_SelectedClients):
    """The same, if the numbers of samples are known without loading them."""

    def num_examples(self, client_id: int) -> int:
        return self._federated_data.num_examples(self._client_ids[client_id])


def client_positions(federated_data: FederatedDataset, client_ids: Sequence[int] | Indices) -> Indices:
    """Return the positions of these clients' samples in the pool, sorted; none if there is no pool."""
    if not isinstance(federated_data, PartitionedDataset) or not len(client_ids):
        return np.arange(0)
    return np.sort(np.concatenate([federated_data.client_indices[client_id] for client_id in client_ids]))
