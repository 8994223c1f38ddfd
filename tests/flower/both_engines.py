"""A run with the Flower engine, over a network in memory, and with the plain one, which may lose the same answers."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fake import FakeLink, make_sites, reach

from fedloom.api import Run, execute
from fedloom.config import Config
from fedloom.engines import Engine, PlainEngine, Shop
from fedloom.exchange import Job, Lost, Update
from fedloom.request import replace_config


def play(config: Config, folder: Path, link: FakeLink | None = None) -> tuple[Run, FakeLink]:
    link = link or FakeLink(make_sites(config, folder))
    out = folder / "flower"
    return execute(config, out=out, report=False, sites=reach(link, config, out)), link


def plainly(config: Config, folder: Path, **more: Any) -> Run:
    return execute(replace_config(config, engine="plain"), out=folder / "plain", report=False, **more)


class Leaky(PlainEngine):
    """Some answers get lost on their way back, after the client has trained."""

    lost: frozenset[tuple[int, int]] = frozenset()

    def train(self, round: int, jobs: Sequence[Job]) -> Iterator[Update | Lost]:
        for answer in super().train(round, jobs):
            if isinstance(answer, Update) and (round, answer.client) in self.lost:
                yield Lost(answer.job, "no answer within 0.05 s")
            else:
                yield answer


class LeakySites:
    def __init__(self, lost: frozenset[tuple[int, int]]) -> None:
        self.lost = lost

    def seen(self, federation: Any) -> Any:
        return federation

    def engine(self, shop: Shop) -> Engine:
        engine = Leaky(shop)
        engine.lost = self.lost
        return engine
