"""Transports between server and sites: Flower's Grid, or a local socket.

The socket leads to the process that has the Grid.

`fedloom run --engine flower` uses the socket. Its own process runs the rounds, so progress, Ctrl-C and resuming work as
with every other engine. The ServerApp that Flower starts for it only forwards messages.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedloom.errors import FedloomError
from fedloom.flower.flwr_patches import GridSizeLimitPatch, patched_error_reason
from fedloom.flower.message import MessageRejected, SiteMessage, read_message, write_message

if TYPE_CHECKING:
    from flwr.serverapp import Grid


@dataclass(frozen=True)
class TransportReply:
    """The reply to a request: a message, or the reason why there is none."""

    ticket: str
    node: int
    """The node that sent it, or 0 if no node did."""
    message: SiteMessage | None
    error: str = ""


class Transport(Protocol):
    """Sends requests to nodes and fetches their replies."""

    def nodes(self) -> list[int]:
        """Return the connected nodes."""
        ...

    def send(self, node: int, request: SiteMessage, seconds: float) -> str | None:
        """Send a request that expires after `seconds`; return its ticket, or None if it cannot be sent."""
        ...

    def receive(self, tickets: Sequence[str]) -> list[TransportReply]:
        """Return the replies that have arrived for these tickets, each once."""
        ...


class GridTransport:
    """Transport over Flower's Grid: a SuperLink, or Flower's simulation."""

    def __init__(self, grid: "Grid", max_bytes: int = 1 << 20) -> None:
        self._grid = grid
        self.max_bytes = max_bytes
        """Most bytes of arrays in a reply. Registrations are small; the engine sets the size of models later."""
        GridSizeLimitPatch(lambda: self.max_bytes).install(grid)

    def nodes(self) -> list[int]:
        return sorted(self._grid.get_node_ids())

    def send(self, node: int, request: SiteMessage, seconds: float) -> str | None:
        from flwr.app import Message, MessageType

        from fedloom.flower.records import message_to_flower_records

        kind = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}.get(request.kind, MessageType.QUERY)
        group = str(request.header.get("round", ""))
        message = Message(
            content=message_to_flower_records(request),
            dst_node_id=node,
            message_type=kind,
            ttl=seconds,
            group_id=group,
        )
        tickets = list(self._grid.push_messages([message]))
        return tickets[0] if tickets and tickets[0] else None

    def receive(self, tickets: Sequence[str]) -> list[TransportReply]:
        from fedloom.flower.records import message_from_flower_records

        found = []
        for message in self._grid.pull_messages(list(tickets)):
            ticket, node = message.metadata.reply_to_message_id, message.metadata.src_node_id
            if message.has_error():
                said = " ".join(str(message.error.reason).split())
                found.append(TransportReply(ticket, node, None, patched_error_reason(said) or f"Flower says: {said}"))
                continue
            try:
                found.append(TransportReply(ticket, node, message_from_flower_records(message.content)))
            except MessageRejected as error:
                found.append(TransportReply(ticket, node, None, f"rejected: {error}"))
        return found


def open_transport_socket(path: Path) -> socket.socket:
    """Return a socket that only this user can connect to."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    path.chmod(0o600)
    server.listen(1)
    return server


def forward_transport_requests(transport: Transport, socket_path: Path) -> None:
    """Carry out the other process's calls of the transport until it ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(socket_path))
        while (command := read_message(connection)) is not None:
            about = command.header
            if command.kind == "nodes":
                write_message(connection, SiteMessage("nodes", {"nodes": transport.nodes()}))
            elif command.kind == "send":
                request = SiteMessage(about["kind"], about["header"], command.arrays)
                write_message(
                    connection,
                    SiteMessage("sent", {"ticket": transport.send(about["node"], request, about["seconds"])}),
                )
            else:
                found = transport.receive(about["tickets"])
                write_message(connection, SiteMessage("received", {"count": len(found)}))
                for answer in found:
                    message = answer.message or SiteMessage("")
                    header = {"ticket": answer.ticket, "node": answer.node, "error": answer.error}
                    inside = {"kind": message.kind, "header": dict(message.header)} if answer.message else {}
                    write_message(connection, SiteMessage("answer", {**header, **inside}, message.arrays))


class SocketTransport:
    """Transport over a socket: `forward_transport_requests` is on the other side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def nodes(self) -> list[int]:
        return list(self._ask(SiteMessage("nodes")).header["nodes"])

    def send(self, node: int, request: SiteMessage, seconds: float) -> str | None:
        about = {"node": node, "seconds": seconds, "kind": request.kind, "header": dict(request.header)}
        ticket: str | None = self._ask(SiteMessage("send", about, request.arrays)).header["ticket"]
        return ticket

    def receive(self, tickets: Sequence[str]) -> list[TransportReply]:
        found = []
        for _ in range(self._ask(SiteMessage("receive", {"tickets": list(tickets)})).header["count"]):
            reply = self._ask()
            about = reply.header
            message = SiteMessage(about["kind"], about["header"], reply.arrays) if "kind" in about else None
            found.append(TransportReply(about["ticket"], about["node"], message, about["error"]))
        return found

    def _ask(self, request: SiteMessage | None = None) -> SiteMessage:
        """Send the request, if there is one, and return the next message of the other side."""
        gone = "Flower's ServerApp has ended; its log says why."
        try:
            if request is not None:
                write_message(self._connection, request)
            message = read_message(self._connection)
        except OSError as error:
            raise FedloomError(gone) from error
        if message is None:
            raise FedloomError(gone)
        return message
