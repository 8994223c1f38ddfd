"""`SiteMessage`, the messages between server and sites.

A message has a kind, a small header and named arrays.

Arrays are raw little-endian bytes with a type and a shape. Nothing is ever unpickled, and received messages are checked
before use. This file imports neither torch nor Flower, because the short-lived process that forwards a message from
Flower needs neither.
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
"""Types that an array may have, and the bytes of one number."""

MOST_HEADER = 64 << 10
"""Most bytes of a header as JSON."""
MOST_BLOCKS = 4096
"""Most arrays in one message."""
MOST_BYTES = 8 << 30
"""Most bytes of the arrays in one message."""

ADDRESS = ("run", "round", "client_id", "nonce")
"""Header fields that every request has and every reply repeats."""

_MAGIC = b"FLM1"
_LENGTHS = struct.Struct("<4sIQ")


class MessageRejected(FedloomError):
    """A received message is not as expected; the text says why."""


class MessageRejectedPermanently(MessageRejected):
    """The receiver will reject this request every time."""


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
            raise MessageRejected(f"an array has the invalid shape {self.shape!r}")
        expected = math.prod(self.shape) * SIZES[self.dtype]
        if len(self.data) != expected:
            raise MessageRejected(f"an array must have {expected} bytes, but has {len(self.data)}")

    @staticmethod
    def raw(data: bytes | memoryview) -> "MessageArray":
        """Return an array of bytes that are not numbers, such as encrypted data."""
        return MessageArray("uint8", (len(data),), data)

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class SiteMessage:
    """A request to a site, or its reply."""

    kind: str
    header: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, MessageArray] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def reply(
        self, kind: str, header: Mapping[str, Any] | None = None, arrays: Mapping[str, MessageArray] | None = None
    ) -> "SiteMessage":
        """Return a reply, which repeats the request's `ADDRESS` fields."""
        address = {key: self.header[key] for key in ADDRESS if key in self.header}
        return SiteMessage(kind, {**(header or {}), **address}, arrays or {})


def make_failure_message(request: SiteMessage, reason: str, *, permanent: bool = False) -> SiteMessage:
    """Return a reply that gives the reason of a failure; `permanent` if the request will always fail."""
    return request.reply("failed", {"reason": reason[:300], **({"permanent": True} if permanent else {})})


def encode_message_header(header: Mapping[str, Any]) -> str:
    """Return a header as JSON; raise an error if it is too long."""
    text = json.dumps(header, separators=(",", ":"))
    if len(text) > MOST_HEADER:
        raise MessageRejected(f"a header has {len(text)} bytes, more than {MOST_HEADER}")
    return text


def decode_message_header(text: str | bytes) -> dict[str, Any]:
    """Parse a received header."""
    if len(text) > MOST_HEADER:
        raise MessageRejected(f"a header has {len(text)} bytes, more than {MOST_HEADER}")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise MessageRejected("a header is not JSON") from None
    if not isinstance(header, dict):
        raise MessageRejected("a header is not a JSON object")
    return header


def encode_message(message: SiteMessage) -> bytes:
    """Return a message as bytes."""
    about = [[name, array.dtype, list(array.shape)] for name, array in message.arrays.items()]
    index = json.dumps([message.kind, encode_message_header(message.header), about], separators=(",", ":")).encode()
    start = _LENGTHS.pack(_MAGIC, len(index), message.nbytes)
    return b"".join([start, index, *(array.data for array in message.arrays.values())])


def decode_message(content: bytes | memoryview, max_bytes: int = MOST_BYTES) -> SiteMessage:
    """Parse the bytes of `encode_message`; the arrays are views of `content`."""
    index_size, size = _lengths(bytes(content[: _LENGTHS.size]), max_bytes)
    if len(content) != _LENGTHS.size + index_size + size:
        raise MessageRejected(f"a message must have {_LENGTHS.size + index_size + size} bytes, but has {len(content)}")
    view = memoryview(content)[_LENGTHS.size :]
    try:
        kind, header, about = json.loads(bytes(view[:index_size]))
        entries = [(str(name), str(dtype), tuple(shape)) for name, dtype, shape in about]
    except (ValueError, TypeError, RecursionError):
        raise MessageRejected("the index of a message is invalid") from None
    if not isinstance(kind, str) or not isinstance(header, str) or len(entries) > MOST_BLOCKS:
        raise MessageRejected("the index of a message is invalid")
    arrays, start = dict[str, MessageArray](), index_size
    for name, dtype, shape in entries:
        if not all(type(length) is int and length >= 0 for length in shape):
            raise MessageRejected(f"an array has the invalid shape {shape!r}")
        stop = start + math.prod(shape) * SIZES.get(dtype, 1)
        arrays[name] = MessageArray(dtype, shape, view[start:stop])
        start = stop
    if start != index_size + size or len(arrays) != len(entries):
        raise MessageRejected("the arrays of a message do not have its declared size")
    return SiteMessage(kind, decode_message_header(header), arrays)


def _lengths(start: bytes, max_bytes: int) -> tuple[int, int]:
    """Return the bytes of index and arrays, as the first bytes of a message declare them."""
    if len(start) != _LENGTHS.size or not start.startswith(_MAGIC):
        raise MessageRejected("these bytes are not a message of fedloom")
    _, index_size, size = _LENGTHS.unpack(start)
    if index_size > 1 << 20 or size > max_bytes:
        raise MessageRejected(f"a message has {size} bytes, more than {max_bytes}")
    return index_size, size


def write_message(connection: socket.socket, message: SiteMessage) -> None:
    """Write a message to a socket."""
    connection.sendall(encode_message(message))


def read_message(connection: socket.socket, max_bytes: int = MOST_BYTES) -> SiteMessage | None:
    """Read a message from a socket; return None if the other side has closed it."""
    start = _read(connection, _LENGTHS.size)
    if start is None:
        return None
    index_size, size = _lengths(bytes(start), max_bytes)
    rest = _read(connection, index_size + size)
    if rest is None:
        raise MessageRejected("a message was cut off")
    return decode_message(bytes(start) + rest, max_bytes)


def _read(connection: socket.socket, size: int) -> bytearray | None:
    """Read exactly `size` bytes; return None if there are none at all."""
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        count = connection.recv_into(view[done:])
        if not count:
            if not done:
                return None
            raise MessageRejected("a message was cut off")
        done += count
    return content
