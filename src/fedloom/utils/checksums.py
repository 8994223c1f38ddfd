"""SHA-256 checksums inside files: of JSON, of lines of JSON, and of safetensors.

A checksum covers every byte of its file or line except itself, so each flipped bit is found. In JSON it is the last
key, `sha256`. In safetensors it is the first entry of the metadata.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

KEY = "sha256"
_TAIL = f', "{KEY}": "'.encode()
_END = b'"}'
_DIGITS = 64
_SAFETENSORS_START = b'{"__metadata__":{"' + KEY.encode() + b'":"'
_HEADER = 8
"""Bytes of the length of the header, with which a safetensors file begins."""


def add_json_checksum(values: Mapping[str, Any], previous: str = "") -> tuple[bytes, str]:
    """Return values as one line of JSON with a checksum, and the checksum.

    `previous` is the checksum of the line before it, which the new one covers too: a missing line is found.
    """
    body = json.dumps(dict(values))[:-1].encode()
    digest = hashlib.sha256(previous.encode() + body).hexdigest()
    return body + _TAIL + digest.encode() + _END, digest


def check_json_checksum(line: bytes, previous: str = "") -> tuple[dict[str, Any], str]:
    """Return the values and the checksum of a line from `add_json_checksum`. Raise a ValueError if it was changed."""
    start = len(line) - len(_END) - _DIGITS
    body, digest = line[: max(start - len(_TAIL), 0)], line[max(start, 0) : start + _DIGITS]
    found = hashlib.sha256(previous.encode() + body).hexdigest()
    if line != body + _TAIL + found.encode() + _END or digest != found.encode():
        raise ValueError("its checksum is not the one that was stored when it was written")
    values: dict[str, Any] = json.loads(line)
    del values[KEY]
    return values, found


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
