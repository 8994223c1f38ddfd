"""How the server reaches the sites: `Link`, and the one that goes over Flower's Grid."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fedloom.flower.flwr_patches import Guard, reason_in
from fedloom.flower.parcel import Parcel, Refused

if TYPE_CHECKING:
    from flwr.serverapp import Grid


@dataclass(frozen=True)
class Answer:
    """What came back for a ticket: a parcel, or the reason why there is none."""

    ticket: str
    node: int
    """The node that it came from; 0 where it came from nowhere."""
    parcel: Parcel | None
    error: str = ""


class Link(Protocol):
    """Sends questions to nodes and fetches their answers."""

    def nodes(self) -> list[int]:
        """The nodes that are connected."""
        ...

    def send(self, node: int, question: Parcel, seconds: float) -> str | None:
        """Send a question that is worth answering for so many seconds; returns a ticket, None where it cannot be."""
        ...

    def receive(self, tickets: Sequence[str]) -> list[Answer]:
        """The answers that have come for these tickets; each is given once."""
        ...


class GridLink:
    """The sites behind Flower's SuperLink, or in its simulation."""

    def __init__(self, grid: "Grid", most: int = 1 << 20) -> None:
        self._grid = grid
        self.most = most
        """Bytes of arrays that an answer may have. What sites say of themselves is small; models come later."""
        Guard(lambda: self.most).install(grid)

    def nodes(self) -> list[int]:
        return sorted(self._grid.get_node_ids())

    def send(self, node: int, question: Parcel, seconds: float) -> str | None:
        from flwr.app import Message, MessageType

        from fedloom.flower.records import to_records

        kind = {"train": MessageType.TRAIN, "score": MessageType.EVALUATE}.get(question.kind, MessageType.QUERY)
        group = str(question.header.get("round", ""))
        message = Message(
            content=to_records(question), dst_node_id=node, message_type=kind, ttl=seconds, group_id=group
        )
        tickets = list(self._grid.push_messages([message]))
        return tickets[0] if tickets and tickets[0] else None

    def receive(self, tickets: Sequence[str]) -> list[Answer]:
        from fedloom.flower.records import from_records

        found = []
        for message in self._grid.pull_messages(list(tickets)):
            ticket, node = message.metadata.reply_to_message_id, message.metadata.src_node_id
            if message.has_error():
                said = " ".join(str(message.error.reason).split())
                found.append(Answer(ticket, node, None, reason_in(said) or f"Flower says: {said}"))
                continue
            try:
                found.append(Answer(ticket, node, from_records(message.content)))
            except Refused as error:
                found.append(Answer(ticket, node, None, f"refused: {error}"))
        return found
