"""Models that the server keeps and cannot open: FedMR's, where sites seal them for each other (relay_server.py).

In place of each the server's own code has the mean that the sites computed. Whoever is to train that model is sent what
lies here under its slot. Until the first exchange there is nothing here, and they train initial models (starting.py).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.errors import FedloomError
from fedloom.flower.parcel import Block
from fedloom.flower.sealed import Session


@dataclass(frozen=True)
class SealedModel:
    """The layers of one model, each in its seal, one after the other."""

    content: bytes
    session: Session
    """The attempt in which they were sealed."""
    shown: str
    """A hash of what the server has in its place."""


class Vault:
    """Sealed models by slot. What a round brings counts once its update has been accepted."""

    def __init__(self) -> None:
        self.key = ""
        """The name of the models key that they are sealed with, in hexadecimal digits; empty where there is none."""
        self._models: dict[int, SealedModel] = {}
        self._brought: dict[int, SealedModel] = {}

    def begin(self, key: str) -> None:
        """A round begins, in which models are sealed with the key of this name."""
        self._brought.clear()
        if self._models and key != self.key:
            raise FedloomError("the models of this run are sealed for a key that its sites no longer have.")
        self.key = key

    def bring(self, slot: int, content: bytes, session: Session, row: Block) -> None:
        """A model comes, for which the server has `row`."""
        self._brought[slot] = SealedModel(content, session, _hash(row))

    def accept(self, slot: int) -> None:
        """The update of this slot has been taken."""
        if slot in self._brought:
            self._models[slot] = self._brought.pop(slot)

    def find(self, slot: int, row: Block) -> SealedModel | None:
        """What is to be sent instead of `row`; None where that is the model itself.

        A slot whose client was lost in the first rounds goes on from another one's model: sites train the initial one
        but once.
        """
        if self._models and slot not in self._models:
            return self._models[min(self._models)]
        found = self._models.get(slot)
        if found is not None and found.shown != _hash(row):
            raise FedloomError(f"the model of slot {slot} was changed, but it is sealed and the server cannot open it.")
        return found

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        models = {
            str(slot): {
                "content": torch.frombuffer(bytearray(model.content), dtype=torch.uint8),
                "session": [model.session.run, model.session.round, model.session.attempt],
                "shown": model.shown,
            }
            for slot, model in self._models.items()
        }
        return {"key": self.key, "models": models}

    def load(self, state: Mapping[str, Any]) -> None:
        self.key = str(state["key"])
        self._models = {
            int(slot): SealedModel(model["content"].numpy().tobytes(), Session(*model["session"]), str(model["shown"]))
            for slot, model in state["models"].items()
        }


def _hash(row: Block) -> str:
    return hashlib.sha256(row.data).hexdigest()
