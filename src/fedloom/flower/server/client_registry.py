"""The client registry: which node has which clients, and how many samples.

A site has a name, stored in its folder, and the numbers of its clients: those in its node's configuration, or the
lowest free one. Both outlive the node's address. The registry is saved in the run directory, so that a restarted
server knows its sites.
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
"""A child of Flower's logger: Flower's handlers write its messages, and `flwr log` shows them."""

HELLO_SECONDS = 600.0
"""Seconds that a site has to register, because it reads its data first."""
AGAIN_SECONDS = 30.0
"""Seconds after which the server asks a node again that could not be used."""


@dataclass(frozen=True)
class _RegisteredClient:
    """The facts about a client that hold for the whole run."""

    site: str
    num_examples: int
    """Number of samples."""
    num_train_examples: int
    """Number of samples to train on; the others are held out for validation."""


@dataclass
class ClientRegistry:
    """The clients of a run and their nodes."""

    num_clients: int
    run: str = field(default_factory=lambda: token_hex(16))
    """Name of the run, sent with every request."""
    registered: dict[int, _RegisteredClient] = field(default_factory=dict)
    registrations: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Headers that connected sites registered with, by client."""
    troubles: dict[int, str] = field(default_factory=dict)
    """Reasons why nodes could not be registered."""

    def __post_init__(self) -> None:
        self._node_of: dict[int, int] = {}
        self._asked: dict[str, tuple[int, float]] = {}
        self._known: set[int] = set()
        self._again: dict[int, float] = {}
        self._unwilling: set[int] = set()
        """Nodes that have refused this run permanently."""
        self._promised: dict[str, int] = {}
        self._saved: object = None

    def node_of(self, client_id: int) -> int | None:
        """Return the node of a client, or None if it is not connected."""
        return self._node_of.get(client_id)

    def num_examples(self, client_id: int) -> int:
        """Return the number of samples of a client, or 0 if it has not registered."""
        entry = self.registered.get(client_id)
        return entry.num_examples if entry else 0

    def missing_client_ids(self) -> list[int]:
        """Return the clients that are not connected."""
        return [client_id for client_id in range(self.num_clients) if client_id not in self._node_of]

    def absence_reason(self) -> str:
        """Return why a client may be missing. Nobody knows the clients of a node that cannot be used."""
        unused = sorted(set(self.troubles.values()))
        return "its site is not connected" + (f", or cannot be used: {'; '.join(unused[:2])}" if unused else "")

    def join(self, transport: Transport, seconds: float, poll: float = 0.2) -> None:
        """Wait until all clients are connected, but no longer than `seconds`."""
        end = time.monotonic() + seconds
        while True:
            self.refresh(transport)
            # Every missing client may belong to a site that has refused permanently: nobody is left to wait for.
            if len(self.missing_client_ids()) <= len(self._unwilling) or time.monotonic() > end:
                break
            time.sleep(poll)
        if not self._node_of:
            reasons = "; ".join(sorted(set(self.troubles.values()))[:3])
            waited = f" after {seconds:g} s" if time.monotonic() > end else ""
            raise FedloomError(f"no site could be used{waited}{f': {reasons}' if reasons else ''}.")
        if self.missing_client_ids():
            LOG.warning("not connected: %s; the run starts without", _few(self.missing_client_ids()))

    def wait_for(self, transport: Transport, client_ids: Iterable[int], seconds: float, poll: float = 0.1) -> None:
        """Update the registry, and give nodes that were just asked to register up to `seconds` to reply."""
        end = time.monotonic() + seconds
        self.refresh(transport)
        fresh = set(self._asked)
        while fresh & set(self._asked) and set(client_ids) & set(self.missing_client_ids()) and time.monotonic() < end:
            time.sleep(poll)
            self.refresh(transport)

    def refresh(self, transport: Transport) -> None:
        """Update the connected nodes, and ask new ones to register."""
        now, nodes = time.monotonic(), set(transport.nodes())
        for client_id, node in list(self._node_of.items()):
            if node not in nodes:
                LOG.warning("client %d at node %d has disconnected", client_id, node)
                del self._node_of[client_id], self.registrations[client_id]
        self._unwilling &= nodes
        self.troubles = {node: trouble for node, trouble in self.troubles.items() if node in nodes}
        self._known = {node for node in self._known & nodes if now < self._again.get(node, math.inf)}
        for ticket, (node, since) in list(self._asked.items()):
            if node not in nodes or now - since > HELLO_SECONDS:
                del self._asked[ticket]
                self._known.discard(node)
        for node in sorted(nodes - self._known):
            self._ask(transport, node)
        if self._asked:
            for answer in transport.receive(list(self._asked)):
                node, _ = self._asked.pop(answer.ticket, (0, 0.0))
                if node:
                    self._handle_reply(transport, node, answer.message, answer.error)

    def _ask(self, transport: Transport, node: int, **more: Any) -> None:
        address = {"run": self.run, "round": 0, "client_id": -1, "nonce": token_hex(16)}
        ticket = transport.send(node, SiteMessage("hello", {**address, **more}), HELLO_SECONDS)
        if ticket is not None:
            self._asked[ticket] = node, time.monotonic()
            self._known.add(node)
            self._again.pop(node, None)

    def _handle_reply(self, transport: Transport, node: int, message: SiteMessage | None, error: str) -> None:
        try:
            if message is None or message.kind != "hello":
                header = message.header if message else {}
                kind = MessageRejectedPermanently if header.get("permanent") is True else MessageRejected
                raise kind(error or str(header.get("reason", "it gave no reason")))
            if message.header.get("run") != self.run:
                raise MessageRejected("it answered a request of another run")
            if not self._register(transport, node, message.header):
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

    def _register(self, transport: Transport, node: int, header: Mapping[str, Any]) -> bool:
        """Record the node of a site's clients; return False if the site must first get a number."""
        site, counts = header.get("site"), header.get("clients")
        if not isinstance(site, str) or not 0 < len(site) <= 100 or not isinstance(counts, dict):
            raise MessageRejected("it registered without a valid site or clients")
        if not counts:
            self._ask(transport, node, assigned=self._client_id_for(site))
            return False
        entries = {
            client_id: _RegisteredClient(site, *pair) for client_id, pair in _counts(counts, self.num_clients).items()
        }
        for client_id, entry in entries.items():
            there, before = self._node_of.get(client_id), self.registered.get(client_id)
            if there not in (None, node):
                raise MessageRejected(f"it says that it is client {client_id}, which is at node {there} already")
            if before is None:
                continue
            if (before.num_examples, before.num_train_examples) != (entry.num_examples, entry.num_train_examples):
                raise MessageRejected(
                    f"client {client_id} had {before.num_examples} samples and now has {entry.num_examples}; "
                    "this must not change during a run"
                )
            if before.site != site:
                LOG.warning("client %d has moved to another site", client_id)
        for client_id, entry in entries.items():
            self.registered[client_id] = entry
            self._node_of[client_id], self.registrations[client_id] = node, header
            LOG.info("client %d is at node %d and has %d samples", client_id, node, entry.num_examples)
        return True

    def _client_id_for(self, site: str) -> int:
        """Return the number that this site had, or the lowest free one."""
        for client_id, entry in self.registered.items():
            if entry.site == site:
                return client_id
        if site not in self._promised:
            taken = {*self.registered, *self._promised.values()}
            free = [client_id for client_id in range(self.num_clients) if client_id not in taken]
            if not free:
                raise MessageRejected(f"all {self.num_clients} clients have a site already")
            self._promised[site] = free[0]
        return self._promised[site]

    def save(self, path: Path) -> None:
        """Save the registered clients, if anything has changed."""
        state = {str(k): [e.site, e.num_examples, e.num_train_examples] for k, e in sorted(self.registered.items())}
        if state != self._saved:
            write_json(path, {"run": self.run, "clients": state})
            self._saved = state

    def load(self, path: Path) -> None:
        """Load the registered clients, if they were saved."""
        if path.exists():
            saved = read_json(path)
            self.run = saved["run"]
            self.registered = {
                int(client_id): _RegisteredClient(*entry) for client_id, entry in saved["clients"].items()
            }


def _counts(counts: Mapping[str, Any], num_clients: int) -> dict[int, tuple[int, int]]:
    """Parse how many samples clients have and train on, as a site says."""
    found = {}
    for name, pair in counts.items():
        if not name.isdecimal() or not int(name) < num_clients:
            raise MessageRejected(
                f"it says that it is client {name[:20]!r}, but the run has {num_clients} clients, numbered from 0"
            )
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(type(count) is int and 0 <= count < 1 << 48 for count in pair)
            or pair[1] > pair[0]
        ):
            raise MessageRejected(f"it says that client {name} has {str(pair)[:60]} samples")
        found[int(name)] = (pair[0], pair[1])
    return found


def _few(client_ids: list[int]) -> str:
    word = "client" if len(client_ids) == 1 else "clients"
    more = f" and {len(client_ids) - 10} more" if len(client_ids) > 10 else ""
    return f"{word} {', '.join(map(str, client_ids[:10]))}{more}"
