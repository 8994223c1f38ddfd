"""Who is there: which node has which clients, and how many samples they have.

A site has a name of its own, which lies in its folder, and the numbers of its clients: those that its node's
configuration names, or the lowest free one. Both outlive the node's address. What was registered is kept in the run's
folder, so that a server that is started again knows its sites.
"""

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from fedloom.errors import FedloomError
from fedloom.flower.message import MessageRejected, MessageRejectedPermanently, SiteMessage
from fedloom.flower.server.transport import Transport
from fedloom.utils.storage import read_json, write_json

LOG = logging.getLogger("flwr.fedloom")
"""Below Flower's logger, so that its handlers write it, and `flwr log` shows it."""

GREETING_SECONDS = 600.0
"""How long a site has to say who it is: it reads its data first."""
AGAIN_SECONDS = 30.0
"""After this time a node that could not be used is asked again."""


@dataclass(frozen=True)
class _RegisteredClient:
    """What is known of a client for the whole run."""

    site: str
    samples: int
    """How many samples it has."""
    trains: int
    """How many it trains on; the others it holds out for validation."""


@dataclass
class ClientRegistry:
    """The clients of a run and the nodes they are at."""

    clients: int
    run: str = field(default_factory=lambda: token_hex(16))
    """The name of the run, which questions carry."""
    registered: dict[int, _RegisteredClient] = field(default_factory=dict)
    greetings: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """What a client's site said of itself, of those that are connected."""
    troubles: dict[int, str] = field(default_factory=dict)
    """Nodes that could not be registered, and why."""

    def __post_init__(self) -> None:
        self._node_of: dict[int, int] = {}
        self._asked: dict[str, tuple[int, float]] = {}
        self._known: set[int] = set()
        self._again: dict[int, float] = {}
        self._unwilling: set[int] = set()
        """Nodes that have refused this run for good."""
        self._promised: dict[str, int] = {}
        self._saved: object = None

    def node_of(self, client: int) -> int | None:
        """Where a client is now."""
        return self._node_of.get(client)

    def samples(self, client: int) -> int:
        """How many samples a client has; 0 as long as nobody knows."""
        entry = self.registered.get(client)
        return entry.samples if entry else 0

    def missing(self) -> list[int]:
        """Clients that are not connected."""
        return [client for client in range(self.clients) if client not in self._node_of]

    def absence(self) -> str:
        """Why a client that is missing may be so. Of a node that cannot be used nobody knows whose it is."""
        unused = sorted(set(self.troubles.values()))
        return "its site is not connected" + (f", or cannot be used: {'; '.join(unused[:2])}" if unused else "")

    def join(self, link: Transport, seconds: float, poll: float = 0.2) -> None:
        """Wait until all clients are there, or for so many seconds."""
        end = time.monotonic() + seconds
        while True:
            self.refresh(link)
            # As many sites as clients are missing will not come: there is nobody to wait for.
            if len(self.missing()) <= len(self._unwilling) or time.monotonic() > end:
                break
            time.sleep(poll)
        if not self._node_of:
            reasons = "; ".join(sorted(set(self.troubles.values()))[:3])
            waited = f" after {seconds:g} s" if time.monotonic() > end else ""
            raise FedloomError(f"no site could be used{waited}{f': {reasons}' if reasons else ''}.")
        if self.missing():
            LOG.warning("not there: %s; beginning without", _few(self.missing()))

    def wait_for(self, link: Transport, clients: Iterable[int], seconds: float, poll: float = 0.1) -> None:
        """See who is there now, and give those that have just been asked who they are a moment to say so."""
        end = time.monotonic() + seconds
        self.refresh(link)
        fresh = set(self._asked)
        while fresh & set(self._asked) and set(clients) & set(self.missing()) and time.monotonic() < end:
            time.sleep(poll)
            self.refresh(link)

    def refresh(self, link: Transport) -> None:
        """Note who has come and gone; whoever is new is asked who it is."""
        now, nodes = time.monotonic(), set(link.nodes())
        for client, node in list(self._node_of.items()):
            if node not in nodes:
                LOG.warning("client %d at node %d is not connected any more", client, node)
                del self._node_of[client], self.greetings[client]
        self._unwilling &= nodes
        self.troubles = {node: trouble for node, trouble in self.troubles.items() if node in nodes}
        self._known = {node for node in self._known & nodes if now < self._again.get(node, math.inf)}
        for ticket, (node, since) in list(self._asked.items()):
            if node not in nodes or now - since > GREETING_SECONDS:
                del self._asked[ticket]
                self._known.discard(node)
        for node in sorted(nodes - self._known):
            self._ask(link, node)
        if self._asked:
            for answer in link.receive(list(self._asked)):
                node, _ = self._asked.pop(answer.ticket, (0, 0.0))
                if node:
                    self._hear(link, node, answer.parcel, answer.error)

    def _ask(self, link: Transport, node: int, **more: Any) -> None:
        address = {"run": self.run, "round": 0, "client": -1, "nonce": token_hex(16)}
        ticket = link.send(node, SiteMessage("hello", {**address, **more}), GREETING_SECONDS)
        if ticket is not None:
            self._asked[ticket] = node, time.monotonic()
            self._known.add(node)
            self._again.pop(node, None)

    def _hear(self, link: Transport, node: int, parcel: SiteMessage | None, error: str) -> None:
        try:
            if parcel is None or parcel.kind != "hello":
                header = parcel.header if parcel else {}
                kind = MessageRejectedPermanently if header.get("for_good") is True else MessageRejected
                raise kind(error or str(header.get("reason", "it gave no reason")))
            if parcel.header.get("run") != self.run:
                raise MessageRejected("it answered another run's question")
            if not self._register(link, node, parcel.header):
                return
            self.troubles.pop(node, None)
            self._again.pop(node, None)
            self._unwilling.discard(node)
        except MessageRejected as refused:
            if isinstance(refused, MessageRejectedPermanently):
                self._unwilling.add(node)
            if self.troubles.get(node) != str(refused):
                LOG.warning("node %d cannot be used: %s", node, refused)
            self.troubles[node], self._again[node] = str(refused), time.monotonic() + AGAIN_SECONDS

    def _register(self, link: Transport, node: int, header: Mapping[str, Any]) -> bool:
        """Note where the clients of a site are; False where it must first be told its number."""
        site, counts = header.get("site"), header.get("clients")
        if not isinstance(site, str) or not 0 < len(site) <= 100 or not isinstance(counts, dict):
            raise MessageRejected("it does not say who it is")
        if not counts:
            self._ask(link, node, assigned=self._number_for(site))
            return False
        entries = {client: _RegisteredClient(site, *pair) for client, pair in _counts(counts, self.clients).items()}
        for client, entry in entries.items():
            there, before = self._node_of.get(client), self.registered.get(client)
            if there not in (None, node):
                raise MessageRejected(f"it says that it is client {client}, which is at node {there} already")
            if before is None:
                continue
            if (before.samples, before.trains) != (entry.samples, entry.trains):
                raise MessageRejected(
                    f"client {client} had {before.samples} samples and now has {entry.samples}; a run has the same "
                    "throughout"
                )
            if before.site != site:
                LOG.warning("client %d is at another site than before", client)
        for client, entry in entries.items():
            self.registered[client] = entry
            self._node_of[client], self.greetings[client] = node, header
            LOG.info("client %d is at node %d and has %d samples", client, node, entry.samples)
        return True

    def _number_for(self, site: str) -> int:
        """The number that this site had, or the lowest free one."""
        for client, entry in self.registered.items():
            if entry.site == site:
                return client
        if site not in self._promised:
            taken = {*self.registered, *self._promised.values()}
            free = [client for client in range(self.clients) if client not in taken]
            if not free:
                raise MessageRejected(f"all {self.clients} clients have their sites already")
            self._promised[site] = free[0]
        return self._promised[site]

    def save(self, path: Path) -> None:
        """Keep what is registered, if anything has changed."""
        state = {str(k): [e.site, e.samples, e.trains] for k, e in sorted(self.registered.items())}
        if state != self._saved:
            write_json(path, {"run": self.run, "clients": state})
            self._saved = state

    def load(self, path: Path) -> None:
        """Know the sites again."""
        if path.exists():
            saved = read_json(path)
            self.run = saved["run"]
            self.registered = {int(client): _RegisteredClient(*entry) for client, entry in saved["clients"].items()}


def _counts(counts: Mapping[str, Any], clients: int) -> dict[int, tuple[int, int]]:
    """How many samples clients have and train on, from what a site says."""
    found = {}
    for name, pair in counts.items():
        if not name.isdecimal() or not int(name) < clients:
            raise MessageRejected(f"it says that it is client {name[:20]!r}; the run has {clients} clients, from 0 on")
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(type(count) is int and 0 <= count < 1 << 48 for count in pair)
            or pair[1] > pair[0]
        ):
            raise MessageRejected(f"it says that client {name} has {str(pair)[:60]} samples")
        found[int(name)] = (pair[0], pair[1])
    return found


def _few(numbers: list[int]) -> str:
    word = "client" if len(numbers) == 1 else "clients"
    more = f" and {len(numbers) - 10} more" if len(numbers) > 10 else ""
    return f"{word} {', '.join(map(str, numbers[:10]))}{more}"
