"""PooledFederatedDataset: client 0 has the training samples of all clients.

The method `centralized` trains on it.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.config import TrainingConfig
from fedloom.core.rng import RngStreams
from fedloom.data import FederatedDataset, Samples
from fedloom.training.batches import split_validation


class PooledFederatedDataset(FederatedDataset):
    """The same clients, but client 0 has the training samples of all, and the others have none."""

    def __init__(self, federated_data: FederatedDataset, config: TrainingConfig, rng_streams: RngStreams) -> None:
        self.name, self.classes, self.shape = federated_data.name, federated_data.classes, federated_data.shape
        self.vocabulary_size, self.transform = federated_data.vocabulary_size, federated_data.transform
        self.test, self.test_owners = federated_data.test, federated_data.test_owners
        self._num_clients = len(federated_data)
        parts = []
        for client_id in range(len(federated_data)):
            samples = federated_data.client_samples(client_id)
            used, held = split_validation(len(samples), config, rng_streams, client_id)
            parts.append(samples.take(used) if len(held) else samples)
        self._pool = Samples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all training samples."""
        return self._pool.x.nbytes + self._pool.y.nbytes

    def __len__(self) -> int:
        return self._num_clients

    def client_samples(self, client_id: int) -> Samples:
        return self._pool if client_id == 0 else self._pool[:0]

    def num_examples(self, client_id: int) -> int:
        return len(self._pool) if client_id == 0 else 0

    def label_counts(self) -> NDArray[np.int64] | None:
        return None
