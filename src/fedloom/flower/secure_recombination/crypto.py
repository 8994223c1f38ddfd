"""What sites say to each other through a server that cannot read it: greetings, channels and the board.

Nothing here is a cipher of our own: X25519, HKDF-SHA256, ChaCha20-Poly1305, ECDSA and HPKE (RFC 9180) as the package
`cryptography` has them. What is ours is what they are bound to.

- A `Hello` opens an attempt: a fresh X25519 key, signed by the site's identity together with the run, the round, the
  attempt, the site's name and slot, the terms of the exchange and the hash of its board.
- A `Channel` joins two sites. Its two keys, one for each direction, depend on both fresh keys and on the transcript,
  the hash of everybody's hello. Two sites that were shown different hellos have different keys and understand nothing.
  Every message has its own number, which is its nonce, and names run, round, attempt, exchange, stage, sender and
  receiver as associated data. So a message opens at one place only: not twice, not later, not elsewhere, not reflected.
- A `Board` holds all layers of one site, each sealed for the server's `Opener` and then locked with a key of its own.
  Whoever has the key owns the layer. Sites pass layers on and cannot read them; the server reads them at the end, in
  recombined models. It makes a new `Opener` for each round.
"""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedloom.errors import FedloomError
from fedloom.flower.trust.identity import Identity, SiteKeys

PURPOSE = "hello of a layer exchange, version 2"
CHANNEL = "fedloom layer exchange, version 2"
KEY = 32
TAG = 16
SEAL = 32 + TAG
"""Bytes that a seal adds to a layer: the sender's fresh key and the tag."""
STAGES = ("offer", "answer", "lock", "commit")
"""The stages in which sites write to each other."""

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_ONCE = bytes(12)
"""The nonce of a key that locks one thing and is never used again."""


class ExchangeRejected(FedloomError):
    """A site or the server will not go on, because what it was given is not what it must be."""


def frame_parts(*parts: bytes | str | int) -> bytes:
    """Parts as bytes from which each can be told apart: every one has its length before it."""
    raw = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in raw)


def _unframe_crypto_parts(data: bytes, count: int) -> list[bytes]:
    """The parts that `frame` joined."""
    parts, place = [], 0
    for _ in range(count):
        size = int.from_bytes(data[place : place + 4], "big")
        part = data[place + 4 : place + 4 + size]
        if len(data) < place + 4 or len(part) != size:
            raise ExchangeRejected("a message is cut off.")
        parts.append(part)
        place += 4 + size
    if place != len(data):
        raise ExchangeRejected("a message goes on after its end.")
    return parts


@dataclass(frozen=True)
class EncryptionSession:
    """Which exchange this is. A new attempt has new keys, and nothing of an earlier one is valid in it."""

    run: str
    round: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"attempt {self.attempt} of round {self.round + 1} of run {self.run[:8]}"

    def encode(self) -> bytes:
        return frame_parts(self.run, self.round, self.attempt)


@dataclass(frozen=True)
class EncryptionTerms:
    """What all who take part must agree on."""

    sizes: tuple[int, ...]
    """Bytes of each layer."""
    send_probability: float
    mixed: bool
    """Whether to exchange again while somebody is left with a model that one client trained."""
    opener: bytes
    """The server's public key, which layers are sealed for."""

    @cached_property
    def digest(self) -> bytes:
        chance = repr(float(self.send_probability))
        return sha256_digest(frame_parts(len(self.sizes), *self.sizes, chance, int(self.mixed), self.opener))

    @property
    def layers(self) -> int:
        return len(self.sizes)

    @property
    def sealed_sizes(self) -> list[int]:
        """Bytes of each layer in its seal."""
        return [size + SEAL for size in self.sizes]

    @property
    def locked_sizes(self) -> list[int]:
        """Bytes of each layer on a board."""
        return [size + TAG for size in self.sealed_sizes]


@dataclass(frozen=True)
class KeyExchangeHello:
    """How a site opens an attempt."""

    session: EncryptionSession
    name: str
    slot: int
    terms: bytes
    fresh: bytes
    """Its X25519 public key, for this attempt alone."""
    board: bytes
    """The hash of its board."""
    signature: bytes = b""

    @property
    def who(self) -> str:
        """A participant: a site, and which of the models there. No site's name has a # in it."""
        return f"{self.name}#{self.slot}"

    def body(self) -> bytes:
        return frame_parts(self.session.encode(), self.name, self.slot, self.terms, self.fresh, self.board)

    def signed(self, identity: Identity) -> "KeyExchangeHello":
        return replace(self, signature=identity.sign(PURPOSE, self.body()))

    def encode(self) -> bytes:
        return frame_parts(self.body(), self.signature)

    @classmethod
    def decode(cls, data: bytes) -> "KeyExchangeHello":
        """What it says; nothing of it is believed before `check`."""
        body, signature = _unframe_crypto_parts(data, 2)
        session, name, slot, terms, fresh, board = _unframe_crypto_parts(body, 6)
        run, round, attempt = _unframe_crypto_parts(session, 3)
        try:
            numbers = [int(text) for text in (round, attempt, slot)]
            hello = cls(
                EncryptionSession(run.decode(), numbers[0], numbers[1]),
                name.decode(),
                numbers[2],
                terms,
                fresh,
                board,
                signature,
            )
        except ValueError:
            raise ExchangeRejected("a hello is not one.") from None
        if hello.body() != body or (len(terms), len(fresh), len(board)) != (32, 32, 32):
            raise ExchangeRejected("a hello is not one.")
        return hello

    def check(self, roster: SiteKeys, session: EncryptionSession, terms: bytes) -> None:
        """Refuse what its site did not say, or said about something else."""
        if self.name not in roster.keys:
            raise ExchangeRejected(f"{self.name!r} takes part, but this site's roster has no such site.")
        if not roster.signed(self.name, PURPOSE, self.body(), self.signature):
            raise ExchangeRejected(f"the hello of {self.name} is not signed by its key: somebody sits in the middle.")
        if self.session != session:
            raise ExchangeRejected(
                f"the hello of {self.name} is from another exchange ({self.session}, not {session})."
            )
        if self.terms != terms:
            raise ExchangeRejected(f"{self.name} exchanges on other terms: its model or its options differ.")


def hash_hello_transcript(hellos: Sequence[KeyExchangeHello]) -> bytes:
    """The hash of everybody's hello, signatures and all."""
    return hashlib.sha256(frame_parts(*(hello.encode() for hello in hellos))).digest()


class EncryptedChannel:
    """What two sites say to each other in one attempt, as seen by one of them."""

    def __init__(
        self, private: X25519PrivateKey, mine: KeyExchangeHello, theirs: KeyExchangeHello, transcript: bytes
    ) -> None:
        try:
            shared = private.exchange(X25519PublicKey.from_public_bytes(theirs.fresh))
        except ValueError:  # a point of small order: everybody would know the secret
            raise ExchangeRejected(f"the fresh key of {theirs.name} is none.") from None
        self.mine, self.theirs = mine, theirs
        self._out = ChaCha20Poly1305(self._key(shared, transcript, mine, theirs))
        self._in = ChaCha20Poly1305(self._key(shared, transcript, theirs, mine))

    @staticmethod
    def _key(shared: bytes, transcript: bytes, sender: KeyExchangeHello, receiver: KeyExchangeHello) -> bytes:
        about = frame_parts(CHANNEL, sender.session.encode(), sender.who, receiver.who, sender.fresh, receiver.fresh)
        return HKDF(SHA256(), length=KEY, salt=transcript, info=about).derive(shared)

    def seal(self, exchange: int, stage: str, text: bytes) -> bytes:
        """For the other site. The caller seals one text a stage: two under one number would betray both."""
        return self._out.encrypt(_number(exchange, stage), text, _place(self.mine, self.theirs, exchange, stage))

    def open(self, exchange: int, stage: str, sealed: bytes, size: int) -> bytes:
        """From the other site, `size` bytes."""
        try:
            text = self._in.decrypt(_number(exchange, stage), sealed, _place(self.theirs, self.mine, exchange, stage))
        except InvalidTag:
            raise ExchangeRejected(
                f"what is said to be the {stage} of {self.theirs.who} is not what it sent to {self.mine.who} in "
                f"{self.mine.session}: it was changed, moved or replayed on the way."
            ) from None
        if len(text) != size:
            raise ExchangeRejected(f"the {stage} of {self.theirs.who} has {len(text)} bytes, not {size}.")
        return text


def _number(exchange: int, stage: str) -> bytes:
    return (exchange * len(STAGES) + STAGES.index(stage)).to_bytes(12, "big")


def _place(sender: KeyExchangeHello, receiver: KeyExchangeHello, exchange: int, stage: str) -> bytes:
    return frame_parts("from site to site", sender.session.encode(), exchange, stage, sender.who, receiver.who)


@dataclass(frozen=True)
class EncryptedLayerBoard:
    """All layers of one site, locked, and the keys to them."""

    content: bytes
    keys: list[bytes]

    @classmethod
    def of(cls, layers: Sequence[bytes], opener: bytes, session: EncryptionSession, who: str) -> "EncryptedLayerBoard":
        """`opener` is the server's public key."""
        public, keys, parts = X25519PublicKey.from_public_bytes(opener), [], []
        for number, layer in enumerate(layers):
            key = secrets.token_bytes(KEY)
            sealed = _SUITE.encrypt(layer, public, _layer(session, number))
            parts.append(ChaCha20Poly1305(key).encrypt(_ONCE, sealed, _owned(session, who, number)))
            keys.append(key)
        return cls(b"".join(parts), keys)

    @staticmethod
    def take(
        content: bytes, number: int, key: bytes, terms: EncryptionTerms, session: EncryptionSession, who: str
    ) -> bytes:
        """One layer of the board of `who`, still in its seal."""
        try:
            locked = split_framed_parts(content, terms.locked_sizes, f"the board of {who}")[number]
            return ChaCha20Poly1305(key).decrypt(_ONCE, locked, _owned(session, who, number))
        except InvalidTag:
            raise ExchangeRejected(f"layer {number} of {who} does not open with the key that was passed on.") from None


def split_framed_parts(content: bytes, sizes: Sequence[int], what: str) -> list[bytes]:
    """Parts of these sizes that lie one after the other."""
    ends = list(accumulate(sizes, initial=0))
    if len(content) != ends[-1]:
        raise ExchangeRejected(f"{what} has {len(content)} bytes, not {ends[-1]}.")
    return [content[start:end] for start, end in pairwise(ends)]


def sha256_digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def encrypt_model(key: bytes, model: bytes, session: EncryptionSession, exchange: int, who: str) -> bytes:
    """A whole recombined model, for when everybody has agreed to hand theirs over."""
    return ChaCha20Poly1305(key).encrypt(_ONCE, model, _upload(session, exchange, who))


def decrypt_model(key: bytes, locked: bytes, session: EncryptionSession, exchange: int, who: str) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(_ONCE, locked, _upload(session, exchange, who))
    except (InvalidTag, ValueError):  # a key of another length
        raise ExchangeRejected(f"the model of {who} does not open with the key that was released.") from None


class LayerKeyPair:
    """The server's key pair, which layers are sealed for; it makes one for each round and forgets it afterwards."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def open(self, sealed: bytes, session: EncryptionSession, number: int) -> bytes:
        try:
            return _SUITE.decrypt(sealed, self._private, _layer(session, number))
        except (InvalidTag, ValueError):
            raise ExchangeRejected(f"layer {number} is not sealed for this key, this round and this place.") from None


def _layer(session: EncryptionSession, number: int) -> bytes:
    """What a layer's seal is bound to. Not to whose it is: the server is not to know."""
    return frame_parts("a layer", session.encode(), number)


def _owned(session: EncryptionSession, who: str, number: int) -> bytes:
    return frame_parts("a layer on a board", session.encode(), who, number)


def _upload(session: EncryptionSession, exchange: int, who: str) -> bytes:
    return frame_parts("a recombined model", session.encode(), exchange, who)
