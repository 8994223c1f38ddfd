"""What passes between the relay of the sealed exchange (relay.py) and the sites: notes, or silence."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RelayMessage:
    """A question to a site or its answer: whole numbers, words, and parts that are bytes."""

    header: Mapping[str, int | str] = field(default_factory=dict)
    parts: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts.values())

    def by_slot(self, kind: str) -> dict[int, bytes]:
        """The parts `kind/SLOT`."""
        found = {}
        for name, part in self.parts.items():
            before, _, slot = name.partition("/")
            if before == kind and slot.isascii() and slot.isdigit():
                found[int(slot)] = part
        return found


def relay_message_parts(kind: str, messages: Mapping[int, bytes]) -> dict[str, bytes]:
    """What `Note.by_slot` reads."""
    return {f"{kind}/{slot}": message for slot, message in messages.items()}


@dataclass(frozen=True)
class MissingRelayMessage:
    """A site did not answer, or (`refused`) did and will not go on."""

    reason: str
    refused: bool = False
