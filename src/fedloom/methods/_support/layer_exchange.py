"""The secure exchange of layers among clients (FedMR, Appendix B).

Layers pass between clients before they upload, so that what the server receives from a client is a model put together
of several clients' layers, and every layer instance is used exactly once. For every layer on its own:

1. each client keeps its layer in its buffer, or sends it to one other client, drawn uniformly;
2. who receives layers adds them to its buffer;
3. for each sender whose layer arrived, the receiver draws one element of its buffer, without replacement, and returns
   it;
4. each client puts its model together from what came back, or from what is left in its buffer.

The protocol is written as messages between participants; here they are delivered in this process, and a network may
carry them instead (flower/sealed_site.py). The paper lets clients exchange several times in a round. Where that is to
go on until no model is what one client trained, it does so `MOST` times at most; then clients begin anew with their own
layers, and after `MOST_ATTEMPTS` such attempts they hand over nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, SupportsInt

from torch import Tensor

MOST = 12
"""Exchanges in one attempt to mix all models."""
MOST_ATTEMPTS = 4
"""Attempts in one round. Between sites each shows the server who was there and nothing else."""


def layer_exchange_stream_name(attempt: int = 0, number: int = 0) -> str:
    """The name of the stream that a client draws from in an attempt's exchange of this number."""
    return f"exchange {attempt} {number}" if attempt or number else "exchange"


def layers_have_single_owner(owners: Iterable[int]) -> bool:
    """Whether layers of these clients are a model that one client trained."""
    return len(set(owners)) == 1


@dataclass(frozen=True)
class LayerExchange:
    """What the clients of a round exchange, and how."""

    layers: list[list[slice]]
    """The columns of each layer."""
    send_probability: float
    mixed: bool
    """Whether to go on until no client is left with a model that one of them trained."""


class LayerExchangeRng(Protocol):
    """Where a participant's choices come from: a numpy generator, or one that nobody can predict."""

    def random(self) -> float:
        """At least 0 and below 1."""

    def integers(self, high: int, /) -> SupportsInt:
        """At least 0 and below `high`."""


class _ClientRngFactory(Protocol):
    """Where the choices of a client come from, by purpose."""

    def __call__(self, purpose: str, *, client: int) -> LayerExchangeRng: ...


@dataclass(frozen=True)
class ExchangedLayer:
    """A layer on its way. `back` tells stage 3 from stage 1."""

    sender: int
    receiver: int
    layer: int
    payload: Tensor
    back: bool


@dataclass
class LayerExchangeClient:
    """One client in the exchange. It knows its own layers and what others sent, and draws from its own generator."""

    me: int
    others: list[int]
    layers: list[Tensor]
    draw: LayerExchangeRng
    send_probability: float = 0.5
    _buffers: list[list[Tensor]] = field(default_factory=list)
    _senders: list[list[int]] = field(default_factory=list)
    _sent: set[int] = field(default_factory=set)
    _returned: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Before anything is offered: on a network the first layers of others may arrive earlier than that.
        self._senders = [[] for _ in self.layers]
        self._buffers = [[] for _ in self.layers]

    def offer(self) -> list[ExchangedLayer]:
        """Stage 1: keep each layer, first in its buffer, or send it to one other client."""
        messages = []
        for number, layer in enumerate(self.layers):
            if self.others and self.draw.random() < self.send_probability:
                receiver = self.others[int(self.draw.integers(len(self.others)))]
                messages.append(ExchangedLayer(self.me, receiver, number, layer, back=False))
                self._sent.add(number)
            else:
                self._buffers[number].insert(0, layer)
        return messages

    def receive(self, message: ExchangedLayer) -> None:
        """Stages 2 and 4: a layer arrives, offered by another client or in return for one's own."""
        if message.back:
            self._returned[message.layer] = message.payload
        else:
            self._buffers[message.layer].append(message.payload)
            self._senders[message.layer].append(message.sender)

    def answer(self) -> list[ExchangedLayer]:
        """Stage 3: return one element of the buffer to each sender. Senders are taken in the order of their numbers,
        so that the draws do not depend on the order in which messages arrived."""
        messages = []
        for number, senders in enumerate(self._senders):
            paired = (
                sorted(zip(senders, self._buffers[number][-len(senders) :], strict=True), key=lambda p: p[0])
                if senders
                else []
            )
            kept = self._buffers[number][: len(self._buffers[number]) - len(senders)]
            buffer = kept + [layer for _, layer in paired]
            for sender, _ in paired:
                chosen = buffer.pop(int(self.draw.integers(len(buffer))))
                messages.append(ExchangedLayer(self.me, sender, number, chosen, back=True))
            self._buffers[number] = buffer
        return messages

    def assemble(self) -> list[Tensor]:
        """Stage 4: exactly one instance of every layer."""
        result = []
        for number in range(len(self.layers)):
            if number in self._sent and number not in self._returned:
                raise RuntimeError(f"client {self.me} sent layer {number} away and has had none in return")
            left = self._buffers[number] + ([self._returned[number]] if number in self._sent else [])
            if len(left) != 1:
                raise RuntimeError(f"client {self.me} ends with {len(left)} instances of layer {number}, not 1")
            result.append(left[0])
        return result


def _deliver_layers(participants: dict[int, LayerExchangeClient], messages: Iterable[ExchangedLayer]) -> int:
    """Carry messages to their receivers, in this process; returns how many there were."""
    count = 0
    for message in messages:
        participants[message.receiver].receive(message)
        count += 1
    return count


def run_layer_exchange(
    participants: dict[int, LayerExchangeClient],
    carry: Callable[[dict[int, LayerExchangeClient], Iterable[ExchangedLayer]], int] = _deliver_layers,
) -> int:
    """All four stages; afterwards each participant can `assemble`. Returns the number of messages."""
    offers = [message for p in participants.values() for message in p.offer()]
    count = carry(participants, offers)
    answers = [message for p in participants.values() for message in p.answer()]
    return count + carry(participants, answers)


def exchange_model_layers(
    models: Mapping[int, list[Tensor]], draws: _ClientRngFactory, send_probability: float, mixed: bool = False
) -> dict[int, list[Tensor]] | None:
    """What clients with these layers end with: one exchange, or as many as it takes to mix all models.

    None where they are not mixed in any attempt. One client alone has nobody to mix its layers with.
    """
    if not mixed or len(models) == 1:
        return _exchanged(models, draws, layer_exchange_stream_name(), send_probability)
    attempts = (
        exchange_layers_until_mixed(models, draws, send_probability, attempt) for attempt in range(MOST_ATTEMPTS)
    )
    return next((found for found in attempts if found is not None), None)


def exchange_layers_until_mixed(
    models: Mapping[int, list[Tensor]], draws: _ClientRngFactory, send_probability: float, attempt: int = 0
) -> dict[int, list[Tensor]] | None:
    """What comes of exchanging until no model is what one client trained; None where `MOST` times are not enough."""
    owners = {id(layer): client for client, layers in models.items() for layer in layers}
    for number in range(MOST):
        models = _exchanged(models, draws, layer_exchange_stream_name(attempt, number), send_probability)
        if not any(layers_have_single_owner(owners[id(layer)] for layer in layers) for layers in models.values()):
            return models
    return None


def _exchanged(
    models: Mapping[int, list[Tensor]], draws: _ClientRngFactory, stream: str, send_probability: float
) -> dict[int, list[Tensor]]:
    """What one exchange comes to."""
    participants = {
        me: LayerExchangeClient(
            me, [other for other in models if other != me], layers, draws(stream, client=me), send_probability
        )
        for me, layers in models.items()
    }
    run_layer_exchange(participants)
    return {me: participant.assemble() for me, participant in participants.items()}
