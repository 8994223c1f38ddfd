"""A link over a local socket: the ServerApp holds Flower's Grid, and another process on this machine plays the rounds.

`fedloom run --engine flower` does so. Its own process shows progress, answers Ctrl-C and resumes as with every other
engine; the ServerApp that Flower starts for it carries parcels and knows nothing of them.
"""

import socket
from collections.abc import Sequence
from pathlib import Path

from fedloom.errors import FedloomError
from fedloom.flower.link import Answer, Link
from fedloom.flower.parcel import Parcel, receive, send


def listen(path: Path) -> socket.socket:
    """A socket that only this user can connect to."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    path.chmod(0o600)
    server.listen(1)
    return server


def carry(link: Link, path: Path) -> None:
    """Do what the other process asks of the link, until it ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        while (wish := receive(connection)) is not None:
            about = wish.header
            if wish.kind == "nodes":
                send(connection, Parcel("nodes", {"nodes": link.nodes()}))
            elif wish.kind == "send":
                question = Parcel(about["kind"], about["header"], wish.blocks)
                send(connection, Parcel("sent", {"ticket": link.send(about["node"], question, about["seconds"])}))
            else:
                found = link.receive(about["tickets"])
                send(connection, Parcel("received", {"count": len(found)}))
                for answer in found:
                    parcel = answer.parcel or Parcel("")
                    header = {"ticket": answer.ticket, "node": answer.node, "error": answer.error}
                    inside = {"kind": parcel.kind, "header": dict(parcel.header)} if answer.parcel else {}
                    send(connection, Parcel("answer", {**header, **inside}, parcel.blocks))


class BridgeLink:
    """The link on the other side of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def nodes(self) -> list[int]:
        return list(self._ask(Parcel("nodes")).header["nodes"])

    def send(self, node: int, question: Parcel, seconds: float) -> str | None:
        about = {"node": node, "seconds": seconds, "kind": question.kind, "header": dict(question.header)}
        ticket: str | None = self._ask(Parcel("send", about, question.blocks)).header["ticket"]
        return ticket

    def receive(self, tickets: Sequence[str]) -> list[Answer]:
        found = []
        for _ in range(self._ask(Parcel("receive", {"tickets": list(tickets)})).header["count"]):
            came = self._hear()
            about = came.header
            parcel = Parcel(about["kind"], about["header"], came.blocks) if "kind" in about else None
            found.append(Answer(about["ticket"], about["node"], parcel, about["error"]))
        return found

    def _ask(self, wish: Parcel) -> Parcel:
        try:
            send(self._connection, wish)
        except OSError as error:
            raise _gone() from error
        return self._hear()

    def _hear(self) -> Parcel:
        try:
            heard = receive(self._connection)
        except OSError as error:
            raise _gone() from error
        if heard is None:
            raise _gone()
        return heard


def _gone() -> FedloomError:
    return FedloomError("Flower's ServerApp has ended; its log says why.")
