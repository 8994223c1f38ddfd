"""What travels between server and sites: a kind, a small header and named arrays.

Arrays are raw little-endian bytes with a type and a shape. Nothing is ever unpickled, and what comes from outside is
measured before it is used. This file imports neither torch nor Flower: the short-lived process that takes a message
from Flower and hands it on needs neither.
"""

import json
import math
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedloom.errors import FedloomError

SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
"""The types of arrays that may travel, and the bytes of one number."""

MOST_HEADER = 64 << 10
"""Bytes of a header as JSON."""
MOST_BLOCKS = 4096
"""Arrays in one parcel."""
MOST_BYTES = 8 << 30
"""Bytes of one parcel, arrays and all."""

ADDRESS = ("run", "round", "client", "nonce")
"""What every question says of itself and every answer repeats."""

_MAGIC = b"FLM1"
_LENGTHS = struct.Struct("<4sIQ")


class MessageRejected(FedloomError):
    """What came from outside is not what was expected; the text says in what way."""


class MessageRejectedPermanently(MessageRejected):
    """However often a client is asked for this, it will not do it."""


@dataclass(frozen=True)
class MessageArray:
    """One array as raw little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        if self.dtype not in SIZES:
            raise MessageRejected(f"an array has the type {self.dtype!r}, not one of {', '.join(SIZES)}")
        if not all(type(size) is int and 0 <= size < 1 << 48 for size in self.shape) or len(self.shape) > 16:
            raise MessageRejected(f"an array has the shape {self.shape!r}")
        expected = math.prod(self.shape) * SIZES[self.dtype]
        if len(self.data) != expected:
            raise MessageRejected(f"an array of {expected} bytes came with {len(self.data)}")

    @staticmethod
    def raw(data: bytes | memoryview) -> "MessageArray":
        """Bytes that are nobody's numbers, such as something encrypted."""
        return MessageArray("uint8", (len(data),), data)

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class SiteMessage:
    """A question to a site, or its answer."""

    kind: str
    header: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, MessageArray] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(block.nbytes for block in self.blocks.values())

    def reply(
        self, kind: str, header: Mapping[str, Any] | None = None, blocks: Mapping[str, MessageArray] | None = None
    ) -> "SiteMessage":
        """An answer to this question: it repeats what the question says of itself."""
        address = {key: self.header[key] for key in ADDRESS if key in self.header}
        return SiteMessage(kind, {**(header or {}), **address}, blocks or {})


def make_failure_message(question: SiteMessage, reason: str, *, for_good: bool = False) -> SiteMessage:
    """The answer that there is none, and why; whether there never will be."""
    return question.reply("failed", {"reason": reason[:300], **({"for_good": True} if for_good else {})})


def encode_message_header(header: Mapping[str, Any]) -> str:
    """A header as JSON, not too long."""
    text = json.dumps(header, separators=(",", ":"))
    if len(text) > MOST_HEADER:
        raise MessageRejected(f"a header has {len(text)} bytes, more than {MOST_HEADER}")
    return text


def decode_message_header(text: str | bytes) -> dict[str, Any]:
    """A header that came from outside."""
    if len(text) > MOST_HEADER:
        raise MessageRejected(f"a header has {len(text)} bytes, more than {MOST_HEADER}")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise MessageRejected("a header is not JSON") from None
    if not isinstance(header, dict):
        raise MessageRejected("a header is no JSON object")
    return header


def encode_message(parcel: SiteMessage) -> bytes:
    """A parcel as bytes."""
    about = [[name, block.dtype, list(block.shape)] for name, block in parcel.blocks.items()]
    index = json.dumps([parcel.kind, encode_message_header(parcel.header), about], separators=(",", ":")).encode()
    start = _LENGTHS.pack(_MAGIC, len(index), parcel.nbytes)
    return b"".join([start, index, *(block.data for block in parcel.blocks.values())])


def decode_message(content: bytes | memoryview, most: int = MOST_BYTES) -> SiteMessage:
    """The parcel that `pack` made bytes of; its arrays are views of `content`."""
    index_size, size = _lengths(bytes(content[: _LENGTHS.size]), most)
    if len(content) != _LENGTHS.size + index_size + size:
        raise MessageRejected(f"a parcel of {_LENGTHS.size + index_size + size} bytes came with {len(content)}")
    view = memoryview(content)[_LENGTHS.size :]
    try:
        kind, header, about = json.loads(bytes(view[:index_size]))
        entries = [(str(name), str(dtype), tuple(shape)) for name, dtype, shape in about]
    except (ValueError, TypeError, RecursionError):
        raise MessageRejected("a parcel's index is not what was expected") from None
    if not isinstance(kind, str) or not isinstance(header, str) or len(entries) > MOST_BLOCKS:
        raise MessageRejected("a parcel's index is not what was expected")
    blocks, start = dict[str, MessageArray](), index_size
    for name, dtype, shape in entries:
        if not all(type(length) is int and length >= 0 for length in shape):
            raise MessageRejected(f"an array has the shape {shape!r}")
        stop = start + math.prod(shape) * SIZES.get(dtype, 1)
        blocks[name] = MessageArray(dtype, shape, view[start:stop])
        start = stop
    if start != index_size + size or len(blocks) != len(entries):
        raise MessageRejected("a parcel's arrays do not fill it")
    return SiteMessage(kind, decode_message_header(header), blocks)


def _lengths(start: bytes, most: int) -> tuple[int, int]:
    """The bytes of index and arrays that the first bytes of a parcel declare."""
    if len(start) != _LENGTHS.size or not start.startswith(_MAGIC):
        raise MessageRejected("these bytes are no parcel")
    _, index_size, size = _LENGTHS.unpack(start)
    if index_size > 1 << 20 or size > most:
        raise MessageRejected(f"a parcel has {size} bytes, more than {most}")
    return index_size, size


def write_message(connection: socket.socket, parcel: SiteMessage) -> None:
    """Write a parcel to a socket."""
    connection.sendall(encode_message(parcel))


def read_message(connection: socket.socket, most: int = MOST_BYTES) -> SiteMessage | None:
    """Read a parcel from a socket; None where the other side has ended."""
    start = _read(connection, _LENGTHS.size)
    if start is None:
        return None
    index_size, size = _lengths(bytes(start), most)
    rest = _read(connection, index_size + size)
    if rest is None:
        raise MessageRejected("a parcel was cut off")
    return decode_message(bytes(start) + rest, most)


def _read(connection: socket.socket, size: int) -> bytearray | None:
    """Exactly `size` bytes; None where there are none at all."""
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            if not done:
                return None
            raise MessageRejected("a parcel was cut off")
        done += count
    return content
