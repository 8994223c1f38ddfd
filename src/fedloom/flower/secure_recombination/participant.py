"""A site's side of the sealed exchange of layers (FedMR, Appendix B).

The exchange itself is `Participant` of methods/recombination.py. What changes hands are not layers but deeds: a deed is
the key to one layer on one site's board (sealed.py). Everybody gets all boards, so nobody can tell from the traffic
which layers were passed on, and every message between two sites has the same length whatever is in it.

One attempt, as a site sees it:

    hello     gives a fresh key, signed, and a board with all its layers, locked
    offer     gets everybody's hello, and checks them       gives deeds of the layers it sends away
    answer    gets the others' offers                       gives a deed back for each that it was given
    lock      gets the others' answers, and their boards    gives its recombined model, under a key that it keeps
    commit    gets the others' word that theirs are locked  gives the others its key: from here there is no way back
    release   gets the others' keys                         gives the server all of them

Where models must be mixed and one is not, `commit` gives offers again in place of a key.

Nothing is lost or doubled when somebody drops out. Before it commits, a site has given away only keys to layers that it
still has: the next attempt begins with its own untouched layers, fresh keys and those who are left. Once committed it
refuses every other attempt of the round, and any one site that is left can release all models. So the server gets all
recombined models of one attempt, or none. Nor can it get two recombinations of the same layers and compare them: keys
are released only after everybody has committed, and who has committed does not begin again.

A stage is done once. The same question has the same answer again, word for word; another question at that stage is
refused. A message that does not open, or does not fit, ends the attempt.
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
    EncryptedChannel,
    EncryptedLayerBoard,
    EncryptionSession,
    EncryptionTerms,
    ExchangeRejected,
    KeyExchangeHello,
    encrypt_model,
    frame_parts,
    hash_hello_transcript,
    sha256_digest,
)
from fedloom.flower.trust.identity import Identity, SiteKeys
from fedloom.methods._support.layer_exchange import (
    MOST,
    MOST_ATTEMPTS,
    ExchangedLayer,
    LayerExchangeClient,
    LayerExchangeRng,
    layers_have_single_owner,
)

PLACE = 1 + 2 + KEY
"""Bytes for one layer in a message between sites: whether there is a deed, whose layer it is for, the key."""

A = TypeVar("A")
Sealed = dict[int, bytes]
"""A message for each other participant, or from each, by slot."""
Draws = Callable[[int, int], LayerExchangeRng]
"""(attempt, exchange) -> where this site's choices come from."""


class _SystemRandomDraw(secrets.SystemRandom):
    """Choices that nobody can know beforehand: from the operating system."""

    def integers(self, high: int, /) -> int:
        return self.randrange(high)


def system_random_source(attempt: int, exchange: int) -> LayerExchangeRng:
    return _SystemRandomDraw()


@dataclass
class _Attempt:
    """What a site remembers of one attempt."""

    hello: KeyExchangeHello
    private: X25519PrivateKey
    board: EncryptedLayerBoard
    deeds: list[Tensor]
    """One for each layer: what this site holds before the exchange that is under way."""
    due: str = "offer"
    """The stage that comes next."""
    exchange: int = 0
    hellos: dict[int, KeyExchangeHello] = field(default_factory=dict)
    channels: dict[int, EncryptedChannel] = field(default_factory=dict)
    participant: LayerExchangeClient = field(init=False)
    given: dict[int, int] = field(default_factory=dict)
    """To whom each layer was sent in this exchange."""
    boards: dict[int, bytes] = field(default_factory=dict)
    """Everybody's, from the first time that models are put together."""
    key: bytes = b""
    """What its recombined model is locked with."""
    said: dict[tuple[str, int], tuple[bytes, object]] = field(default_factory=dict)
    """By stage and exchange: what was asked, hashed, and what was answered."""
    over: str = ""
    """Why this attempt has ended, if it has."""


class ExchangeParticipant:
    """One model of one site in one round. The methods are the stages, in their order.

    `fewest` is how many sites must take part at least, whatever the server says.
    """

    def __init__(
        self,
        identity: Identity,
        roster: SiteKeys,
        run: str,
        round: int,
        slot: int,
        layers: Sequence[bytes],
        terms: EncryptionTerms,
        draws: Draws = system_random_source,
        fewest: int = 2,
    ) -> None:
        if [len(layer) for layer in layers] != list(terms.sizes):
            raise ValueError("the layers do not have the sizes that the terms say")
        self.identity, self.roster, self.name = identity, roster, roster.name_of(identity)
        self.who = f"{self.name}#{slot}"
        self.run, self.round, self.slot = run, round, slot
        self.layers, self.terms, self.draws, self.fewest = list(layers), terms, draws, fewest
        self.committed = False
        self._now: _Attempt | None = None

    def hello(self, attempt: int) -> tuple[bytes, bytes]:
        """Open an attempt with a hello and a board."""
        now = self._now
        if now is not None and now.hello.session.attempt == attempt and not now.over:
            return now.hello.encode(), now.board.content
        if self.committed:
            raise ExchangeRejected(
                f"{self.who} has committed itself in round {self.round + 1} and does not begin again."
            )
        first = 0 if now is None else now.hello.session.attempt + 1
        if not first <= attempt < MOST_ATTEMPTS:
            raise ExchangeRejected(
                f"{self.who} does not begin attempt {attempt} of round {self.round + 1}: {first} is next."
            )
        session, private = EncryptionSession(self.run, self.round, attempt), X25519PrivateKey.generate()
        board = EncryptedLayerBoard.of(self.layers, self.terms.opener, session, self.who)
        fresh = private.public_key().public_bytes_raw()
        hello = KeyExchangeHello(session, self.name, self.slot, self.terms.digest, fresh, sha256_digest(board.content))
        deeds = [_deed(self.slot, key) for key in board.keys]
        self._now = now = _Attempt(hello.signed(self.identity), private, board, deeds)
        return now.hello.encode(), board.content

    def offer(self, attempt: int, hellos: Sequence[bytes]) -> Sealed:
        def work(now: _Attempt) -> Sealed:
            self._greet(now, [KeyExchangeHello.decode(data) for data in hellos])
            return self._offers(now)

        return self._once("offer", attempt, 0, frame_parts(*hellos), "answer", work)

    def answer(self, attempt: int, exchange: int, offers: Mapping[int, bytes]) -> Sealed:
        def work(now: _Attempt) -> Sealed:
            for message in self._messages(now, "offer", offers):
                # In the first exchange everybody has its own layers only, and can give away nothing else.
                if exchange == 0 and _origin(message.payload) != message.sender:
                    raise ExchangeRejected(f"{now.hellos[message.sender].who} offers a layer that is not its own.")
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
                if now.given.get(message.layer) != message.sender:
                    name = now.hellos[message.sender].who
                    raise ExchangeRejected(f"{name} returns layer {message.layer}, which was not sent to it.")
                now.participant.receive(message)
            try:
                now.deeds = now.participant.assemble()
            except RuntimeError as error:
                raise ExchangeRejected(f"the layers do not add up: {error}.") from None
            now.key = secrets.token_bytes(KEY)
            locked = encrypt_model(now.key, b"".join(self._model(now)), now.hello.session, exchange, self.who)
            word = self._whole(now)
            return locked, {slot: channel.seal(exchange, "lock", word) for slot, channel in now.channels.items()}

        asked = _flat(answers) + _flat({slot: sha256_digest(content) for slot, content in boards.items()})
        return self._once("lock", attempt, exchange, asked, "commit", work)

    def commit(self, attempt: int, exchange: int, words: Mapping[int, bytes]) -> tuple[str, Sealed]:
        """`commit` and the key to this site's model for each of the others; or `offer`, and one exchange more."""

        def work(now: _Attempt) -> tuple[str, Sealed]:
            opened = self._opened(now, "lock", words, 1)
            if self.terms.mixed and b"\1" in {self._whole(now), *opened.values()}:
                if exchange + 1 == MOST:
                    raise ExchangeRejected(f"after {MOST} exchanges there is still a model that one client trained.")
                now.exchange, now.due = exchange + 1, "answer"
                return "offer", self._offers(now)
            self.committed = True
            return "commit", {slot: channel.seal(exchange, "commit", now.key) for slot, channel in now.channels.items()}

        return self._once("commit", attempt, exchange, _flat(words), "release", work)

    def release(self, attempt: int, exchange: int, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """The keys to all models, by slot, now that everybody has committed."""

        def work(now: _Attempt) -> dict[int, bytes]:
            return {**self._opened(now, "commit", keys, KEY), self.slot: now.key}

        return self._once("release", attempt, exchange, _flat(keys), "nothing", work)

    # What the stages are made of

    def _once(
        self, stage: str, attempt: int, exchange: int, asked: bytes, then: str, work: Callable[[_Attempt], A]
    ) -> A:
        """Do the work of a stage, if that is what comes next; what was done already is only said again."""
        now = self._now
        if now is None or now.hello.session.attempt != attempt:
            raise ExchangeRejected(f"{self.who} is not in attempt {attempt} of round {self.round + 1}.")
        if (stage, exchange) in now.said:
            before, answer = now.said[stage, exchange]
            if before != sha256_digest(asked):
                raise ExchangeRejected(
                    f"{self.who} has done {stage} in {now.hello.session}, and then on something else."
                )
            return answer  # type: ignore[return-value]  # what work of this stage has returned
        if now.over:
            raise ExchangeRejected(f"{now.hello.session} is over for {self.who}: {now.over}")
        if (stage, exchange) != (now.due, now.exchange):
            raise ExchangeRejected(f"{self.who} waits for {now.due}, not for {stage}, in {now.hello.session}.")
        now.due = then
        try:
            answer = work(now)
        except ExchangeRejected as error:
            now.over = str(error)
            raise
        now.said[stage, exchange] = (sha256_digest(asked), answer)
        return answer

    def _greet(self, now: _Attempt, hellos: Sequence[KeyExchangeHello]) -> None:
        """Believe who takes part, and open the channels to them."""
        for hello in hellos:
            hello.check(self.roster, now.hello.session, self.terms.digest)
        slots, names = [hello.slot for hello in hellos], {hello.name for hello in hellos}
        if slots != sorted(set(slots)):
            raise ExchangeRejected("the participants are not in the order of their slots, each once.")
        if now.hello not in hellos:
            raise ExchangeRejected(f"the hello of {self.who} itself is missing or another one.")
        if len(names) < self.fewest:
            raise ExchangeRejected(f"{len(names)} sites take part, but {self.name} wants {self.fewest} at least.")
        record = hash_hello_transcript(hellos)
        now.hellos = {hello.slot: hello for hello in hellos}
        others = (hello for hello in hellos if hello.slot != self.slot)
        now.channels = {hello.slot: EncryptedChannel(now.private, now.hello, hello, record) for hello in others}

    def _offers(self, now: _Attempt) -> Sealed:
        """Begin an exchange with the deeds at hand."""
        now.participant = LayerExchangeClient(
            me=self.slot,
            others=list(now.channels),
            layers=now.deeds,
            draw=self.draws(now.hello.session.attempt, now.exchange),
            send_probability=self.terms.send_probability,
        )
        messages = now.participant.offer()
        now.given = {message.layer: message.receiver for message in messages}
        return self._sealed(now, "offer", messages)

    def _sealed(self, now: _Attempt, stage: str, messages: Sequence[ExchangedLayer]) -> Sealed:
        """Deeds on their way: one message for each of the others, with a place for every layer."""
        texts = {slot: bytearray(PLACE * self.terms.layers) for slot in now.channels}
        for message in messages:
            place = PLACE * message.layer
            texts[message.receiver][place : place + PLACE] = b"\1" + message.payload.numpy().tobytes()
        return {slot: now.channels[slot].seal(now.exchange, stage, bytes(text)) for slot, text in texts.items()}

    def _messages(self, now: _Attempt, stage: str, sealed: Mapping[int, bytes]) -> list[ExchangedLayer]:
        """Deeds that have come."""
        messages = []
        for sender, text in self._opened(now, stage, sealed, PLACE * self.terms.layers).items():
            for layer in range(self.terms.layers):
                place = text[PLACE * layer : PLACE * (layer + 1)]
                if place[0]:
                    deed = torch.frombuffer(bytearray(place[1:]), dtype=torch.uint8)
                    if _origin(deed) not in now.hellos:
                        raise ExchangeRejected(
                            f"{now.hellos[sender].who} passes on a layer of somebody who does not take part."
                        )
                    messages.append(ExchangedLayer(sender, self.slot, layer, deed, back=stage == "answer"))
        return messages

    def _opened(self, now: _Attempt, stage: str, sealed: Mapping[int, bytes], size: int) -> dict[int, bytes]:
        """What each of the others says at a stage, in the order of their slots; everybody must have said something."""
        for slot, channel in now.channels.items():
            if slot not in sealed:
                raise ExchangeRejected(f"the {stage} of {channel.theirs.who} is missing.")
        if strangers := sealed.keys() - now.channels.keys():
            raise ExchangeRejected(
                f"there is a message at {stage} from slot {min(strangers)}, which does not take part."
            )
        return {slot: channel.open(now.exchange, stage, sealed[slot], size) for slot, channel in now.channels.items()}

    def _pin_up(self, now: _Attempt, boards: Mapping[int, bytes]) -> None:
        """Take the others' boards, if they are those that the hellos name."""
        if boards.keys() != now.channels.keys():
            raise ExchangeRejected(f"there are {len(boards)} boards of other sites, not {len(now.channels)}.")
        for slot, content in boards.items():
            if sha256_digest(content) != now.hellos[slot].board:
                raise ExchangeRejected(f"the board of {now.hellos[slot].who} is not the one that its hello names.")
        now.boards = {**boards, self.slot: now.board.content}

    def _model(self, now: _Attempt) -> list[bytes]:
        """The layers that the deeds are for, each still in its seal."""
        session = now.hello.session
        owners = [(number, _origin(deed), _key(deed)) for number, deed in enumerate(now.deeds)]
        return [
            EncryptedLayerBoard.take(now.boards[owner], number, key, self.terms, session, now.hellos[owner].who)
            for number, owner, key in owners
        ]

    def _whole(self, now: _Attempt) -> bytes:
        """Whether this site would upload just what one client trained, itself or another."""
        return bytes([layers_have_single_owner(map(_origin, now.deeds))])


def _deed(slot: int, key: bytes) -> Tensor:
    """A tensor, because that is what participants pass on."""
    return torch.frombuffer(bytearray(slot.to_bytes(2, "big") + key), dtype=torch.uint8)


def _origin(deed: Tensor) -> int:
    return int.from_bytes(deed[:2].numpy().tobytes(), "big")


def _key(deed: Tensor) -> bytes:
    return deed[2:].numpy().tobytes()


def _flat(messages: Mapping[int, bytes]) -> bytes:
    return frame_parts(*(part for slot in sorted(messages) for part in (slot, messages[slot])))
