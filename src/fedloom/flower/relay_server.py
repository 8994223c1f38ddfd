"""The sealed exchange of layers as part of a round of the Flower engine.

Sites train and keep what they trained; what they answer is a hello. The relay (relay.py) then asks them for the stages
of the exchange, and the models that come of it stand for the answers to the questions. Before that neither this process
nor its log has a model or a layer in a form that it could read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from fedloom.engines import flower
from fedloom.errors import FedloomError, InputError
from fedloom.exchange import LayerExchange
from fedloom.flower.notes import Note, Silence
from fedloom.flower.parcel import Block, Parcel, Refused
from fedloom.flower.relay import Outcome, Relay
from fedloom.flower.sealed import KEY, Opener, Terms, cut
from fedloom.flower.tensors import Travel, put, travelling
from fedloom.flower.vault import Vault

Ask = Callable[[Sequence[flower.Question]], Iterator[Parcel | flower.Silence]]


def can_exchange(greetings: Mapping[int, Mapping[str, Any]], uploads: Mapping[str, Any]) -> bool:
    """Whether sites can exchange layers; False in a simulation, where there is nobody to hide them from."""
    if greetings and all(greeting.get("simulated") is True for greeting in greetings.values()):
        return False
    refuse_telltales(uploads)
    for client, greeting in greetings.items():
        if not greeting.get("exchanges_as"):
            trouble = greeting.get("exchange_trouble") or "its node's configuration must name its key and a roster"
            raise FedloomError(
                f"client {client} cannot take part in the secure exchange of layers: {str(trouble)[:300]}"
            )
    return True


def sealed_for(greetings: Mapping[int, Mapping[str, Any]], plan: LayerExchange) -> str:
    """The fingerprint of the sites' models key, in hexadecimal digits; empty where they have none."""
    keys = {client: str(greeting.get("seals_for") or "") for client, greeting in greetings.items()}
    for client, key in keys.items():
        if key != keys[min(keys)]:
            has = "has no models key" if not key else "has a models key"
            other = "has none" if not keys[min(keys)] else "has another one, or other settings" if key else "has one"
            raise FedloomError(f"client {client} {has}, but client {min(keys)} {other}; all sites must have the same.")
    key = next(iter(keys.values()), "")
    if key and not re.fullmatch(f"[0-9a-f]{{{2 * KEY}}}", key):
        raise FedloomError(f"the sites say that their models key is {key[:40]!r}, which is none.")
    if key and plan.changed_by_server:
        raise FedloomError(
            "the server refines models one by one, which it cannot where sites seal them for each other: start the "
            "sites without a models key."
        )
    return key


def refuse_open_rounds(greetings: Mapping[int, Mapping[str, Any]]) -> None:
    """Sites that have a models key train in no round without an exchange."""
    for client, greeting in greetings.items():
        if greeting.get("open_rounds"):
            raise FedloomError(
                f"client {client} has a models key, and with one it takes part in exchanges of layers alone: that "
                "needs fedmr.secure=true and fedmr.first_stage=0, or sites that are started without a models key."
            )


def refuse_telltales(uploads: Mapping[str, Any]) -> None:
    """What clients send beside their models is not exchanged."""
    if uploads:
        names = ", ".join(sorted(uploads))
        raise InputError(
            f"fedmr.secure hides nothing where clients send {names} beside their models, from which the server can "
            "tell what each of them trained."
        )


class Exchange:
    """Training and exchange in one round. `outcome` says what it came to and cost.

    Layers are sealed for a key of the server or, where sites have a models key, for that. Then what the server gets for
    each model is the mean of all, and the models themselves go to the vault.
    """

    def __init__(
        self,
        ask: Ask,
        run: str,
        round: int,
        plan: LayerExchange,
        travel: Travel,
        vault: Vault,
        check: Callable[[int, Parcel], None],
    ) -> None:
        self._ask, self._run, self._round, self._plan, self._travel = ask, run, round, plan, travel
        self._vault, self._check = vault, check
        self._key = None if vault.key else Opener()
        self._public = bytes.fromhex(vault.key) if self._key is None else self._key.public
        self._layers = travelling(plan, travel)
        self.outcome = Outcome()

    def train(self, slots: Sequence[int], questions: Sequence[flower.Question]) -> Iterator[Parcel | flower.Silence]:
        """Answers to questions of the kind `train`, with models that have been recombined."""
        slots = self._vault.seats([question.client for question in questions], slots)
        asked = [self._asked(slot, question) for slot, question in zip(slots, questions, strict=True)]
        trained = dict(zip(slots, self._ask(asked), strict=True))
        clients = {slot: question.client for slot, question in zip(slots, questions, strict=True)}
        for slot, parcel in trained.items():
            if isinstance(parcel, Parcel) and _is_hello(parcel):
                try:  # now: after the exchange others' layers would be lost with its answer
                    self._check(clients[slot], parcel)
                except Refused as refused:
                    trained[slot] = flower.Silence(f"refused: {refused}")
        self._exchange({slot: parcel for slot, parcel in trained.items() if _is_hello(parcel)}, clients)
        for slot in self.outcome.committed:
            self._vault.note(clients[slot], slot)
        self._lock_away()
        for slot, question in zip(slots, questions, strict=True):
            parcel = trained[slot]
            if isinstance(parcel, flower.Silence):
                yield parcel
            elif parcel.kind == "mix/idle":
                yield Parcel("trained", parcel.header, {"row": question.blocks["row"]})
            elif slot in self.outcome.models:
                yield Parcel("trained", parcel.header, {"row": self._shown(slot)})
            elif slot in self.outcome.lost:
                yield flower.Silence(self.outcome.lost[slot], for_good=slot in self.outcome.for_good)
            else:
                reason = _refusal(parcel) or f"refused: it sent {parcel.kind[:40]!r}, not a hello"
                yield flower.Silence(reason, for_good=_is_for_good(parcel))

    def _asked(self, slot: int, question: flower.Question) -> flower.Question:
        """The question of the kind `train` as it is put to a site that will exchange layers."""
        header, blocks = {**question.header, "attempt": 0, "slot": slot}, dict(question.blocks)
        blocks["opener"] = Block.raw(self._public)
        sealed = self._vault.find(slot, blocks["row"])
        if sealed is not None:
            del blocks["row"]
            blocks["model"] = Block.raw(sealed)
            blocks["inventory"] = Block.raw(self._vault.contents.inventory)
        return replace(question, kind="mix/train", header=header, blocks=blocks)

    def _shown(self, slot: int) -> Block:
        """What the server gets for a recombined model."""
        return self._mean if self._key is None else self._row(self.outcome.models.pop(slot))

    def _lock_away(self) -> None:
        """Keep the models that the server cannot open. Who has none yet goes on from the mean."""
        outcome = self.outcome
        if self._key is not None or not outcome.models:
            return
        models = {slot: b"".join(model) for slot, model in outcome.models.items()}
        if outcome.sealed_mean:
            models = {**dict.fromkeys(range(self._plan.models), b"".join(outcome.sealed_mean)), **models}
        self._vault.bring(models, outcome.inventory, self._mean)

    @cached_property
    def _mean(self) -> Block:
        return self._row(self.outcome.mean)

    def costs(self) -> dict[str, float]:
        """What the exchange took, beyond the models that go down; for the record of the round."""
        outcome = self.outcome
        return {
            "exchange_attempts": float(outcome.attempts),
            "exchanges": float(outcome.exchanges),
            "exchange_bytes_up": float(outcome.bytes_up),
            "exchange_bytes_down": float(outcome.bytes_down),
        }

    def _exchange(self, hellos: Mapping[int, Parcel | flower.Silence], clients: Mapping[int, int]) -> None:
        def ask(stage: str, notes: dict[int, Note]) -> dict[int, Note | Silence]:
            questions = [
                flower.Question(
                    clients[slot],
                    f"mix/{stage}",
                    {**note.header, "slot": slot},
                    {name: Block.raw(part) for name, part in note.parts.items()},
                )
                for slot, note in notes.items()
            ]
            return {
                slot: _note(f"mix/{stage}", answer) for slot, answer in zip(notes, self._ask(questions), strict=True)
            }

        width = self._travel.layout.dtype.itemsize
        sizes = tuple(width * sum(part.stop - part.start for part in columns) for columns in self._layers)
        contents = self._vault.contents
        terms = Terms(sizes, self._plan.send_probability, self._plan.mixed, self._public, contents.inventory)
        kept = {slot: cut(model, terms.sealed_sizes, f"slot {slot}") for slot, model in contents.models.items()}
        fewest = max(2, self._plan.fewest)
        relay = Relay(ask, self._run, self._round, terms, self._key, fewest, self._is_sound, kept)
        self.outcome = relay.exchange({slot: _note("mix/hello", parcel) for slot, parcel in hellos.items()})

    def _is_sound(self, number: int, mean: bytes) -> bool:
        row = torch.zeros_like(self._travel.layout.empty())
        put(row, self._layers[number], mean)
        return self._travel.layout.is_finite(row)

    def _row(self, layers: Sequence[bytes]) -> Block:
        """A recombined model as it would have travelled."""
        row = self._travel.layout.empty()
        for columns, layer in zip(self._layers, layers, strict=True):
            put(row, columns, layer)
        return self._travel.pack(row)


def _is_hello(parcel: Parcel | flower.Silence) -> bool:
    return isinstance(parcel, Parcel) and parcel.kind == "mix/hello"


def _refusal(parcel: Parcel) -> str:
    if parcel.kind != "mix/refused":
        return ""
    return " ".join(str(parcel.header.get("reason", "")).split())[:300] or "it refused and gave no reason"


def _is_for_good(parcel: Parcel) -> bool:
    return parcel.kind == "mix/refused" and parcel.header.get("for_good") is True


def _note(kind: str, answer: Parcel | flower.Silence) -> Note | Silence:
    if isinstance(answer, flower.Silence):
        return Silence(answer.reason, for_good=answer.for_good)
    if refusal := _refusal(answer):
        return Silence(refusal, refused=True, for_good=_is_for_good(answer))
    if answer.kind != kind:
        return Silence(f"refused: it sent {answer.kind[:40]!r}, not {kind!r}")
    return Note({}, {name: bytes(block.data) for name, block in answer.blocks.items()})
