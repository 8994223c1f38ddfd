"""The secure exchange of layers in a round of the Flower engine.

Sites train, keep the result and reply with a hello. The relay (relay.py) then asks them for the stages of the exchange,
and the recombined models become the replies to the training requests. Before that, neither this process nor its log
has a model or a layer that it can read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

from fedloom.core.layout import Layout
from fedloom.core.tasks import ClientTask, Shapes
from fedloom.errors import FedloomError, InputError
from fedloom.flower.message import MessageArray, MessageRejected, SiteMessage
from fedloom.flower.secure_recombination.crypto import CryptoTerms, LayerKeyPair
from fedloom.flower.secure_recombination.layers import make_layer_exchange
from fedloom.flower.secure_recombination.relay import MissingRelayMessage, Relay, RelayMessage, Replies, Requests
from fedloom.flower.server.engine import EngineNoReply, EngineSiteRequest, FlowerEngine
from fedloom.flower.tensors import decode_tensor_columns, split_tensors_by_layer
from fedloom.methods._support.layer_exchange import LayerExchange
from fedloom.runs.resolve import RunRequest


def make_server_exchange(request: RunRequest, layout: Layout) -> "SecureExchange | None":
    """Return the hook for the engine, or None if clients exchange no layers in this run."""
    exchange = make_layer_exchange(request.method, layout, request.config.rounds - 1)
    if exchange is None:
        return None
    if exchange.before_training:
        raise InputError(
            "fedmr.exchange_before=training is simulated by the other engines only; sites exchange layers before they "
            "upload, with fedmr.exchange_before=upload."
        )
    return SecureExchange(request)


class SecureExchange:
    """Lets the sites exchange layers before the server gets their models; implements `EngineUpdateExchange`."""

    def __init__(self, request: RunRequest) -> None:
        self._config, self._method = request.config, request.method
        self._exchange: LayerExchange | None = None
        self._costs: dict[str, float] = {}

    def check(self, uploads: Shapes) -> None:
        """Refuse uploads beside the models, because they are not exchanged."""
        if uploads:
            names = ", ".join(sorted(uploads))
            raise InputError(f"fedmr.secure hides nothing if clients send {names} beside their models.")

    def plan(self, engine: FlowerEngine, round: int) -> bool:
        """Return whether sites exchange layers in this round; a simulation has nobody to hide them from."""
        self._costs = {}
        self._exchange = make_layer_exchange(self._method, engine.context.layout, round)
        if self._exchange is None:
            return False
        engine.registry.refresh(engine.transport)
        registrations = engine.registry.registrations
        if registrations and all(registration.get("simulated") is True for registration in registrations.values()):
            return False
        self.check(engine.context.client.upload_shapes)
        for client_id, registration in registrations.items():
            if not registration.get("exchanges_as"):
                trouble = (
                    registration.get("exchange_trouble") or "its node's configuration must name its key and a roster"
                )
                raise FedloomError(
                    f"client {client_id} cannot take part in the secure exchange of layers: {str(trouble)[:300]}"
                )
        return True

    def run(
        self, engine: FlowerEngine, round: int, tasks: Sequence[ClientTask], requests: Sequence[EngineSiteRequest]
    ) -> Iterator[SiteMessage | EngineNoReply]:
        """Yield replies to the `train` requests, with recombined models."""
        assert self._exchange is not None, "call plan first"
        opener, columns = LayerKeyPair(), split_tensors_by_layer(self._exchange.layers, engine.codec)
        client_ids = {task.model_index: task.client_id for task in tasks}
        asked = [_asked(opener, task.model_index, request) for task, request in zip(tasks, requests, strict=True)]
        trained = dict(zip(client_ids, engine.ask(round, asked), strict=True))
        for i, message in trained.items():
            if _is_hello(message):
                try:  # not later: after the exchange, others' layers would be lost with this reply
                    engine.check_training_header(client_ids[i], message)
                except MessageRejected as refused:
                    trained[i] = EngineNoReply(f"rejected: {refused}")

        def ask(stage: str, messages: Requests) -> Replies:
            put_to = [_make_request(client_ids[i], stage, i, relay_message) for i, relay_message in messages.items()]
            answers = zip(messages, engine.ask(round, put_to), strict=True)
            return {i: _read_reply(stage, answer) for i, answer in answers}

        width = engine.codec.layout.dtype.itemsize
        sizes = tuple(width * sum(part.stop - part.start for part in parts) for parts in columns)
        terms = CryptoTerms(sizes, self._exchange.send_probability, self._exchange.mixed, opener.public)
        needed = self._config.min_clients
        min_sites = max(2, engine.default_min_clients(len(tasks)) if needed is None else needed)
        relay = Relay(ask, engine.registry.run, round, terms, opener, min_sites)
        outcome = relay.exchange(
            {i: _read_reply("hello", answer) for i, answer in trained.items() if _is_hello(answer)}
        )
        self._costs = {
            "exchange_attempts": float(outcome.attempts),
            "exchanges": float(outcome.exchanges),
            "exchange_bytes_up": float(outcome.bytes_up),
            "exchange_bytes_down": float(outcome.bytes_down),
        }
        for i, request in zip(client_ids, requests, strict=True):
            message = trained[i]
            if isinstance(message, EngineNoReply):
                yield message
            elif message.kind == "mix/idle":
                yield SiteMessage("trained", message.header, {"model": request.arrays["model"]})
            elif i in outcome.models:
                row = engine.codec.layout.empty()
                for parts, layer in zip(columns, outcome.models.pop(i), strict=True):
                    decode_tensor_columns(row, parts, layer)
                yield SiteMessage("trained", message.header, {"model": engine.codec.encode(row)})
            elif i in outcome.failed:
                yield EngineNoReply(outcome.failed[i])
            else:
                yield EngineNoReply(_refusal(message) or f"rejected: it sent {message.kind[:40]!r}, not a hello")

    def diagnostics(self) -> Mapping[str, float]:
        """Return the costs of this round's exchange, beyond the models sent to the sites."""
        return self._costs


def _asked(opener: LayerKeyPair, model_index: int, request: EngineSiteRequest) -> EngineSiteRequest:
    """Turn a `train` request into one to a site that exchanges layers."""
    header = {**request.header, "attempt": 0, "model_index": model_index}
    arrays = {**request.arrays, "opener": MessageArray.raw(opener.public)}
    return replace(request, kind="mix/train", header=header, arrays=arrays)


def _make_request(client_id: int, stage: str, model_index: int, message: RelayMessage) -> EngineSiteRequest:
    arrays = {name: MessageArray.raw(part) for name, part in message.parts.items()}
    return EngineSiteRequest(client_id, f"mix/{stage}", {**message.header, "model_index": model_index}, arrays)


def _is_hello(answer: SiteMessage | EngineNoReply) -> TypeGuard[SiteMessage]:
    return isinstance(answer, SiteMessage) and answer.kind == "mix/hello"


def _refusal(message: SiteMessage) -> str:
    if message.kind != "mix/refused":
        return ""
    return " ".join(str(message.header.get("reason", "")).split())[:300] or "it refused and gave no reason"


def _read_reply(stage: str, answer: SiteMessage | EngineNoReply) -> RelayMessage | MissingRelayMessage:
    if isinstance(answer, EngineNoReply):
        return MissingRelayMessage(answer.reason)
    if refusal := _refusal(answer):
        return MissingRelayMessage(refusal, refused=True)
    if answer.kind != f"mix/{stage}":
        return MissingRelayMessage(f"rejected: it sent {answer.kind[:40]!r}, not 'mix/{stage}'")
    return RelayMessage({}, {name: bytes(array.data) for name, array in answer.arrays.items()})
