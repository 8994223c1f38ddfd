"""What a site must not forget of a models key, not even when its process ends (relay_site.py).

The mean of the models is all that the server gets. But two means over the same clients but one could be subtracted from
each other, if the others trained the same. So a models key serves one run, whose rounds go by once each: a client that
has committed itself in a round trains for no exchange of that round or an earlier one, and no model a second time.
"""

from pathlib import Path
from typing import Any

from fedloom.flower.parcel import Refused, RefusedForGood
from fedloom.storage import read_json, write_json

Stamp = tuple[int, int]
"""A round and an attempt of it."""
NEVER = (-1, 0)
INITIAL = "initial"
"""What the words for models begin with that the run begins with."""
OVER = "it has committed itself in round {} or later, and trains for a round but once"
MOST_BEGINNINGS = 5
"""How often a client begins with such a model, each time another, and trains models of one inventory. It takes an
exchange that fails in the wrong moment for there to be a second time; a server that asks for many wants to know
something."""


class Diary:
    """The run that a models key serves, and by client the last round and all models that it was committed to."""

    def __init__(self, folder: Path, key: bytes) -> None:
        self._path = folder / f"models-key-{key.hex()[:32]}.json"
        found: dict[str, Any] = read_json(self._path) if self._path.exists() else {}
        self._run: str = found.get("run", "")
        self._rounds: dict[str, int] = found.get("rounds", {})
        self._starts: dict[str, list[str]] = found.get("starts", {})
        self._stamps: dict[str, list[list[int]]] = found.get("stamps", {})

    def is_over(self, run: str, client: str, round: int) -> bool:
        """Whether this client has committed itself in this round, or in a later one, of the run that the key serves."""
        self.refuse_other_runs(run)
        return round <= self._rounds.get(client, -1)

    def refuse_other_runs(self, run: str) -> None:
        """Refuse all runs but the first, and that with other settings."""
        if self._run not in ("", run):
            raise Refused(
                f"its models key has served another run, or this one with other settings, as {self._path.name} says, "
                "and serves one only; all sites need a new one"
            )

    def refuse(self, run: str, client: str, round: int, start: str, stamp: Stamp = NEVER) -> None:
        """Refuse a round that is over, a model that this client has trained before, and an inventory that is stale.

        `stamp` says when the last model of the inventory was sealed.
        """
        if self.is_over(run, client, round):
            raise RefusedForGood(OVER.format(round + 1))
        if start in self._starts.get(client, ()):
            raise RefusedForGood(
                "it has trained this model before, and trains none twice"
                + ("; with a beginning that cannot be drawn anew the run needs a new models key" * (start == INITIAL))
            )
        if start.startswith(INITIAL):
            begun = self._starts.get(client, [])
            if not all(other.startswith(INITIAL) for other in begun):
                raise Refused("it has trained models of this run that are sealed, and does not begin anew")
            if len(begun) == MOST_BEGINNINGS:
                raise Refused(f"it has begun anew {MOST_BEGINNINGS} times, and no exchange has succeeded")
        if sum(tuple(other) >= stamp for other in self._stamps.get(client, [])) >= MOST_BEGINNINGS:
            raise Refused(f"it has trained models of this inventory, or of newer ones, {MOST_BEGINNINGS} times already")

    def commit(self, run: str, client: str, round: int, start: str, stamp: Stamp = NEVER) -> None:
        """Note that it has committed itself, before anybody is told."""
        self._run = run
        self._rounds[client] = round
        self._starts.setdefault(client, []).append(start)
        self._stamps.setdefault(client, []).append(list(stamp))
        known = {"run": self._run, "rounds": self._rounds, "starts": self._starts, "stamps": self._stamps}
        write_json(self._path, known)
