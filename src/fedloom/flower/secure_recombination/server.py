"""The sealed exchange of layers as part of a round of the Flower engine.

Sites train and keep what they trained; what they answer is a hello. The relay (relay.py) then asks them for the stages
of the exchange, and the models that come of it stand for the answers to the questions. Before that neither this process
nor its log has a model or a layer in a form that it could read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

from fedloom.config import Config
from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, Shapes
from fedloom.errors import FedloomError, InputError
from fedloom.flower.message import MessageArray, MessageRejected, SiteMessage
from fedloom.flower.secure_recombination.crypto import EncryptionTerms, LayerKeyPair
from fedloom.flower.secure_recombination.layers import exchange_of
from fedloom.flower.secure_recombination.messages import MissingRelayMessage, RelayMessage
from fedloom.flower.secure_recombination.relay import Relay
from fedloom.flower.server.engine import FlowerEngine, SiteRequest
from fedloom.flower.server.engine import NoSiteReply as NoAnswer
from fedloom.flower.tensors import decode_tensor_columns, tensor_columns_by_layer
from fedloom.methods._support.layer_exchange import LayerExchange


def exchange_for(config: Config, layout: Layout) -> "SecureExchange | None":
    """The hook for the engine, where clients exchange layers in any round of this run."""
    return None if exchange_of(config, layout, config.rounds - 1) is None else SecureExchange(config)


class SecureExchange:
    """Has the sites exchange layers before the server gets their models (`engines.flower.UpdateExchange`)."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._exchange: LayerExchange | None = None
        self._costs: dict[str, float] = {}

    def check(self, uploads: Shapes) -> None:
        """Refuse what clients send beside their models, because it is not exchanged."""
        if uploads:
            names = ", ".join(sorted(uploads))
            raise InputError(
                f"fedmr.secure hides nothing where clients send {names} beside their models, from which the server can "
                "tell what each of them trained."
            )

    def plan(self, engine: FlowerEngine, round: int) -> bool:
        """Whether sites exchange layers in this round. In a simulation there is nobody to hide them from."""
        self._costs = {}
        self._exchange = exchange_of(self._config, engine.shop.workshop.layout, round)
        if self._exchange is None:
            return False
        engine.roster.refresh(engine.link)
        greetings = engine.roster.greetings
        if greetings and all(greeting.get("simulated") is True for greeting in greetings.values()):
            return False
        self.check(engine.shop.workshop.uploads)
        for client, greeting in greetings.items():
            if not greeting.get("exchanges_as"):
                trouble = greeting.get("exchange_trouble") or "its node's configuration must name its key and a roster"
                raise FedloomError(
                    f"client {client} cannot take part in the secure exchange of layers: {str(trouble)[:300]}"
                )
        return True

    def run(
        self, engine: FlowerEngine, round: int, jobs: Sequence[ClientTask], questions: Sequence[SiteRequest]
    ) -> Iterator[SiteMessage | NoAnswer]:
        """Answers to questions of the kind `train`, with models that have been recombined."""
        assert self._exchange is not None, "it is planned first"
        opener, columns = LayerKeyPair(), tensor_columns_by_layer(self._exchange.layers, engine.travel)
        clients = {job.slot: job.client for job in jobs}
        asked = [_asked(opener, job.slot, question) for job, question in zip(jobs, questions, strict=True)]
        trained = dict(zip(clients, engine.ask(round, asked), strict=True))
        for slot, parcel in trained.items():
            if _is_hello(parcel):
                try:  # now: after the exchange others' layers would be lost with its answer
                    engine.check_words(clients[slot], parcel)
                except MessageRejected as refused:
                    trained[slot] = NoAnswer(f"refused: {refused}")

        def ask(stage: str, notes: dict[int, RelayMessage]) -> dict[int, RelayMessage | MissingRelayMessage]:
            put_to = [_question(clients[slot], stage, slot, note) for slot, note in notes.items()]
            answers = zip(notes, engine.ask(round, put_to), strict=True)
            return {slot: _note(stage, answer) for slot, answer in answers}

        width = engine.travel.layout.dtype.itemsize
        sizes = tuple(width * sum(part.stop - part.start for part in parts) for parts in columns)
        terms = EncryptionTerms(sizes, self._exchange.send_probability, self._exchange.mixed, opener.public)
        needed = self._config.min_clients
        fewest = max(2, engine.fewest_answers(len(jobs)) if needed is None else needed)
        relay = Relay(ask, engine.roster.run, round, terms, opener, fewest)
        outcome = relay.exchange(
            {slot: _note("hello", answer) for slot, answer in trained.items() if _is_hello(answer)}
        )
        self._costs = {
            "exchange_attempts": float(outcome.attempts),
            "exchanges": float(outcome.exchanges),
            "exchange_bytes_up": float(outcome.bytes_up),
            "exchange_bytes_down": float(outcome.bytes_down),
        }
        for slot, question in zip(clients, questions, strict=True):
            parcel = trained[slot]
            if isinstance(parcel, NoAnswer):
                yield parcel
            elif parcel.kind == "mix/idle":
                yield SiteMessage("trained", parcel.header, {"row": question.blocks["row"]})
            elif slot in outcome.models:
                row = engine.travel.layout.empty()
                for parts, layer in zip(columns, outcome.models.pop(slot), strict=True):
                    decode_tensor_columns(row, parts, layer)
                yield SiteMessage("trained", parcel.header, {"row": engine.travel.pack(row)})
            elif slot in outcome.lost:
                yield NoAnswer(outcome.lost[slot])
            else:
                yield NoAnswer(_refusal(parcel) or f"refused: it sent {parcel.kind[:40]!r}, not a hello")

    def diagnostics(self) -> Mapping[str, float]:
        """What the exchange of this round took, beyond the models that go down."""
        return self._costs


def _asked(opener: LayerKeyPair, slot: int, question: SiteRequest) -> SiteRequest:
    """The question of the kind `train` as it is put to a site that will exchange layers."""
    header = {**question.header, "attempt": 0, "slot": slot}
    blocks = {**question.blocks, "opener": MessageArray.raw(opener.public)}
    return replace(question, kind="mix/train", header=header, blocks=blocks)


def _question(client: int, stage: str, slot: int, note: RelayMessage) -> SiteRequest:
    blocks = {name: MessageArray.raw(part) for name, part in note.parts.items()}
    return SiteRequest(client, f"mix/{stage}", {**note.header, "slot": slot}, blocks)


def _is_hello(answer: SiteMessage | NoAnswer) -> TypeGuard[SiteMessage]:
    return isinstance(answer, SiteMessage) and answer.kind == "mix/hello"


def _refusal(parcel: SiteMessage) -> str:
    if parcel.kind != "mix/refused":
        return ""
    return " ".join(str(parcel.header.get("reason", "")).split())[:300] or "it refused and gave no reason"


def _note(stage: str, answer: SiteMessage | NoAnswer) -> RelayMessage | MissingRelayMessage:
    if isinstance(answer, NoAnswer):
        return MissingRelayMessage(answer.reason)
    if refusal := _refusal(answer):
        return MissingRelayMessage(refusal, refused=True)
    if answer.kind != f"mix/{stage}":
        return MissingRelayMessage(f"refused: it sent {answer.kind[:40]!r}, not 'mix/{stage}'")
    return RelayMessage({}, {name: bytes(block.data) for name, block in answer.blocks.items()})
