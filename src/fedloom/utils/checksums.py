"""SHA-256 checksums inside safetensors files.

A checksum covers every byte of its file except itself, so each flipped bit is found. It is the first entry of the
metadata.
"""

import hashlib
from collections.abc import Iterable

KEY = "sha256"
_DIGITS = 64
_SAFETENSORS_START = b'{"__metadata__":{"' + KEY.encode() + b'":"'
_HEADER = 8
"""Bytes of the length of the header, with which a safetensors file begins."""


def safetensors_checksum(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the checksum of a safetensors file whose first piece, the header, has zeros in its place."""
    digest = hashlib.sha256()
    for number, piece in enumerate(pieces):
        digest.update(piece if number else _without_checksum(bytes(piece)))
    return digest.hexdigest()


def has_safetensors_checksum(content: bytes) -> bool:
    """Return whether a safetensors file holds a checksum, valid or not."""
    return content[_HEADER : _HEADER + len(_SAFETENSORS_START)] == _SAFETENSORS_START


def has_valid_safetensors_checksum(content: bytes) -> bool:
    """Return whether a safetensors file holds the checksum of its content."""
    start = _HEADER + len(_SAFETENSORS_START)
    view = memoryview(content)
    digest = hashlib.sha256(view[:start])
    digest.update(view[start + _DIGITS :])
    return (
        content[start - len(_SAFETENSORS_START) : start + _DIGITS] == _SAFETENSORS_START + digest.hexdigest().encode()
    )


def _without_checksum(header: bytes) -> bytes:
    start = _HEADER + len(_SAFETENSORS_START)
    return header[:start] + header[start + _DIGITS :]
