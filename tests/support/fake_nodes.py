"""Flower nodes that register with what a test says."""

from collections.abc import Sequence
from typing import Any

from fedloom.flower.message import SiteMessage
from fedloom.flower.server.transport import TransportReply


class Town:
    """Nodes that say of themselves what a test lets them say: {node: header of its answer to hello}."""

    def __init__(self, **says: Any) -> None:
        self.says = {int(node.removeprefix("n")): header for node, header in says.items()}
        self.silent: set[int] = set()
        self.asked: list[tuple[int, SiteMessage]] = []

    def nodes(self) -> list[int]:
        return sorted(self.says)

    def send(self, node: int, question: SiteMessage, seconds: float) -> str | None:
        self.asked.append((node, question))
        return f"{node}/{len(self.asked)}"

    def receive(self, tickets: Sequence[str]) -> list[TransportReply]:
        found = []
        for ticket in tickets:
            node, number = (int(word) for word in ticket.split("/"))
            question = self.asked[number - 1][1]
            if node in self.silent or node not in self.says:
                continue
            header = self.says[node]
            if "assigned" in question.header and header.get("clients") == {}:
                header = {**header, "clients": {str(question.header["assigned"]): [10, 10]}}
            kind = "failed" if "reason" in header else "hello"
            found.append(TransportReply(ticket, node, question.reply(kind, header)))
        return found


def site(name: str, *clients: int, samples: int = 10) -> dict[str, Any]:
    return {"site": name, "clients": {str(client): [samples, samples] for client in clients}}
