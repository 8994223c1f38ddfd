"""The base class of engines, which train clients and evaluate models."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from fedloom.core.bank import Bank
from fedloom.core.evaluation import EvaluationResult
from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.data import FederatedDataset
from fedloom.errors import InsufficientMemoryError
from fedloom.training.context import TrainingContext
from fedloom.training.local_training import ClientStates


class Engine(ABC):
    """Train clients and evaluate models. Use it as a context manager, so that it releases processes and memory."""

    name: str
    device: torch.device = torch.device("cpu")
    checkpoint_every_round: bool = False
    """Whether every round needs a checkpoint, because clients elsewhere store their state round by round."""

    def __init__(self, context: TrainingContext) -> None:
        self.context = context
        self.client_states = ClientStates(context.client.state_shapes, context.layout.dtype)

    @property
    def concurrency(self) -> int:
        """Return how many clients train at once on the device and share its memory."""
        return 1

    @abstractmethod
    def train(self, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        """Train the clients of these tasks.

        Args:
            tasks: One task for each client, all of the same round.

        Yields:
            An update or a failure for each task, in the order of the tasks. Its tensors are valid until the next one.
        """

    def default_min_clients(self, num_clients: int) -> int:
        """Return how many clients of a round must send an update if `--min-clients` is not set."""
        return 0

    @abstractmethod
    def evaluate(self, row: Tensor) -> EvaluationResult | None:
        """Evaluate a model on the test set. Return None if there is none."""

    @abstractmethod
    def evaluate_clients(self, tasks: Sequence[ClientTask]) -> list[float | None]:
        """Return the accuracy of each client's personalized model.

        It is tested on the client's own test samples. Without any, the accuracy per class is weighted by the classes of
        the client.

        Args:
            tasks: One task for each client, with the model to personalize. Their
                round is the number of finished rounds.

        Returns:
            One accuracy per task; None if personalization failed or there are no test samples.
        """

    @staticmethod
    def make_bank(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Bank:
        """Create a bank of rows that this engine reads without a copy."""
        return Bank.memory(count, width, dtype, device)

    def commit_update(self, update: ClientUpdate) -> None:
        """Store the client state of an update that the server has accepted."""
        self.client_states.save(update.client_id, update.client_state)

    def diagnostics(self) -> Mapping[str, float]:
        """Return numbers for the record of the round."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the engine for a checkpoint, without the client states."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        return

    def close(self) -> None:
        """Release processes and memory."""
        return

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def raise_engine_memory_error(error: BaseException | None = None) -> NoReturn:
    raise InsufficientMemoryError("the GPU has not enough memory to train one client; use a smaller batch.") from error


class RemoteEngineFactory(Protocol):
    """Create an engine whose clients are elsewhere, such as Flower sites."""

    def server_view(self, federated_data: FederatedDataset) -> FederatedDataset:
        """Return what the server may see of the clients' data."""
        ...

    def create_engine(self, context: TrainingContext) -> Engine:
        """Create the engine."""
        ...
