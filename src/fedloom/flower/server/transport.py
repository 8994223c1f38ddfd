"""A link over a local socket: the ServerApp holds Flower's Grid, and another process on this machine plays the rounds.

`fedloom run --engine flower` does so. Its own process shows progress, answers Ctrl-C and resumes as with every other
engine; the ServerApp that Flower starts for it carries parcels and knows nothing of them.

How the server reaches the sites: `Link`, and the one that goes over Flower's Grid.
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
    """What came back for a ticket: a parcel, or the reason why there is none."""

    ticket: str
    node: int
    """The node that it came from; 0 where it came from nowhere."""
    parcel: SiteMessage | None
    error: str = ""


class Transport(Protocol):
    """Sends questions to nodes and fetches their answers."""

    def nodes(self) -> list[int]:
        """The nodes that are connected."""
        ...

    def send(self, node: int, question: SiteMessage, seconds: float) -> str | None:
        """Send a question that is worth answering for so many seconds; returns a ticket, None where it cannot be."""
        ...

    def receive(self, tickets: Sequence[str]) -> list[TransportReply]:
        """The answers that have come for these tickets; each is given once."""
        ...


class GridTransport:
    """The sites behind Flower's SuperLink, or in its simulation."""

    def __init__(self, grid: "Grid", most: int = 1 << 20) -> None:
        self._grid = grid
        self.most = most
        """Bytes of arrays that an answer may have. What sites say of themselves is small; models come later."""
        GridSizeLimitPatch(lambda: self.most).install(grid)

    def nodes(self) -> list[int]:
        return sorted(self._grid.get_node_ids())

    def send(self, node: int, question: SiteMessage, seconds: float) -> str | None:
        from flwr.app import Message, MessageType

        from fedloom.flower.records import message_to_flower_records

        kind = {"train": MessageType.TRAIN, "score": MessageType.EVALUATE}.get(question.kind, MessageType.QUERY)
        group = str(question.header.get("round", ""))
        message = Message(
            content=message_to_flower_records(question),
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
                found.append(TransportReply(ticket, node, None, f"refused: {error}"))
        return found


def open_transport_socket(path: Path) -> socket.socket:
    """A socket that only this user can connect to."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    path.chmod(0o600)
    server.listen(1)
    return server


def forward_transport_requests(link: Transport, path: Path) -> None:
    """Do what the other process asks of the link, until it ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        while (wish := read_message(connection)) is not None:
            about = wish.header
            if wish.kind == "nodes":
                write_message(connection, SiteMessage("nodes", {"nodes": link.nodes()}))
            elif wish.kind == "send":
                question = SiteMessage(about["kind"], about["header"], wish.blocks)
                write_message(
                    connection, SiteMessage("sent", {"ticket": link.send(about["node"], question, about["seconds"])})
                )
            else:
                found = link.receive(about["tickets"])
                write_message(connection, SiteMessage("received", {"count": len(found)}))
                for answer in found:
                    parcel = answer.parcel or SiteMessage("")
                    header = {"ticket": answer.ticket, "node": answer.node, "error": answer.error}
                    inside = {"kind": parcel.kind, "header": dict(parcel.header)} if answer.parcel else {}
                    write_message(connection, SiteMessage("answer", {**header, **inside}, parcel.blocks))


class SocketTransport:
    """The link on the other side of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def nodes(self) -> list[int]:
        return list(self._ask(SiteMessage("nodes")).header["nodes"])

    def send(self, node: int, question: SiteMessage, seconds: float) -> str | None:
        about = {"node": node, "seconds": seconds, "kind": question.kind, "header": dict(question.header)}
        ticket: str | None = self._ask(SiteMessage("send", about, question.blocks)).header["ticket"]
        return ticket

    def receive(self, tickets: Sequence[str]) -> list[TransportReply]:
        found = []
        for _ in range(self._ask(SiteMessage("receive", {"tickets": list(tickets)})).header["count"]):
            came = self._hear()
            about = came.header
            parcel = SiteMessage(about["kind"], about["header"], came.blocks) if "kind" in about else None
            found.append(TransportReply(about["ticket"], about["node"], parcel, about["error"]))
        return found

    def _ask(self, wish: SiteMessage) -> SiteMessage:
        try:
            write_message(self._connection, wish)
        except OSError as error:
            raise _gone() from error
        return self._hear()

    def _hear(self) -> SiteMessage:
        try:
            heard = read_message(self._connection)
        except OSError as error:
            raise _gone() from error
        if heard is None:
            raise _gone()
        return heard


def _gone() -> FedloomError:
    return FedloomError("Flower's ServerApp has ended; its log says why.")
