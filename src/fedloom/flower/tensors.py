"""Convert tensors to message arrays and back, and select the columns to send."""

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
    """Return a copy of a tensor's numbers as a message array."""
    if sys.byteorder != "little":
        raise FedloomError("fedloom sends numbers as little-endian bytes, but this machine is big-endian.")
    if tensor.dtype not in NAMES:
        raise FedloomError(f"tensors of type {tensor.dtype} cannot be sent.")
    flat = tensor.detach().cpu().contiguous().view(-1)
    return MessageArray(NAMES[tensor.dtype], tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes())


def decode_tensor_into(target: Tensor, array: MessageArray, label: str) -> Tensor:
    """Copy a received array into a contiguous CPU tensor; reject any other type or shape than the tensor's."""
    expected = NAMES[target.dtype], tuple(target.shape)
    if (array.dtype, array.shape) != expected:
        came, wanted = (f"{dtype} of shape {shape}" for dtype, shape in ((array.dtype, array.shape), expected))
        raise MessageRejected(f"{label} is {came}, not {wanted}")
    if target.numel():
        target.view(-1).view(torch.uint8).numpy().data.cast("B")[:] = array.data
    return target


def decode_tensor(array: MessageArray, dtype: torch.dtype, shape: tuple[int, ...], label: str) -> Tensor:
    """Return a received array as a tensor; reject any other type or shape."""
    return decode_tensor_into(torch.empty(shape, dtype=dtype), array, label)


def encode_tensor_columns(row: Tensor, columns: Sequence[slice]) -> bytes:
    """Return the bytes of these columns of a model, such as one layer."""
    return b"".join(row[part].contiguous().view(torch.uint8).numpy().tobytes() for part in columns)


def decode_tensor_columns(row: Tensor, columns: Sequence[slice], content: bytes) -> None:
    """Write the bytes of these columns into a model."""
    start = 0
    for part in columns:
        size = (part.stop - part.start) * row.element_size()
        row[part] = torch.frombuffer(bytearray(content[start : start + size]), dtype=row.dtype)
        start += size


class ModelTensorCodec:
    """Encodes and decodes the columns of a model that are sent: all but the personal ones."""

    def __init__(self, layout: Layout, personal_columns: Sequence[slice]) -> None:
        self.layout = layout
        self.columns: list[slice] = []
        start = 0
        for personal in sorted(personal_columns, key=lambda columns: columns.start):
            if personal.start > start:
                self.columns.append(slice(start, personal.start))
            start = max(start, personal.stop)
        if start < layout.size:
            self.columns.append(slice(start, layout.size))
        self.size = sum(part.stop - part.start for part in self.columns)

    def encode(self, row: Tensor) -> MessageArray:
        """Return the columns of `row` that are sent."""
        if self.size == self.layout.size:
            return encode_tensor(row)
        return encode_tensor(torch.cat([row[part] for part in self.columns]) if self.columns else row[:0])

    def decode(self, array: MessageArray, row: Tensor, label: str = "its model") -> Tensor:
        """Write the received columns to `row`; the others do not change."""
        if self.size == self.layout.size:
            return decode_tensor_into(row, array, label)
        came = decode_tensor(array, self.layout.dtype, (self.size,), label)
        scatter_columns(row, self.columns, came)
        return row


def split_tensors_by_layer(layers: Sequence[Sequence[slice]], codec: ModelTensorCodec) -> list[list[slice]]:
    """Return the columns of each layer that are sent."""
    pairs = [
        [(max(a.start, b.start), min(a.stop, b.stop)) for a in columns for b in codec.columns] for columns in layers
    ]
    return [[slice(start, stop) for start, stop in layer if start < stop] for layer in pairs]
