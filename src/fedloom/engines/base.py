"""What an engine does: it trains clients and scores models, and does not know methods."""

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
from fedloom.training.local_training import EngineContext


class Engine(ABC):
    """Runs clients. Used as a context manager, so that processes and memory are given back."""

    name: str
    device: torch.device = torch.device("cpu")
    saves_every_round: bool = False
    """Whether a checkpoint must follow every round: where clients keep state elsewhere, which goes on with them."""

    def __init__(self, shop: EngineContext) -> None:
        self.shop = shop
        self.homes = shop.homes

    @property
    def at_once(self) -> int:
        """How many clients train at once on the device, each of which takes some of its memory."""
        return 1

    @abstractmethod
    def train(self, round: int, jobs: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        """Train the clients of these jobs; answers come in the order of the jobs, each lent until the next."""

    def fewest_answers(self, asked: int) -> int:
        """How many of the clients asked in a round must answer where the settings do not say."""
        return 0

    @abstractmethod
    def score(self, row: Tensor) -> EvaluationResult | None:
        """How a model does on the test set; None when there is none."""

    @abstractmethod
    def score_clients(self, round: int, jobs: Sequence[ClientTask]) -> list[float | None]:
        """The accuracy of each client's own model, made from the model in its job after `round` rounds.

        It is that on the client's own test samples or, where it has none, what to expect on its mixture of classes.
        None for a client whose model cannot be made or has nothing to be tested on.
        """

    @staticmethod
    def make_bank(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Bank:
        """A bank of rows where this engine reads them without copying."""
        return Bank.memory(count, width, dtype, device)

    def accept(self, update: ClientUpdate) -> None:
        """The server took this update: what its client wanted to keep is now kept."""
        self.homes.keep(update.client, update.home)

    def diagnostics(self) -> Mapping[str, float]:
        """Numbers about the work so far, for the record of the round."""
        return {}

    def state(self) -> dict[str, Any]:
        """What the engine must know to go on later, beside what clients keep."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        return

    def close(self) -> None:
        """Give back what the engine holds."""
        return

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def raise_insufficient_memory(error: BaseException | None = None) -> NoReturn:
    raise InsufficientMemoryError("the GPU has not enough memory to train one client; use a smaller batch.") from error


class RemoteEngineFactory(Protocol):
    """Clients elsewhere, in place of an engine on this machine."""

    def seen(self, federation: FederatedDataset) -> FederatedDataset:
        """What the server sees of the clients' data."""
        ...

    def engine(self, shop: EngineContext) -> Engine:
        """What asks the sites."""
        ...
