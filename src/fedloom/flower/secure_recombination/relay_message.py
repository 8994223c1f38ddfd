"""Messages between the relay of the secure exchange (relay.py) and the sites."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RelayMessage:
    """A request to a site or its reply: a header of integers and strings, and parts of bytes."""

    header: Mapping[str, int | str] = field(default_factory=dict)
    parts: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts.values())

    def by_model_index(self, kind: str) -> dict[int, bytes]:
        """Return the parts named `kind/MODEL_INDEX`."""
        found = {}
        for name, part in self.parts.items():
            before, _, model_index = name.partition("/")
            if before == kind and model_index.isascii() and model_index.isdigit():
                found[int(model_index)] = part
        return found


def relay_message_parts(kind: str, parts_by_model_index: Mapping[int, bytes]) -> dict[str, bytes]:
    """Return parts that `RelayMessage.by_model_index` reads."""
    return {f"{kind}/{model_index}": part for model_index, part in parts_by_model_index.items()}


@dataclass(frozen=True)
class MissingRelayMessage:
    """The site did not reply, or (`refused`) it replied and does not continue."""

    reason: str
    refused: bool = False
