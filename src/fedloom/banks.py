"""Banks: many rows side by side, in memory or in memory shared with worker processes."""

import ctypes
import mmap
import weakref
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

ALIGN = 64
"""Bytes. Every row starts on such a boundary: kernels may take another path on other addresses and round
differently, and one model trained in two slots must give the same bits."""


class Bank:
    """`count` rows of `width` elements. `rows` is the matrix; a row is `bank.rows[i]`.

    Shared banks lie at the same address in every process forked after they were made, so a row in them can be
    handed to a worker by its place (`locate`) instead of by its content.
    """

    _mapped: ClassVar["weakref.WeakValueDictionary[int, Bank]"] = weakref.WeakValueDictionary()
    _made = 0

    def __init__(self, flat: Tensor, count: int, width: int, *, mapped: bool) -> None:
        stride = stride_of(width, flat.dtype)
        self.rows = flat[: count * stride].view(count, stride)[:, :width]
        self.mapped = mapped
        self._start = flat.data_ptr()
        self._end = self._start + flat.numel() * flat.dtype.itemsize
        if mapped:
            Bank._made += 1
            Bank._mapped[Bank._made] = self

    @classmethod
    def memory(
        cls, count: int, width: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "Bank":
        """Rows of zeros in ordinary memory, or on a GPU."""
        flat = torch.zeros(count * stride_of(width, dtype), dtype=dtype, device=device)
        return cls(flat, count, width, mapped=False)

    @classmethod
    def shared(cls, count: int, width: int, dtype: torch.dtype = torch.float32) -> "Bank":
        """Rows of zeros that processes forked later see and may write.

        The memory has no name, so nothing is left behind when the processes die, however they die, and the small
        /dev/shm of a container does not limit it. Pages are taken only when first written.
        """
        nbytes = _room(count, width, dtype)
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        return cls(_over(mmap.mmap(-1, nbytes, flags=flags), dtype), count, width, mapped=True)

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def made(cls) -> int:
        """How many mapped banks there have been: a process forked now knows these and no later ones."""
        return cls._made

    @classmethod
    def locate(cls, tensor: Tensor, made: int) -> int | None:
        """The address of `tensor` if it lies whole in one of the first `made` mapped banks, else None."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.dtype.itemsize
        for serial, bank in list(cls._mapped.items()):
            if serial <= made and bank._start <= start and end <= bank._end:
                return start
        return None


def at_address(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor that another process located: valid here because this process was forked from that one."""
    count = prod(shape)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def stride_of(width: int, dtype: torch.dtype) -> int:
    """Elements from one row of a bank to the next."""
    per_line = ALIGN // dtype.itemsize
    return -(-width // per_line) * per_line


def _room(count: int, width: int, dtype: torch.dtype) -> int:
    """Bytes to map; some even for no rows, because nothing cannot be mapped."""
    return max(count * stride_of(width, dtype) * dtype.itemsize, ALIGN)


def _over(mapping: mmap.mmap, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(mapping, dtype=dtype, count=len(mapping) // dtype.itemsize)
