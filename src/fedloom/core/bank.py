"""A store of rows that grows as it is used: in memory, or in a file where memory cannot hold them all.

Banks: many rows side by side, in memory or in memory shared with worker processes.
"""

import ctypes
import mmap
import os
import uuid
import weakref
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedloom.errors import FedloomError, InputError


class RowStore:
    """Rows by number. `put` copies a row in, `read` gives it back, `drop` says that it is no longer wanted.

    Its state can be saved and restored. Rows in a file are not part of a checkpoint, only where they lie; so a row that
    was dropped is not written over while a kept checkpoint may still name it. Rows are read, and without a folder
    kept, on `device`.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        folder: Path | None = None,
        keep: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        if folder is not None:
            _refuse_unusable(folder)
        self.width = width
        self.dtype = dtype
        self.device = torch.device(device)
        self._folder = folder
        self._keep = keep
        self._rows: dict[int, Tensor] = {}
        self._free: list[int] = []
        self._dropped: list[list[int]] = [[]]
        self._next = 0
        self._token = uuid.uuid4().hex if folder is not None else ""
        self._handle: int | None = None

    @property
    def path(self) -> Path | None:
        """The file, where there is one."""
        return self._folder / f"rows-{self._token}.bin" if self._folder is not None else None

    def put(self, row: Tensor) -> int:
        """Copy a row in; returns its number."""
        number = self._free.pop() if self._free else self._next
        self._next = max(self._next, number + 1)
        if self._folder is None:
            self._rows[number] = row.detach().to(self.device, copy=True)
        else:
            self._write(number, row)
        return number

    def read(self, number: int) -> Tensor:
        """The row; in memory the row itself, so do not change it."""
        if self._folder is None:
            return self._rows[number]
        size = self.width * self.dtype.itemsize
        content = bytearray(os.pread(self._file(), size, number * size))
        if len(content) != size:
            raise InputError(f"{self.path} ends before row {number}: it is not whole.")
        return torch.frombuffer(content, dtype=self.dtype).to(self.device)

    def drop(self, number: int) -> None:
        """The row is no longer wanted."""
        if self._folder is None:
            del self._rows[number]
            self._free.append(number)
        else:
            self._dropped[-1].append(number)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold: the rows, or the name of the file that has them, brought to the disk."""
        if self._folder is None:
            return {"rows": dict(self._rows), "next": self._next, "free": list(self._free)}
        os.fsync(self._file())
        self._dropped.append([])
        if len(self._dropped) > self._keep + 1:
            self._free += self._dropped.pop(0)
        return {"token": self._token, "next": self._next, "free": list(self._free), "dropped": self._dropped}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        self._next, self._free = state["next"], list(state["free"])
        if self._folder is None:
            self._rows = {number: row.to(self.device, copy=True) for number, row in state["rows"].items()}
            return
        self.close()
        self._token = state["token"]
        if self.path is not None and not self.path.exists():
            raise InputError(f"the cached rows of this run are not there: {self.path} is missing.")
        # What was dropped stays untouched for as long as the checkpoints before this one may be needed.
        self._dropped = [*(list(numbers) for numbers in state["dropped"])]

    def close(self) -> None:
        """Give the file back; it stays on the disk."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _file(self) -> int:
        if self._handle is None:
            assert self.path is not None, "only stores with a folder have a file"
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise InputError(f"cannot keep rows at {self.path}: {error.strerror}.") from error
        return self._handle

    def _write(self, number: int, row: Tensor) -> None:
        content = row.detach().cpu().contiguous().view(torch.uint8).numpy().data
        offset, written = number * self.width * self.dtype.itemsize, 0
        try:
            while written < len(content):
                written += os.pwrite(self._file(), content[written:], offset + written)
        except OSError as error:
            raise FedloomError(f"cannot write {self.path}: {error.strerror}.") from error


def _refuse_unusable(folder: Path) -> None:
    """Say now, before the run has a folder, that no rows could be written; nothing is made here."""
    try:
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    except OSError as error:
        raise InputError(f"cannot keep rows in {folder}: {error.strerror}.") from error
    if not there.is_dir():
        raise InputError(f"cannot keep rows in {folder}: {there} is not a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"cannot keep rows in {folder}: {there} is not writable.")


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
        stride = aligned_row_stride(width, flat.dtype)
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
        flat = torch.zeros(count * aligned_row_stride(width, dtype), dtype=dtype, device=device)
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


def tensor_at_address(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor that another process located: valid here because this process was forked from that one."""
    count = prod(shape)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def aligned_row_stride(width: int, dtype: torch.dtype) -> int:
    """Elements from one row of a bank to the next."""
    per_line = ALIGN // dtype.itemsize
    return -(-width // per_line) * per_line


def _room(count: int, width: int, dtype: torch.dtype) -> int:
    """Bytes to map; some even for no rows, because nothing cannot be mapped."""
    return max(count * aligned_row_stride(width, dtype) * dtype.itemsize, ALIGN)


def _over(mapping: mmap.mmap, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(mapping, dtype=dtype, count=len(mapping) // dtype.itemsize)
