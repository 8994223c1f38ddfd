"""Site identities: a key pair per site, and rosters of public keys.

A site's key is the one that its SuperNode shows to the SuperLink (ECDSA on a NIST curve, in OpenSSH's format). Here it
signs the messages that a site sends to other sites through the server. A site trusts the keys in its own roster, a file
with one OpenSSH public key and the site's name per line, as in `nodes/NAME.pub`:

    ecdsa-sha2-nistp384 AAAA... site-0

The roster comes from the sites' operators and never from the server: a server that could name the sites could put
itself between them.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedloom.errors import InputError, shorten_error_message

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Pattern of a site's name, which becomes a file name."""

SIGNATURE = ec.ECDSA(hashes.SHA384())


def check_identity_name(name: str) -> str:
    """Return the name if a site may have it."""
    if not NAME.fullmatch(name):
        raise InputError(f"{name!r} cannot name a site; use at most 63 letters, digits, '.', '_' and '-'.")
    return name


@dataclass(frozen=True)
class Identity:
    """A site's private key."""

    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls) -> "Identity":
        return cls(ec.generate_private_key(ec.SECP384R1()))

    @classmethod
    def read(cls, path: Path) -> "Identity":
        """Read an OpenSSH private key file without a passphrase, as SuperNodes use them."""
        try:
            key = load_ssh_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise InputError(f"cannot read the private key {path}: {error.strerror or error}.") from error
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InputError(
                f"{path} is not an OpenSSH private key without a passphrase: {shorten_error_message(error)}."
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise InputError(f"the private key {path} is not an ECDSA key; `ssh-keygen -t ecdsa -b 384` makes one.")
        return cls(key)

    def private_bytes(self) -> bytes:
        """Return the key as a file for `read`."""
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())

    def public_line(self, name: str) -> str:
        """Return the public key as a line of a roster."""
        return f"{_public_text(self.key.public_key())} {check_identity_name(name)}\n"

    def sign(self, purpose: str, message: bytes) -> bytes:
        """Sign a message for this purpose only, because the same key signs other things elsewhere."""
        return self.key.sign(_bound(purpose, message), SIGNATURE)


@dataclass(frozen=True)
class SiteKeys:
    """The public keys of the sites that this site trusts, by name."""

    keys: Mapping[str, ec.EllipticCurvePublicKey]

    @classmethod
    def read(cls, path: Path) -> "SiteKeys":
        try:
            text = path.read_text(encoding="ascii")
        except OSError as error:
            raise InputError(f"cannot read the roster {path}: {error.strerror or error}.") from error
        except UnicodeDecodeError:
            raise InputError(f"the roster {path} is not a file of OpenSSH public keys.") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str = "the roster") -> "SiteKeys":
        keys: dict[str, ec.EllipticCurvePublicKey] = {}
        seen: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            place = f"line {number} of {source}"
            words = line.split()
            if len(words) != 3:
                raise InputError(f"{place} must hold a key type, a key and a site's name, not {line.strip()[:60]!r}.")
            name = check_identity_name(words[2])
            try:
                key = load_ssh_public_key(" ".join(words[:2]).encode())
            except (ValueError, UnsupportedAlgorithm) as error:
                raise InputError(f"{place} holds no public key: {shorten_error_message(error)}.") from error
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise InputError(f"{place} holds a key that is not ECDSA ({words[0]}).")
            if name in keys:
                raise InputError(f"{place} names {name} for the second time.")
            if (owner := seen.setdefault(_public_text(key), name)) != name:
                raise InputError(f"{place} gives {name} the key of {owner}.")
            keys[name] = key
        if not keys:
            raise InputError(f"{source} names no site.")
        return cls(keys)

    def name_of(self, identity: Identity) -> str:
        """Return the name of the owner of this private key."""
        mine = _public_text(identity.key.public_key())
        for name, key in self.keys.items():
            if _public_text(key) == mine:
                return name
        raise InputError(f"the roster ({', '.join(sorted(self.keys))}) does not have this site's own public key.")

    def signed(self, name: str, purpose: str, message: bytes, signature: bytes) -> bool:
        """Return whether this site signed the message for this purpose; False if the site is unknown."""
        key = self.keys.get(name)
        if key is None:
            return False
        try:
            key.verify(signature, _bound(purpose, message), SIGNATURE)
        except InvalidSignature:
            return False
        return True


def _public_text(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")


def _bound(purpose: str, message: bytes) -> bytes:
    """Return the bytes to sign. The message is hashed, so the purpose cannot run into it."""
    return b"fedloom:" + purpose.encode() + b":" + hashlib.sha384(message).digest()
