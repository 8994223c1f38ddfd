"""The sealed exchange of layers as part of a round of the Flower engine.

Sites train and keep what they trained; what they answer is a hello. The relay (relay.py) then asks them for the stages
of the exchange, and the models that come of it stand for the answers to the questions. Before that neither this process
nor its log has a model or a layer in a form that it could read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedloom.engines import flower
from fedloom.errors import FedloomError, InputError
from fedloom.exchange import LayerExchange
from fedloom.flower.notes import Note, Silence
from fedloom.flower.parcel import Block, Parcel, Refused
from fedloom.flower.relay import Outcome, Relay
from fedloom.flower.sealed import Opener, Terms
from fedloom.flower.tensors import Travel, put, travelling

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


def refuse_telltales(uploads: Mapping[str, Any]) -> None:
    """What clients send beside their models is not exchanged."""
    if uploads:
        names = ", ".join(sorted(uploads))
        raise InputError(
            f"fedmr.secure hides nothing where clients send {names} beside their models, from which the server can "
            "tell what each of them trained."
        )


class Exchange:
    """Training and exchange in one round. `outcome` says what it came to and cost."""

    def __init__(
        self,
        ask: Ask,
        run: str,
        round: int,
        plan: LayerExchange,
        travel: Travel,
        check: Callable[[int, Parcel], None],
    ) -> None:
        self._ask, self._run, self._round, self._plan, self._travel = ask, run, round, plan, travel
        self._check, self._key = check, Opener()
        self._layers = travelling(plan, travel)
        self.outcome = Outcome()

    def train(self, slots: Sequence[int], questions: Sequence[flower.Question]) -> Iterator[Parcel | flower.Silence]:
        """Answers to questions of the kind `train`, with models that have been recombined."""
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
        for slot, question in zip(slots, questions, strict=True):
            parcel = trained[slot]
            if isinstance(parcel, flower.Silence):
                yield parcel
            elif parcel.kind == "mix/idle":
                yield Parcel("trained", parcel.header, {"row": question.blocks["row"]})
            elif slot in self.outcome.models:
                yield Parcel("trained", parcel.header, {"row": self._row(self.outcome.models.pop(slot))})
            elif slot in self.outcome.lost:
                yield flower.Silence(self.outcome.lost[slot])
            else:
                yield flower.Silence(_refusal(parcel) or f"refused: it sent {parcel.kind[:40]!r}, not a hello")

    def _asked(self, slot: int, question: flower.Question) -> flower.Question:
        """The question of the kind `train` as it is put to a site that will exchange layers."""
        header = {**question.header, "attempt": 0, "slot": slot}
        blocks = {**question.blocks, "opener": Block.raw(self._key.public)}
        return replace(question, kind="mix/train", header=header, blocks=blocks)

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
        terms = Terms(sizes, self._plan.send_probability, self._plan.mixed, self._key.public)
        relay = Relay(ask, self._run, self._round, terms, self._key, max(2, self._plan.fewest))
        self.outcome = relay.exchange({slot: _note("mix/hello", parcel) for slot, parcel in hellos.items()})

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


def _note(kind: str, answer: Parcel | flower.Silence) -> Note | Silence:
    if isinstance(answer, flower.Silence):
        return Silence(answer.reason)
    if refusal := _refusal(answer):
        return Silence(refusal, refused=True)
    if answer.kind != kind:
        return Silence(f"refused: it sent {answer.kind[:40]!r}, not {kind!r}")
    return Note({}, {name: bytes(block.data) for name, block in answer.blocks.items()})
