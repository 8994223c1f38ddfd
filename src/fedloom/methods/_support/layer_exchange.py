"""The exchange of layers among clients before they upload (FedMR, Appendix B).

The server then receives models made of several clients' layers, and every layer instance is used exactly once. For each
layer separately:

1. each client keeps its layer in its buffer, or sends it to one other client, drawn uniformly;
2. a receiver adds the layers to its buffer;
3. for each layer it received, it draws one element of its buffer, without replacement, and returns it to the sender;
4. each client assembles its model from the returned layers, or from those left in its buffer.

The protocol consists of messages between participants. Here they are delivered within the process;
flower/secure_recombination carries them over a network. The paper lets clients exchange several times in a round. To
mix until no model is one that a single client trained, an attempt makes at most `MOST` exchanges. Then clients start
again with their own layers. After `MOST_ATTEMPTS` attempts they hand over nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, SupportsInt

from torch import Tensor

MOST = 12
"""Exchanges in one attempt to mix all models."""
MOST_ATTEMPTS = 4
"""Attempts in one round. Between sites, each shows the server only who took part."""


def layer_exchange_stream_name(attempt: int = 0, exchange_number: int = 0) -> str:
    """Return the name of the random stream that a client draws from in this exchange."""
    return f"exchange {attempt} {exchange_number}" if attempt or exchange_number else "exchange"


def layers_have_single_owner(layer_owners: Iterable[int]) -> bool:
    """Return whether layers of these owners form a model that a single client trained."""
    return len(set(layer_owners)) == 1


@dataclass(frozen=True)
class LayerExchange:
    """Settings of the exchange in a round."""

    layers: list[list[slice]]
    """The columns of each layer."""
    send_probability: float
    mixed: bool
    """Whether to repeat the exchange until no model is one that a single client trained."""
    before_training: bool = False
    """Whether clients exchange the models they received, not those they upload."""


class LayerExchangeRng(Protocol):
    """Random numbers of a participant: a numpy generator, or a cryptographic source."""

    def random(self) -> float:
        """Draw from [0, 1)."""

    def integers(self, high: int, /) -> SupportsInt:
        """Draw an integer from 0 to `high` - 1."""


class _ClientRngFactory(Protocol):
    """Makes the random numbers of a client for a purpose."""

    def __call__(self, purpose: str, *, client_id: int) -> LayerExchangeRng: ...


@dataclass(frozen=True)
class LayerExchangeMessage:
    """A message with a layer. `is_return` tells stage 3 from stage 1."""

    sender: int
    receiver: int
    layer_index: int
    payload: Tensor
    is_return: bool


@dataclass
class LayerExchangeClient:
    """One client in the exchange. It knows only its own layers and those it received, and has its own generator."""

    client_id: int
    other_client_ids: list[int]
    layers: list[Tensor]
    rng: LayerExchangeRng
    send_probability: float = 0.5
    _buffers: list[list[Tensor]] = field(default_factory=list)
    _senders: list[list[int]] = field(default_factory=list)
    _sent: set[int] = field(default_factory=set)
    _returned: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Before `offer`: over a network the first layers of others may arrive earlier.
        self._senders = [[] for _ in self.layers]
        self._buffers = [[] for _ in self.layers]

    def offer(self) -> list[LayerExchangeMessage]:
        """Keep each layer, first in its buffer, or send it to one other client (stage 1)."""
        messages = []
        for number, layer in enumerate(self.layers):
            if self.other_client_ids and self.rng.random() < self.send_probability:
                receiver = self.other_client_ids[int(self.rng.integers(len(self.other_client_ids)))]
                messages.append(LayerExchangeMessage(self.client_id, receiver, number, layer, is_return=False))
                self._sent.add(number)
            else:
                self._buffers[number].insert(0, layer)
        return messages

    def receive(self, message: LayerExchangeMessage) -> None:
        """Accept a layer, offered by another client or returned for an own one (stages 2 and 4)."""
        if message.is_return:
            self._returned[message.layer_index] = message.payload
        else:
            self._buffers[message.layer_index].append(message.payload)
            self._senders[message.layer_index].append(message.sender)

    def answer(self) -> list[LayerExchangeMessage]:
        """Return one element of the buffer to each sender (stage 3).

        Senders are sorted, so that the draws do not depend on the order in which messages arrived.
        """
        messages = []
        for number, senders in enumerate(self._senders):
            buffer = self._buffers[number]
            own = len(buffer) - len(senders)
            paired = sorted(zip(senders, buffer[own:], strict=True), key=lambda p: p[0])
            buffer = buffer[:own] + [layer for _, layer in paired]
            for sender, _ in paired:
                chosen = buffer.pop(int(self.rng.integers(len(buffer))))
                messages.append(LayerExchangeMessage(self.client_id, sender, number, chosen, is_return=True))
            self._buffers[number] = buffer
        return messages

    def assemble(self) -> list[Tensor]:
        """Return exactly one instance of every layer (stage 4)."""
        result = []
        for number in range(len(self.layers)):
            if number in self._sent and number not in self._returned:
                raise RuntimeError(f"client {self.client_id} sent layer {number} away and received none in return")
            left = self._buffers[number] + ([self._returned[number]] if number in self._sent else [])
            if len(left) != 1:
                raise RuntimeError(f"client {self.client_id} ends with {len(left)} instances of layer {number}, not 1")
            result.append(left[0])
        return result


def _deliver_layers(clients: dict[int, LayerExchangeClient], layers: Iterable[LayerExchangeMessage]) -> int:
    """Deliver messages within this process; return their number."""
    count = 0
    for layer in layers:
        clients[layer.receiver].receive(layer)
        count += 1
    return count


def run_layer_exchange(
    clients: dict[int, LayerExchangeClient],
    deliver: Callable[[dict[int, LayerExchangeClient], Iterable[LayerExchangeMessage]], int] = _deliver_layers,
) -> int:
    """Run stages 1 to 3, so that each client can `assemble`; return the number of messages."""
    offers = [message for p in clients.values() for message in p.offer()]
    count = deliver(clients, offers)
    answers = [message for p in clients.values() for message in p.answer()]
    return count + deliver(clients, answers)


def exchange_model_layers(
    models: Mapping[int, list[Tensor]], make_rng: _ClientRngFactory, send_probability: float, until_mixed: bool = False
) -> dict[int, list[Tensor]] | None:
    """Return the layers of all clients after one exchange, or after enough exchanges to mix all models.

    None if no attempt mixes them. A single client has no other to mix its layers with.
    """
    if not until_mixed or len(models) == 1:
        return _exchanged(models, make_rng, layer_exchange_stream_name(), send_probability)
    attempts = (
        exchange_layers_until_mixed(models, make_rng, send_probability, attempt) for attempt in range(MOST_ATTEMPTS)
    )
    return next((found for found in attempts if found is not None), None)


def exchange_layers_until_mixed(
    models: Mapping[int, list[Tensor]], make_rng: _ClientRngFactory, send_probability: float, attempt: int = 0
) -> dict[int, list[Tensor]] | None:
    """Exchange until no model is one that a single client trained; None if `MOST` exchanges are not enough."""
    owners = {id(layer): client_id for client_id, layers in models.items() for layer in layers}
    for number in range(MOST):
        models = _exchanged(models, make_rng, layer_exchange_stream_name(attempt, number), send_probability)
        if not any(layers_have_single_owner(owners[id(layer)] for layer in layers) for layers in models.values()):
            return models
    return None


def _exchanged(
    models: Mapping[int, list[Tensor]], make_rng: _ClientRngFactory, stream: str, send_probability: float
) -> dict[int, list[Tensor]]:
    """Return the layers of all clients after one exchange."""
    clients = {
        client_id: LayerExchangeClient(
            client_id,
            [other for other in models if other != client_id],
            layers,
            make_rng(stream, client_id=client_id),
            send_probability,
        )
        for client_id, layers in models.items()
    }
    run_layer_exchange(clients)
    return {client_id: client.assemble() for client_id, client in clients.items()}
