"""Models that the server keeps and cannot open: FedMR's, where sites seal them for each other (relay_server.py).

In place of each the server's own code has the mean that the sites computed. Whoever is to train that model is sent what
lies here under its slot, and the sites' inventory of all of them. Until the first exchange there is nothing here, and
they train initial models (starting.py).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from fedloom.errors import FedloomError
from fedloom.flower.parcel import Block


@dataclass(frozen=True)
class Contents:
    """Sealed models by slot, the layers of each in their seals one after the other."""

    models: Mapping[int, bytes] = field(default_factory=dict)
    inventory: bytes = b""
    """What the sites say which these are."""
    shown: str = ""
    """A hash of what the server has in place of each."""


class Vault:
    """What a round brings counts once one of its updates has been accepted: all of it, or nothing."""

    def __init__(self) -> None:
        self.key = ""
        """The name of the models key that they are sealed with, in hexadecimal digits; empty where there is none."""
        self.contents = Contents()
        self._brought: Contents | None = None
        self._trained: dict[int, set[str]] = {}
        """By client: hashes of the models that it was given in exchanges which came far enough."""

    def begin(self, key: str) -> None:
        """A round begins, in which models are sealed with the key of this name."""
        self._brought = None
        if self.contents.models and key != self.key:
            raise FedloomError("the models of this run are sealed for a key that its sites no longer have.")
        self.key = key
        there = {_hash(model) for model in self.contents.models.values()}
        self._trained = {client: models & there for client, models in self._trained.items()}

    def bring(self, models: Mapping[int, bytes], inventory: bytes, row: Block) -> None:
        """New models come, and an inventory of all; in place of each the server has `row` from now on."""
        self._brought = Contents({**self.contents.models, **models}, inventory, _hash(row))

    def accept(self) -> None:
        """An update of this round has been taken."""
        if self._brought is not None:
            self.contents, self._brought = self._brought, None

    def find(self, slot: int, row: Block) -> bytes | None:
        """What is to be sent instead of `row`; None where that is the model itself."""
        found = self.contents.models.get(slot)
        if found is not None and self.contents.shown != _hash(row):
            raise FedloomError(f"the model of slot {slot} was changed, but it is sealed and the server cannot open it.")
        return found

    def note(self, client: int, slot: int) -> None:
        """This client will not train the model of this slot again: it has committed itself to what it made of it."""
        if slot in self.contents.models:
            self._trained.setdefault(client, set()).add(_hash(self.contents.models[slot]))

    def seats(self, clients: Sequence[int], slots: Sequence[int]) -> list[int]:
        """Which slot each client is to have: its own unless it has trained that model before, and then another's.

        After an exchange that failed late everybody has, and nobody trains a model twice.
        """
        has = {slot: _hash(model) for slot, model in self.contents.models.items()}
        again = np.array([[has.get(slot) in self._trained.get(client, ()) for slot in slots] for client in clients])
        if not len(clients) or not again.diagonal().any():
            return list(slots)
        _, chosen = linear_sum_assignment(again * len(slots) * 2.0 + (1 - np.eye(len(slots))))
        return [slots[place] for place in chosen]

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        contents = self.contents
        models = {str(slot): _tensor(content) for slot, content in contents.models.items()}
        return {
            "key": self.key,
            "models": models,
            "shown": contents.shown,
            "inventory": _tensor(contents.inventory) if contents.inventory else None,
            "trained": {str(client): sorted(models) for client, models in self._trained.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.key = str(state["key"])
        models = {int(slot): content.numpy().tobytes() for slot, content in state["models"].items()}
        self._trained = {int(client): set(hashes) for client, hashes in state["trained"].items()}
        inventory = state["inventory"]
        self.contents = Contents(
            models, inventory.numpy().tobytes() if inventory is not None else b"", str(state["shown"])
        )


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _hash(content: Block | bytes) -> str:
    return hashlib.sha256(content if isinstance(content, bytes) else content.data).hexdigest()
