"""The mean of models that the server cannot open, as a site computes it (sealed_site.py)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedloom.flower.inventory import Entry, Inventory
from fedloom.flower.sealed import ModelsKey, Refusal, Session, Terms, digest


@dataclass(frozen=True)
class Averages:
    """What a site says when all have committed themselves."""

    means: dict[int, bytes]
    """The means of some layers over all models, by number."""
    sealed: dict[int, bytes]
    """The same for those to train from who have no model yet; empty where nobody needs one."""
    inventory: bytes
    """The models that there are now."""


@dataclass(frozen=True)
class Hidden:
    """What a site needs where layers are sealed for the sites."""

    key: ModelsKey
    average: Callable[[int, Sequence[bytes]], bytes]
    """(which layer, that layer of every model) -> their mean."""
    terms: Terms
    slots: int
    """How many models the run has."""
    inventory: Inventory | None = None
    """Which ones they are; none where all begin with an initial one."""

    @property
    def slots_there(self) -> set[int]:
        """Slots that somebody may take part in."""
        return set(self.inventory.entries) if self.inventory is not None else set(range(self.slots))

    def averages(
        self,
        session: Session,
        contents: Mapping[int, Sequence[bytes]],
        who: Mapping[int, str],
        layers: Mapping[int, Mapping[int, bytes]],
    ) -> Averages:
        """The means of some layers, and what there is now.

        `contents` has the hashes of the layers that were handed over, by slot, and `who` did so; `layers` are sealed,
        by number and slot.
        """
        known = self._inventory(session, contents)
        models = {slot: entry for slot, entry in known.entries.items() if entry != Entry(session)}
        for number, sealed in layers.items():
            if number >= self.terms.layers or sealed.keys() != models.keys():
                raise Refusal(f"a mean of layer {number} would not be that of all models.")
            for slot, layer in sealed.items():
                if not models[slot].is_mean and digest(layer).hex() != models[slot].hashes[number]:
                    due = f"{who[slot]} handed over" if slot in who else "the inventory has"
                    raise Refusal(f"layer {number} of slot {slot} is not what {due}.")
        means = {
            number: self.average(number, [models[slot].open(self.key, sealed[slot], number) for slot in sorted(sealed)])
            for number, sealed in layers.items()
        }
        without = len(models) < len(known.entries)
        fresh = {number: self.key.seal(mean, session, number, mean=True) for number, mean in means.items() if without}
        return Averages(means, fresh, known.vouched(self.key))

    def _inventory(self, session: Session, contents: Mapping[int, Sequence[bytes]]) -> Inventory:
        """The models that there are after this exchange: what was handed over, and what was there before.

        Who was not there when all began goes on from the mean of what the others trained.
        """
        before = self.inventory
        old = before.entries if before is not None else dict.fromkeys(range(self.slots), Entry(session))
        new = {slot: Entry(session, tuple(one.hex() for one in hashes)) for slot, hashes in contents.items()}
        return Inventory(session.run, {**old, **new}, self.terms.opener.hex())
