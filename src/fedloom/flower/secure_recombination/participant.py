"""ExchangeParticipant: a site's side of the secure exchange (FedMR, Appendix B).

`LayerExchangeClient` (methods/_support/layer_exchange.py) runs the exchange itself. Sites do not pass on layers but
deeds. A deed is the key to one layer on one site's board (crypto.py). All sites get all boards, and every message
between two sites has the same length. So nobody can tell from the traffic which layers were passed on.

One attempt, as a site sees it:

    hello                                              sends a fresh signed key, and a board with all its layers, locked
    offer     gets and checks all hellos               sends deeds of the layers that it gives away
    answer    gets the others' offers                  sends back one deed for each that it was given
    lock      gets the others' answers and boards      sends its recombined model, locked with a key that it keeps
    commit    gets word that all others have locked    sends its key to the others: from here there is no way back
    release   gets the others' keys                    sends all keys to the server

If models must be mixed and one is not, `commit` sends offers again instead of a key.

No layer is lost or duplicated if a site drops out. Before a site commits, it has given away only keys to layers that it
still has. The next attempt begins with its own unchanged layers, fresh keys and the remaining sites. After it commits,
it refuses every other attempt of the round, and any one remaining site can release all models. So the server gets all
recombined models of one attempt, or none. It cannot compare two recombinations of the same layers either: keys are
released only after all sites have committed, and a committed site does not begin again.

A stage runs once. The same request gets the same reply, byte for byte; another request at that stage is refused. A
message that cannot be decrypted or does not fit ends the attempt.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from fedloom.flower.secure_recombination.crypto import (
    KEY,
    CryptoHello,
    CryptoLayerBoard,
    CryptoRejected,
    CryptoSession,
    CryptoTerms,
    EncryptedChannel,
    crypto_digest,
    crypto_frame,
    encrypt_model,
    hash_hello_transcript,
)
from fedloom.flower.secure_recombination.relay import RelayMessage, relay_message_parts
from fedloom.flower.trust.identity import Identity, SiteKeys
from fedloom.methods._support.layer_exchange import (
    MOST,
    MOST_ATTEMPTS,
    LayerExchangeClient,
    LayerExchangeMessage,
    LayerExchangeRng,
    layers_have_single_owner,
)

PLACE = 1 + 2 + KEY
"""Bytes for one layer in a message between sites: whether it holds a deed, the owner of the layer, the key."""

A = TypeVar("A")
Sealed = dict[int, bytes]
"""One message for or from each other participant, by model index."""
RandomDraws = Callable[[int, int], LayerExchangeRng]
"""(attempt, exchange) -> the random generator for this site's choices."""


class _SystemRandomDraw(secrets.SystemRandom):
    """Unpredictable choices from the operating system."""

    def integers(self, high: int, /) -> int:
        return self.randrange(high)


def participant_random_source(attempt: int, exchange: int) -> LayerExchangeRng:
    return _SystemRandomDraw()


@dataclass
class _Attempt:
    """A site's state in one attempt."""

    hello: CryptoHello
    private: X25519PrivateKey
    board: CryptoLayerBoard
    deeds: list[Tensor]
    """One for each layer: what this site holds before the current exchange."""
    due: str = "offer"
    """The next stage."""
    exchange: int = 0
    hellos: dict[int, CryptoHello] = field(default_factory=dict)
    channels: dict[int, EncryptedChannel] = field(default_factory=dict)
    participant: LayerExchangeClient = field(init=False)
    given: dict[int, int] = field(default_factory=dict)
    """Receiver of each layer that was sent away in this exchange."""
    boards: dict[int, bytes] = field(default_factory=dict)
    """Boards of all participants, once models are assembled for the first time."""
    key: bytes = b""
    """The key that locks its recombined model."""
    said: dict[tuple[str, int], tuple[bytes, object]] = field(default_factory=dict)
    """By stage and exchange: the hash of the request, and the reply."""
    over: str = ""
    """Why this attempt has ended, if it has."""


class ExchangeParticipant:
    """One model of one site in one round. The methods are the stages, in order.

    At least `min_sites` sites must take part, whatever the server says.
    """

    def __init__(
        self,
        identity: Identity,
        site_keys: SiteKeys,
        run: str,
        round: int,
        model_index: int,
        layers: Sequence[bytes],
        terms: CryptoTerms,
        random_draws: RandomDraws = participant_random_source,
        min_sites: int = 2,
    ) -> None:
        if [len(layer) for layer in layers] != list(terms.sizes):
            raise ValueError("the sizes of the layers differ from those in the terms")
        self.identity, self.site_keys, self.name = identity, site_keys, site_keys.name_of(identity)
        self.participant = f"{self.name}#{model_index}"
        self.run, self.round, self.model_index = run, round, model_index
        self.layers, self.terms, self.random_draws, self.min_sites = list(layers), terms, random_draws, min_sites
        self.committed = False
        self._now: _Attempt | None = None

    def hello(self, attempt: int) -> tuple[bytes, bytes]:
        """Open an attempt with a hello and a board."""
        now = self._now
        if now is not None and now.hello.session.attempt == attempt and not now.over:
            return now.hello.encode(), now.board.content
        if self.committed:
            raise CryptoRejected(
                f"{self.participant} has committed in round {self.round + 1}, so it does not begin again."
            )
        first = 0 if now is None else now.hello.session.attempt + 1
        if not first <= attempt < MOST_ATTEMPTS:
            raise CryptoRejected(
                f"{self.participant} does not begin attempt {attempt} of round {self.round + 1}: {first} is next."
            )
        session, private = CryptoSession(self.run, self.round, attempt), X25519PrivateKey.generate()
        board = CryptoLayerBoard.of(self.layers, self.terms.opener, session, self.participant)
        fresh = private.public_key().public_bytes_raw()
        mark = crypto_digest(board.content)
        hello = CryptoHello(session, self.name, self.model_index, self.terms.digest, fresh, mark)
        deeds = [_deed(self.model_index, key) for key in board.keys]
        self._now = now = _Attempt(hello.signed(self.identity), private, board, deeds)
        return now.hello.encode(), board.content

    def offer(self, attempt: int, hellos: Sequence[bytes]) -> Sealed:
        def work(now: _Attempt) -> Sealed:
            self._accept_hellos(now, [CryptoHello.decode(data) for data in hellos])
            return self._offers(now)

        return self._once("offer", attempt, 0, crypto_frame(*hellos), "answer", work)

    def answer(self, attempt: int, exchange: int, offers: Mapping[int, bytes]) -> Sealed:
        def work(now: _Attempt) -> Sealed:
            for message in self._messages(now, "offer", offers):
                # In the first exchange a site has only its own layers to give away.
                if exchange == 0 and _origin(message.payload) != message.sender:
                    name = now.hellos[message.sender].participant
                    raise CryptoRejected(f"{name} offers a layer that is not its own.")
                now.participant.receive(message)
            return self._sealed(now, "answer", now.participant.answer())

        return self._once("answer", attempt, exchange, _flat(offers), "lock", work)

    def lock(
        self, attempt: int, exchange: int, answers: Mapping[int, bytes], boards: Mapping[int, bytes]
    ) -> tuple[bytes, Sealed]:
        def work(now: _Attempt) -> tuple[bytes, Sealed]:
            if exchange == 0:
                self._pin_up(now, boards)
            for message in self._messages(now, "answer", answers):
                if now.given.get(message.layer_index) != message.sender:
                    name = now.hellos[message.sender].participant
                    raise CryptoRejected(f"{name} returns layer {message.layer_index}, which was not sent to it.")
                now.participant.receive(message)
            try:
                now.deeds = now.participant.assemble()
            except RuntimeError as error:
                raise CryptoRejected(f"the layers do not add up: {error}.") from None
            now.key = secrets.token_bytes(KEY)
            locked = encrypt_model(now.key, b"".join(self._model(now)), now.hello.session, exchange, self.participant)
            word = self._whole(now)
            return locked, {i: channel.seal(exchange, "lock", word) for i, channel in now.channels.items()}

        asked = _flat(answers) + _flat({i: crypto_digest(content) for i, content in boards.items()})
        return self._once("lock", attempt, exchange, asked, "commit", work)

    def commit(self, attempt: int, exchange: int, words: Mapping[int, bytes]) -> tuple[str, Sealed]:
        """Return `commit` and the key to this site's model for each other site, or `offer` and one more exchange."""

        def work(now: _Attempt) -> tuple[str, Sealed]:
            opened = self._opened(now, "lock", words, 1)
            if self.terms.mixed and b"\1" in {self._whole(now), *opened.values()}:
                if exchange + 1 == MOST:
                    raise CryptoRejected(f"after {MOST} exchanges there is still a model that one client trained.")
                now.exchange, now.due = exchange + 1, "answer"
                return "offer", self._offers(now)
            self.committed = True
            return "commit", {i: channel.seal(exchange, "commit", now.key) for i, channel in now.channels.items()}

        return self._once("commit", attempt, exchange, _flat(words), "release", work)

    def release(self, attempt: int, exchange: int, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the keys to all models by model index, now that all sites have committed."""

        def work(now: _Attempt) -> dict[int, bytes]:
            return {**self._opened(now, "commit", keys, KEY), self.model_index: now.key}

        return self._once("release", attempt, exchange, _flat(keys), "nothing", work)

    # Helpers of the stages

    def _once(
        self, stage: str, attempt: int, exchange: int, asked: bytes, then: str, work: Callable[["_Attempt"], A]
    ) -> A:
        """Run the work of a stage if it is next; repeat the reply if the stage has run."""
        now = self._now
        if now is None or now.hello.session.attempt != attempt:
            raise CryptoRejected(f"{self.participant} is not in attempt {attempt} of round {self.round + 1}.")
        if (stage, exchange) in now.said:
            before, answer = now.said[stage, exchange]
            if before != crypto_digest(asked):
                raise CryptoRejected(f"{self.participant} has done {stage} in {now.hello.session} for another request.")
            return answer  # type: ignore[return-value]  # the result of this stage's work
        if now.over:
            raise CryptoRejected(f"{now.hello.session} is over for {self.participant}: {now.over}")
        if (stage, exchange) != (now.due, now.exchange):
            raise CryptoRejected(f"{self.participant} waits for {now.due}, not for {stage}, in {now.hello.session}.")
        now.due = then
        try:
            answer = work(now)
        except CryptoRejected as error:
            now.over = str(error)
            raise
        now.said[stage, exchange] = (crypto_digest(asked), answer)
        return answer

    def _accept_hellos(self, now: _Attempt, hellos: Sequence[CryptoHello]) -> None:
        """Check who takes part, and open channels to them."""
        for hello in hellos:
            hello.check(self.site_keys, now.hello.session, self.terms.digest)
        model_indices, names = [hello.model_index for hello in hellos], {hello.name for hello in hellos}
        if model_indices != sorted(set(model_indices)):
            raise CryptoRejected("the participants are not in the order of their model indices, each once.")
        if now.hello not in hellos:
            raise CryptoRejected(f"the hello of {self.participant} itself is missing or was replaced.")
        if len(names) < self.min_sites:
            raise CryptoRejected(f"{len(names)} sites take part, but {self.name} needs at least {self.min_sites}.")
        record = hash_hello_transcript(hellos)
        now.hellos = {hello.model_index: hello for hello in hellos}
        others = (hello for hello in hellos if hello.model_index != self.model_index)
        now.channels = {hello.model_index: EncryptedChannel(now.private, now.hello, hello, record) for hello in others}

    def _offers(self, now: _Attempt) -> Sealed:
        """Begin an exchange with the current deeds."""
        now.participant = LayerExchangeClient(
            client_id=self.model_index,
            other_client_ids=list(now.channels),
            layers=now.deeds,
            rng=self.random_draws(now.hello.session.attempt, now.exchange),
            send_probability=self.terms.send_probability,
        )
        messages = now.participant.offer()
        now.given = {message.layer_index: message.receiver for message in messages}
        return self._sealed(now, "offer", messages)

    def _sealed(self, now: _Attempt, stage: str, messages: Sequence[LayerExchangeMessage]) -> Sealed:
        """Return deeds as one sealed message for each other participant, with a place for every layer."""
        texts = {i: bytearray(PLACE * self.terms.num_layers) for i in now.channels}
        for message in messages:
            place = PLACE * message.layer_index
            texts[message.receiver][place : place + PLACE] = b"\1" + message.payload.numpy().tobytes()
        return {i: now.channels[i].seal(now.exchange, stage, bytes(text)) for i, text in texts.items()}

    def _messages(self, now: _Attempt, stage: str, sealed: Mapping[int, bytes]) -> list[LayerExchangeMessage]:
        """Return the deeds that arrived."""
        messages = []
        for sender, text in self._opened(now, stage, sealed, PLACE * self.terms.num_layers).items():
            for layer in range(self.terms.num_layers):
                place = text[PLACE * layer : PLACE * (layer + 1)]
                if place[0]:
                    deed = torch.frombuffer(bytearray(place[1:]), dtype=torch.uint8)
                    if _origin(deed) not in now.hellos:
                        name = now.hellos[sender].participant
                        raise CryptoRejected(f"{name} passes on a layer of a model that does not take part.")
                    messages.append(
                        LayerExchangeMessage(sender, self.model_index, layer, deed, is_return=stage == "answer")
                    )
        return messages

    def _opened(self, now: _Attempt, stage: str, sealed: Mapping[int, bytes], size: int) -> dict[int, bytes]:
        """Return the message of each other participant at a stage, by model index. None may be missing."""
        for i, channel in now.channels.items():
            if i not in sealed:
                raise CryptoRejected(f"the {stage} of {channel.theirs.participant} is missing.")
        if strangers := sealed.keys() - now.channels.keys():
            raise CryptoRejected(f"model {min(strangers)} does not take part, but sent a message at {stage}.")
        return {i: channel.open(now.exchange, stage, sealed[i], size) for i, channel in now.channels.items()}

    def _pin_up(self, now: _Attempt, boards: Mapping[int, bytes]) -> None:
        """Store the others' boards if they are those that the hellos name."""
        if boards.keys() != now.channels.keys():
            raise CryptoRejected(f"there are {len(boards)} boards of other sites, not {len(now.channels)}.")
        for i, content in boards.items():
            if crypto_digest(content) != now.hellos[i].board:
                raise CryptoRejected(f"the board of {now.hellos[i].participant} is not the one that its hello names.")
        now.boards = {**boards, self.model_index: now.board.content}

    def _model(self, now: _Attempt) -> list[bytes]:
        """Return the layers that the deeds are for, each still sealed."""
        session = now.hello.session
        owners = [(number, _origin(deed), _key(deed)) for number, deed in enumerate(now.deeds)]
        return [
            CryptoLayerBoard.take(now.boards[owner], number, key, self.terms, session, now.hellos[owner].participant)
            for number, owner, key in owners
        ]

    def _whole(self, now: _Attempt) -> bytes:
        """Return whether this site would upload a model that one client trained, itself or another."""
        return bytes([layers_have_single_owner(map(_origin, now.deeds))])


def _deed(model_index: int, key: bytes) -> Tensor:
    """Return a deed as a tensor, because `LayerExchangeClient` passes on tensors."""
    return torch.frombuffer(bytearray(model_index.to_bytes(2, "big") + key), dtype=torch.uint8)


def _origin(deed: Tensor) -> int:
    return int.from_bytes(deed[:2].numpy().tobytes(), "big")


def _key(deed: Tensor) -> bytes:
    return deed[2:].numpy().tobytes()


def _flat(messages: Mapping[int, bytes]) -> bytes:
    return crypto_frame(*(part for i in sorted(messages) for part in (i, messages[i])))


def run_participant_stage(participant: ExchangeParticipant, stage: str, request: RelayMessage) -> RelayMessage:
    """Return a site's reply to a request of the relay (relay.py)."""
    attempt, exchange = (_number(request, name) for name in ("attempt", "exchange"))
    received, kind = request.by_model_index, stage
    if stage == "hello":
        hello, board = participant.hello(attempt)
        return RelayMessage(parts={"hello": hello, "board": board})
    if stage == "lock":
        model, parts = participant.lock(attempt, exchange, received("answer"), received("board"))
        return RelayMessage(parts={"model": model, **relay_message_parts("lock", parts)})
    if stage == "offer":
        parts = participant.offer(attempt, [hello for _, hello in sorted(received("hello").items())])
    elif stage == "answer":
        parts = participant.answer(attempt, exchange, received("offer"))
    elif stage == "commit":
        kind, parts = participant.commit(attempt, exchange, received("lock"))
    elif stage == "release":
        kind, parts = "key", participant.release(attempt, exchange, received("commit"))
    else:
        raise CryptoRejected(f"an exchange has no stage {stage!r}.")
    return RelayMessage(parts=relay_message_parts(kind, parts))


def _number(request: RelayMessage, name: str) -> int:
    value = request.header.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise CryptoRejected(f"{name} must be a whole number, not {value!r}.")
    return value
