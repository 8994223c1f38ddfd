"""Engines that lose given updates, in this process.

Runs over sites that lose the same updates are compared with them.
"""

from collections.abc import Iterator, Sequence

from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.data import FederatedDataset
from fedloom.engines.base import Engine
from fedloom.engines.sequential import SequentialEngine
from fedloom.training.context import TrainingContext

Answers = frozenset[tuple[int, int]]
"""(round, client), rounds from 0."""


class LosingSites:
    """In the place of sites: clients in this process, some of whose answers are lost after they have trained."""

    def __init__(self, lost: Answers, reason: str = "lost as in the other run") -> None:
        self._lost, self._reason = lost, reason

    def server_view(self, federated_data: FederatedDataset) -> FederatedDataset:
        """The server sees all."""
        return federated_data

    def create_engine(self, context: TrainingContext) -> Engine:
        """What trains, and loses."""
        return _LosingEngine(context, self._lost, self._reason)


class _LosingEngine(SequentialEngine):
    def __init__(self, shop: TrainingContext, lost: Answers, reason: str) -> None:
        super().__init__(shop)
        self._lost, self._reason = lost, reason

    def train(self, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate | ClientFailure]:
        for answer in super().train(tasks):
            gone = isinstance(answer, ClientUpdate) and (answer.task.round, answer.client_id) in self._lost
            yield ClientFailure(answer.task, self._reason) if gone else answer
