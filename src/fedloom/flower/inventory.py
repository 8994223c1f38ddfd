"""All models of a run, as its sites know them where the server cannot open them.

The server chooses who trains which of the sealed models, and gets a mean. If it could choose freely what is averaged,
it could have a model averaged with itself, or some without one, and work out what is in it. So after each exchange the
sites vouch for an inventory: which models there are now, by slot. In the next exchange everybody begins with the model
of its own slot of one and the same inventory, and the mean is over all of its slots, with the models of those who are
not there as they were. So what a new mean tells beyond the old one is the sum of what all who took part have learned.
"""

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass

from fedloom.flower.sealed import ModelsKey, Refusal, Session, digest

VOUCHER = 32


@dataclass(frozen=True)
class Entry:
    """One model."""

    session: Session
    """The attempt in which it was sealed."""
    hashes: tuple[str, ...] = ()
    """Of its layers in their seals. None for the mean of that exchange, where there was nobody to train a model."""

    @property
    def is_mean(self) -> bool:
        return not self.hashes

    def open(self, key: ModelsKey, sealed: bytes, number: int) -> bytes:
        """A layer of this model, in the clear."""
        if not self.is_mean and digest(sealed).hex() != self.hashes[number]:
            raise Refusal(f"layer {number} is not that of the model which the inventory has.")
        return key.open(sealed, self.session, number, mean=self.is_mean)


@dataclass(frozen=True)
class Inventory:
    """Models by slot."""

    run: str
    entries: Mapping[int, Entry]
    terms: str = ""
    """The name of the models key, which tells the run's settings: with others these models are of no use."""

    @property
    def newest(self) -> tuple[int, int]:
        """When the last of these models was sealed: round and attempt."""
        return max(((entry.session.round, entry.session.attempt) for entry in self.entries.values()), default=(-1, 0))

    def vouched(self, key: ModelsKey) -> bytes:
        """As bytes that only somebody with the models key can have made."""
        models = {
            slot: [entry.session.round, entry.session.attempt, *entry.hashes] for slot, entry in self.entries.items()
        }
        text = json.dumps({"run": self.run, "terms": self.terms, "models": models}, sort_keys=True).encode()
        return key.vouch(text) + text

    @classmethod
    def read(cls, data: bytes, key: ModelsKey, run: str, terms: str = "") -> "Inventory":
        """What `vouched` wrote, in this run and with these settings."""
        voucher, text = data[:VOUCHER], data[VOUCHER:]
        if not hmac.compare_digest(voucher, key.vouch(text)):
            raise Refusal("no site of this run has vouched for the inventory.")
        found = json.loads(text)
        if found["run"] != run:
            raise Refusal("the inventory is that of another run.")
        if found["terms"] != terms:
            raise Refusal("the inventory is that of a run with other settings.")
        entries = {
            int(slot): Entry(Session(run, round, attempt), tuple(hashes))
            for slot, (round, attempt, *hashes) in found["models"].items()
        }
        return cls(run, entries, terms)
