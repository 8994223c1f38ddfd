"""Cryptography of the secure exchange: hellos, channels, boards of layers.

Hellos are signed, channels connect two sites, and the layers on a board are encrypted.

The server carries all messages and cannot read them. The ciphers are those of the package `cryptography`: X25519,
HKDF-SHA256, ChaCha20-Poly1305, ECDSA and HPKE (RFC 9180). Only what they are bound to is our own.

- A `CryptoHello` opens an attempt: a fresh X25519 key, signed by the site's identity together with the run, the
  round, the attempt, the site's name and model index, the terms of the exchange and the hash of its board.
- An `EncryptedChannel` joins two sites, with one key for each direction. Both keys depend on both fresh keys and on the
  transcript, the hash of all hellos. Two sites that saw different hellos have different keys and cannot communicate.
  The number of a message is its nonce. Its associated data name run, round, attempt, exchange, stage, sender and
  receiver. So a message opens at one place only: not twice, not later, not elsewhere, and not at its sender.
- An `CryptoLayerBoard` holds all layers of one site. Each is sealed for the server's `LayerKeyPair` and then locked
  with a key of its own. Whoever has this key owns the layer. Sites pass layers on and cannot read them. The server
  reads them at the end, in recombined models. It makes a new `LayerKeyPair` for each round.
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
"""Bytes that sealing adds to a layer: the sender's fresh key and the tag."""
STAGES = ("offer", "answer", "lock", "commit")
"""The stages in which sites send messages to each other."""

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_ONCE = bytes(12)
"""The nonce for keys that are used only once."""


class CryptoRejected(FedloomError):
    """A site or the server does not continue, because it received something invalid."""


def crypto_frame(*parts: bytes | str | int) -> bytes:
    """Join parts without ambiguity: its length precedes each part."""
    raw = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "big") + part for part in raw)


def _unframe_crypto_parts(data: bytes, count: int) -> list[bytes]:
    """Return the parts that `crypto_frame` joined."""
    parts, place = [], 0
    for _ in range(count):
        size = int.from_bytes(data[place : place + 4], "big")
        part = data[place + 4 : place + 4 + size]
        if len(data) < place + 4 or len(part) != size:
            raise CryptoRejected("a message is cut off.")
        parts.append(part)
        place += 4 + size
    if place != len(data):
        raise CryptoRejected("a message has extra bytes at its end.")
    return parts


@dataclass(frozen=True)
class CryptoSession:
    """The identity of an exchange. A new attempt has new keys, and nothing of an earlier one is valid in it."""

    run: str
    round: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"attempt {self.attempt} of round {self.round + 1} of run {self.run[:8]}"

    def encode(self) -> bytes:
        return crypto_frame(self.run, self.round, self.attempt)


@dataclass(frozen=True)
class CryptoTerms:
    """The terms that all participants must agree on."""

    sizes: tuple[int, ...]
    """Bytes of each layer."""
    send_probability: float
    mixed: bool
    """Whether to exchange again while any model is one that a single client trained."""
    opener: bytes
    """The server's public key, for which layers are sealed."""

    @cached_property
    def digest(self) -> bytes:
        chance = repr(float(self.send_probability))
        return crypto_digest(crypto_frame(len(self.sizes), *self.sizes, chance, int(self.mixed), self.opener))

    @property
    def num_layers(self) -> int:
        return len(self.sizes)

    @property
    def sealed_sizes(self) -> list[int]:
        """Bytes of each sealed layer."""
        return [size + SEAL for size in self.sizes]

    @property
    def locked_sizes(self) -> list[int]:
        """Bytes of each layer on a board."""
        return [size + TAG for size in self.sealed_sizes]


@dataclass(frozen=True)
class CryptoHello:
    """The message with which a site opens an attempt."""

    session: CryptoSession
    name: str
    model_index: int
    terms: bytes
    fresh: bytes
    """X25519 public key for this attempt only."""
    board: bytes
    """Hash of the site's board."""
    signature: bytes = b""

    @property
    def participant(self) -> str:
        """Name of the participant: its site and model index. No site's name contains a #."""
        return f"{self.name}#{self.model_index}"

    def body(self) -> bytes:
        return crypto_frame(self.session.encode(), self.name, self.model_index, self.terms, self.fresh, self.board)

    def signed(self, identity: Identity) -> "CryptoHello":
        return replace(self, signature=identity.sign(PURPOSE, self.body()))

    def encode(self) -> bytes:
        return crypto_frame(self.body(), self.signature)

    @classmethod
    def decode(cls, data: bytes) -> "CryptoHello":
        """Decode a hello. Trust nothing in it before `check`."""
        body, signature = _unframe_crypto_parts(data, 2)
        session, name, model_index, terms, fresh, board = _unframe_crypto_parts(body, 6)
        run, round, attempt = _unframe_crypto_parts(session, 3)
        try:
            opened = CryptoSession(run.decode(), int(round), int(attempt))
            hello = cls(opened, name.decode(), int(model_index), terms, fresh, board, signature)
        except ValueError:
            raise CryptoRejected("a hello is malformed.") from None
        if hello.body() != body or (len(terms), len(fresh), len(board)) != (32, 32, 32):
            raise CryptoRejected("a hello is malformed.")
        return hello

    def check(self, site_keys: SiteKeys, session: CryptoSession, terms: bytes) -> None:
        """Refuse a hello that its site did not sign, or signed for another exchange."""
        if self.name not in site_keys.keys:
            raise CryptoRejected(f"{self.name!r} takes part, but this site's roster has no such site.")
        if not site_keys.signed(self.name, PURPOSE, self.body(), self.signature):
            raise CryptoRejected(f"the hello of {self.name} is not signed by its key: somebody may have replaced it.")
        if self.session != session:
            raise CryptoRejected(f"the hello of {self.name} is for another exchange: {self.session}, not {session}.")
        if self.terms != terms:
            raise CryptoRejected(f"{self.name} exchanges on other terms: its model or its options differ.")


def hash_hello_transcript(hellos: Sequence[CryptoHello]) -> bytes:
    """Return the hash of all hellos with their signatures."""
    return hashlib.sha256(crypto_frame(*(hello.encode() for hello in hellos))).digest()


class EncryptedChannel:
    """One site's end of an encrypted channel to another site, in one attempt."""

    def __init__(self, private: X25519PrivateKey, mine: CryptoHello, theirs: CryptoHello, transcript: bytes) -> None:
        try:
            shared = private.exchange(X25519PublicKey.from_public_bytes(theirs.fresh))
        except ValueError:  # a point of small order: everybody would know the secret
            raise CryptoRejected(f"the fresh key of {theirs.name} is invalid.") from None
        self.mine, self.theirs = mine, theirs
        self._out = ChaCha20Poly1305(self._key(shared, transcript, mine, theirs))
        self._in = ChaCha20Poly1305(self._key(shared, transcript, theirs, mine))

    @staticmethod
    def _key(shared: bytes, transcript: bytes, sender: CryptoHello, receiver: CryptoHello) -> bytes:
        about = crypto_frame(
            CHANNEL, sender.session.encode(), sender.participant, receiver.participant, sender.fresh, receiver.fresh
        )
        return HKDF(SHA256(), length=KEY, salt=transcript, info=about).derive(shared)

    def seal(self, exchange: int, stage: str, text: bytes) -> bytes:
        """Encrypt for the other site. Call it once per stage: two texts under one number would reveal both."""
        return self._out.encrypt(_number(exchange, stage), text, _place(self.mine, self.theirs, exchange, stage))

    def open(self, exchange: int, stage: str, sealed: bytes, size: int) -> bytes:
        """Decrypt a text of `size` bytes from the other site."""
        try:
            text = self._in.decrypt(_number(exchange, stage), sealed, _place(self.theirs, self.mine, exchange, stage))
        except InvalidTag:
            raise CryptoRejected(
                f"the {stage} of {self.theirs.participant} is not what it sent to {self.mine.participant} in "
                f"{self.mine.session}: it was changed, moved or replayed on the way."
            ) from None
        if len(text) != size:
            raise CryptoRejected(f"the {stage} of {self.theirs.participant} has {len(text)} bytes, not {size}.")
        return text


def _number(exchange: int, stage: str) -> bytes:
    return (exchange * len(STAGES) + STAGES.index(stage)).to_bytes(12, "big")


def _place(sender: CryptoHello, receiver: CryptoHello, exchange: int, stage: str) -> bytes:
    return crypto_frame(
        "from site to site", sender.session.encode(), exchange, stage, sender.participant, receiver.participant
    )


@dataclass(frozen=True)
class CryptoLayerBoard:
    """All layers of one site, locked, and their keys."""

    content: bytes
    keys: list[bytes]

    @classmethod
    def of(
        cls, layers: Sequence[bytes], public_key: bytes, session: CryptoSession, participant: str
    ) -> "CryptoLayerBoard":
        """Seal and lock the layers of a participant. `public_key` is the server's."""
        public, keys, parts = X25519PublicKey.from_public_bytes(public_key), [], []
        for number, layer in enumerate(layers):
            key = secrets.token_bytes(KEY)
            sealed = _SUITE.encrypt(layer, public, _layer(session, number))
            parts.append(ChaCha20Poly1305(key).encrypt(_ONCE, sealed, _owned(session, participant, number)))
            keys.append(key)
        return cls(b"".join(parts), keys)

    @staticmethod
    def take(
        content: bytes, number: int, key: bytes, terms: CryptoTerms, session: CryptoSession, participant: str
    ) -> bytes:
        """Return one layer of the participant's board, still sealed."""
        try:
            locked = split_crypto_parts(content, terms.locked_sizes, f"the board of {participant}")[number]
            return ChaCha20Poly1305(key).decrypt(_ONCE, locked, _owned(session, participant, number))
        except InvalidTag:
            raise CryptoRejected(f"the key that was passed on does not open layer {number} of {participant}.") from None


def split_crypto_parts(content: bytes, sizes: Sequence[int], label: str) -> list[bytes]:
    """Split content into consecutive parts of these sizes."""
    ends = list(accumulate(sizes, initial=0))
    if len(content) != ends[-1]:
        raise CryptoRejected(f"{label} has {len(content)} bytes, not {ends[-1]}.")
    return [content[start:end] for start, end in pairwise(ends)]


def crypto_digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def encrypt_model(key: bytes, model: bytes, session: CryptoSession, exchange: int, participant: str) -> bytes:
    """Lock a recombined model until all participants have agreed to release theirs."""
    return ChaCha20Poly1305(key).encrypt(_ONCE, model, _upload(session, exchange, participant))


def decrypt_model(key: bytes, encrypted: bytes, session: CryptoSession, exchange: int, participant: str) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(_ONCE, encrypted, _upload(session, exchange, participant))
    except (InvalidTag, ValueError):  # a key of another length
        raise CryptoRejected(f"the model of {participant} does not open with the key that was released.") from None


class LayerKeyPair:
    """The server's key pair, for which layers are sealed; made for one round and then forgotten."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def open(self, sealed: bytes, session: CryptoSession, number: int) -> bytes:
        try:
            return _SUITE.decrypt(sealed, self._private, _layer(session, number))
        except (InvalidTag, ValueError):
            raise CryptoRejected(f"layer {number} is not sealed for this key, this round and this place.") from None


def _layer(session: CryptoSession, number: int) -> bytes:
    """Return what a layer's seal is bound to: not its owner, whom the server must not learn."""
    return crypto_frame("a layer", session.encode(), number)


def _owned(session: CryptoSession, participant: str, number: int) -> bytes:
    return crypto_frame("a layer on a board", session.encode(), participant, number)


def _upload(session: CryptoSession, exchange: int, participant: str) -> bytes:
    return crypto_frame("a recombined model", session.encode(), exchange, participant)
