"""Runs in this process that lose given answers: what a run over sites that lost the same ones is held against."""

from collections.abc import Iterator, Sequence

from fedloom.data import Federation
from fedloom.engines import Engine, PlainEngine, Shop
from fedloom.exchange import Job, Lost, Update

Answers = frozenset[tuple[int, int]]
"""(round, client), rounds from 0."""


class LosingSites:
    """In the place of sites: clients in this process, some of whose answers are lost after they have trained."""

    def __init__(self, lost: Answers, reason: str = "lost as in the other run") -> None:
        self._lost, self._reason = lost, reason

    def seen(self, federation: Federation) -> Federation:
        """The server sees all."""
        return federation

    def engine(self, shop: Shop) -> Engine:
        """What trains, and loses."""
        return _LosingEngine(shop, self._lost, self._reason)


class _LosingEngine(PlainEngine):
    def __init__(self, shop: Shop, lost: Answers, reason: str) -> None:
        super().__init__(shop)
        self._lost, self._reason = lost, reason

    def train(self, round: int, jobs: Sequence[Job]) -> Iterator[Update | Lost]:
        for answer in super().train(round, jobs):
            gone = isinstance(answer, Update) and (round, answer.client) in self._lost
            yield Lost(answer.job, self._reason) if gone else answer
