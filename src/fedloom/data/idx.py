"""MNIST's file format: a magic number, the dimensions, then bytes; plain or compressed by gzip."""

import gzip
import struct
import zlib
from hashlib import sha256
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.samples import Samples
from fedloom.errors import InputError

CHUNK = 1 << 20


def read_idx(path: Path, item: tuple[int, ...]) -> NDArray[np.uint8]:
    """The array of unsigned bytes in `path`, whose items must have the shape `item`."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return _read(stream, path, item)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}.") from None


def _read(stream: gzip.GzipFile | BufferedReader, path: Path, item: tuple[int, ...]) -> NDArray[np.uint8]:
    rank = 1 + len(item)
    head = stream.read(4 + 4 * rank)
    if len(head) < 4 + 4 * rank:
        raise InputError(f"{path} is truncated: {len(head)} bytes found, {4 + 4 * rank} expected in its header.")
    magic, count, *shape = struct.unpack(f">{1 + rank}I", head)
    if magic != 0x0800 + rank:  # 8: unsigned bytes
        raise InputError(f"{path} starts with the magic number {magic:#x}; expected {0x0800 + rank:#x}.")
    if tuple(shape) != item:
        raise InputError(f"{path} holds items of shape {tuple(shape)}; expected {item}.")
    size = count * int(np.prod(item, dtype=np.int64))
    # By chunks, so that what is allocated follows what is there and not what the header claims.
    content = bytearray()
    while len(content) <= size and (chunk := stream.read(min(CHUNK, size + 1 - len(content)))):
        content += chunk
    if len(content) != size:
        state = "truncated: " if len(content) < size else "too long: at least "
        raise InputError(f"{path} is {state}{len(content)} bytes found after its header, {size} expected.")
    return np.frombuffer(content, dtype=np.uint8).reshape(count, *item)


def find_idx(folder: Path, name: str) -> Path | None:
    """The file `name` of `folder`, plain or with .gz."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_pair(images: Path, labels: Path, classes: int, official: dict[str, tuple[int, str]]) -> Samples:
    """Images of 28 x 28 and their labels, checked against each other.

    `official` gives each published file's count and the SHA-256 of it uncompressed; a file of that count
    must be that file, so that nothing measured on it was measured on something else.
    """
    x, y = read_idx(images, (28, 28)), read_idx(labels, ())
    if len(x) != len(y):
        raise InputError(f"{images} holds {len(x)} images but {labels} holds {len(y)} labels.")
    if len(y) == 0:
        raise InputError(f"{images} holds no images.")
    if y.max() >= classes:
        raise InputError(f"{labels} holds the label {y.max()}; expected labels from 0 to {classes - 1}.")
    for path, values in ((images, x), (labels, y)):
        count, digest = official[path.name.removesuffix(".gz")]
        if len(values) == count and _digest(values) != digest:
            raise InputError(f"{path} has {count} items but is not the published file: its SHA-256 differs.")
    return Samples(torch.from_numpy(x).unsqueeze(-1), torch.from_numpy(y).long())


def _digest(values: NDArray[np.uint8]) -> str:
    """The SHA-256 of the plain file that holds `values`."""
    content = sha256(struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape))
    content.update(values.data)
    return content.hexdigest()
