"""A transport in memory: requests go to the sites as bytes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedloom.config import Config, make_config
from fedloom.flower.app import make_app_run_config
from fedloom.flower.message import SiteMessage, decode_message, encode_message
from fedloom.flower.server.engine import FlowerEngineFactory
from fedloom.flower.server.transport import TransportReply
from fedloom.flower.site.handlers import SiteHandler
from fedloom.runs.resolve import resolve_run

Meddle = Callable[[int, SiteMessage, SiteMessage], SiteMessage | None]
"""(node, question, answer) -> what arrives instead; None: nothing does, for now."""


class FakeLink:
    """Nodes are numbered from 100 on."""

    def __init__(self, sites: dict[int, SiteHandler]) -> None:
        self.sites = sites
        self.away: set[int] = set()
        self.meddle: Meddle | None = None
        self.waiting: dict[str, TransportReply] = {}
        self.held: dict[str, TransportReply] = {}
        """Answers that are on their way until a test lets them arrive."""
        self.asked: list[SiteMessage] = []
        self.answered: list[SiteMessage] = []
        self._tickets = 0

    def nodes(self) -> list[int]:
        return sorted(set(self.sites) - self.away)

    def send(self, node: int, question: SiteMessage, seconds: float) -> str | None:
        self._tickets += 1
        ticket = str(self._tickets)
        question = decode_message(encode_message(question))
        self.asked.append(question)
        answer: SiteMessage | None = decode_message(encode_message(self.sites[node].handle(question)))
        assert answer is not None
        self.answered.append(answer)
        arrived = answer if self.meddle is None else self.meddle(node, question, answer)
        if arrived is None:
            self.held[ticket] = TransportReply(ticket, node, answer)
        else:
            self.waiting[ticket] = TransportReply(ticket, node, arrived)
        return ticket

    def receive(self, tickets: Sequence[str]) -> list[TransportReply]:
        return [self.waiting.pop(ticket) for ticket in tickets if ticket in self.waiting]

    def let_go(self) -> None:
        """Let everything that is held arrive."""
        self.waiting.update(self.held)
        self.held.clear()


def make_run(**settings: Any) -> Config:
    """A run that takes a moment, and goes on whoever is lost."""
    usual = {
        "clients": 5,
        "clients_per_round": 5,
        "rounds": 3,
        "partition": "dirichlet:0.5",
        "epochs": 1,
        "engine": "flower",
    }
    return make_config({**usual, "min_clients": 0, **settings})


def make_sites(config: Config, folder: Path, nodes: list[dict[str, Any]] | None = None) -> dict[int, SiteHandler]:
    """A site for each client, or for each of these node configurations."""
    nodes = [{"client": client} for client in range(config.clients or 0)] if nodes is None else nodes
    given = flat(make_app_run_config(config, []))
    app = folder / "app"
    app.mkdir(exist_ok=True)
    return {100 + k: SiteHandler(given, node, app, folder / "sites" / f"site-{k}") for k, node in enumerate(nodes)}


def flat(values: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings as Flower flattens them."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value}
    return found


def reach(link: FakeLink, config: Config, folder: Path, join: float = 0.01) -> FlowerEngineFactory:
    return FlowerEngineFactory(link, resolve_run(config), folder, join)
