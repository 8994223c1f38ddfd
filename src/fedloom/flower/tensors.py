"""Tensors as blocks and back, and which columns of a model travel."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core.layout import Layout, scatter_columns
from fedloom.errors import FedloomError
from fedloom.flower.message import SIZES, MessageArray, MessageRejected

TYPES = {name: getattr(torch, name) for name in SIZES}
NAMES = {dtype: name for name, dtype in TYPES.items()}


def encode_tensor(tensor: Tensor) -> MessageArray:
    """A tensor's numbers, copied."""
    if sys.byteorder != "little":
        raise FedloomError("numbers travel as little-endian bytes, which this machine does not use.")
    if tensor.dtype not in NAMES:
        raise FedloomError(f"tensors of type {tensor.dtype} cannot be sent.")
    flat = tensor.detach().cpu().contiguous().view(-1)
    return MessageArray(NAMES[tensor.dtype], tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes())


def decode_tensor_into(target: Tensor, block: MessageArray, what: str) -> Tensor:
    """Put what came into a contiguous CPU tensor of the type and shape that was expected; else it is refused."""
    expected = NAMES[target.dtype], tuple(target.shape)
    if (block.dtype, block.shape) != expected:
        came, wanted = (f"{dtype} of shape {shape}" for dtype, shape in ((block.dtype, block.shape), expected))
        raise MessageRejected(f"{what} is {came}, not {wanted}")
    if target.numel():
        target.view(-1).view(torch.uint8).numpy().data.cast("B")[:] = block.data
    return target


def decode_tensor(block: MessageArray, dtype: torch.dtype, shape: tuple[int, ...], what: str) -> Tensor:
    """The tensor of this type and shape that came; another is refused."""
    return decode_tensor_into(torch.empty(shape, dtype=dtype), block, what)


def encode_tensor_columns(row: Tensor, columns: Sequence[slice]) -> bytes:
    """One layer of a model, as bytes."""
    return b"".join(row[part].contiguous().view(torch.uint8).numpy().tobytes() for part in columns)


def decode_tensor_columns(row: Tensor, columns: Sequence[slice], layer: bytes) -> None:
    """Write one layer, as bytes, into a model."""
    start = 0
    for part in columns:
        size = (part.stop - part.start) * row.element_size()
        row[part] = torch.frombuffer(bytearray(layer[start : start + size]), dtype=row.dtype)
        start += size


class ModelTensorCodec:
    """Which part of a model travels: all columns but those that stay with the clients."""

    def __init__(self, layout: Layout, stays_home: Sequence[slice]) -> None:
        self.layout = layout
        self.columns: list[slice] = []
        start = 0
        for stays in sorted(stays_home, key=lambda columns: columns.start):
            if stays.start > start:
                self.columns.append(slice(start, stays.start))
            start = max(start, stays.stop)
        if start < layout.size:
            self.columns.append(slice(start, layout.size))
        self.size = sum(part.stop - part.start for part in self.columns)

    def pack(self, row: Tensor) -> MessageArray:
        """The columns of `row` that travel."""
        if self.size == self.layout.size:
            return encode_tensor(row)
        return encode_tensor(torch.cat([row[part] for part in self.columns]) if self.columns else row[:0])

    def unpack(self, block: MessageArray, row: Tensor, what: str = "its model") -> Tensor:
        """Put the columns that came into `row`; the others are left as they are."""
        if self.size == self.layout.size:
            return decode_tensor_into(row, block, what)
        came = decode_tensor(block, self.layout.dtype, (self.size,), what)
        scatter_columns(row, self.columns, came)
        return row


def tensor_columns_by_layer(layers: Sequence[Sequence[slice]], travel: ModelTensorCodec) -> list[list[slice]]:
    """The columns of each layer that travel."""
    pairs = [
        [(max(a.start, b.start), min(a.stop, b.stop)) for a in columns for b in travel.columns] for columns in layers
    ]
    return [[slice(start, stop) for start, stop in layer if start < stop] for layer in pairs]
