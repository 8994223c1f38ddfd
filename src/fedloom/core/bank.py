"""Memory for many models: `Bank` and `RowStore`.

`Bank` holds rows side by side. `RowStore` grows and can keep its rows in a file.

A bank lies in ordinary memory, on a GPU, or in memory that worker processes share.
"""

import ctypes
import hashlib
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
    """Store rows by number: `put` copies a row in, `read` returns it, `drop` releases it.

    With a folder, rows lie in a file, and a checkpoint holds only their numbers. So a dropped row is not overwritten
    while one of the last `keep_checkpoints` checkpoints may refer to it. A checkpoint also has the SHA-256 of each row,
    so a damaged row is found. Rows are read to `device`, and without a folder also kept there.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        folder: Path | None = None,
        keep_checkpoints: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        if folder is not None:
            _refuse_unusable(folder)
        self.width = width
        self.dtype = dtype
        self.device = torch.device(device)
        self._folder = folder
        self._keep_checkpoints = keep_checkpoints
        self._rows: dict[int, Tensor] = {}
        self._free: list[int] = []
        self._dropped: list[list[int]] = [[]]
        self._digests: dict[int, str] = {}
        """The SHA-256 of each row in the file."""
        self._next = 0
        self._token = uuid.uuid4().hex if folder is not None else ""
        self._handle: int | None = None

    @property
    def path(self) -> Path | None:
        """Return the path of the file, or None if rows are kept in memory."""
        return self._folder / f"rows-{self._token}.bin" if self._folder is not None else None

    def put(self, row: Tensor) -> int:
        """Copy a row in and return its number."""
        number = self._free.pop() if self._free else self._next
        self._next = max(self._next, number + 1)
        if self._folder is None:
            self._rows[number] = row.detach().to(self.device, copy=True)
        else:
            self._write(number, row)
        return number

    def read(self, number: int) -> Tensor:
        """Return a row. Do not change it: without a folder it is the stored row itself."""
        if self._folder is None:
            return self._rows[number]
        size = self.width * self.dtype.itemsize
        content = bytearray(os.pread(self._file(), size, number * size))
        if len(content) != size:
            raise InputError(f"{self.path} ends before row {number}: it is not whole.")
        if hashlib.sha256(content).hexdigest() != self._digests[number]:
            raise InputError(f"{self.path} is damaged: the checksum of row {number} is not the one that was stored.")
        return torch.frombuffer(content, dtype=self.dtype).to(self.device)

    def drop(self, number: int) -> None:
        """Release a row, so that its number and place can be used again."""
        if self._folder is None:
            del self._rows[number]
            self._free.append(number)
        else:
            del self._digests[number]
            self._dropped[-1].append(number)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows, or the token of the file that holds them, after flushing it to disk."""
        if self._folder is None:
            return {"rows": dict(self._rows), "next": self._next, "free": list(self._free)}
        os.fsync(self._file())
        self._dropped.append([])
        if len(self._dropped) > self._keep_checkpoints + 1:
            self._free += self._dropped.pop(0)
        return {
            "token": self._token,
            "next": self._next,
            "free": list(self._free),
            "dropped": self._dropped,
            "digests": dict(self._digests),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._next, self._free = state["next"], list(state["free"])
        if self._folder is None:
            self._rows = {number: row.to(self.device, copy=True) for number, row in state["rows"].items()}
            return
        self.close()
        self._token = state["token"]
        if self.path is not None and not self.path.exists():
            raise InputError(f"the cached rows of this run are not there: {self.path} is missing.")
        # Dropped rows stay as they are for as long as an earlier checkpoint may need them.
        self._dropped = [*(list(numbers) for numbers in state["dropped"])]
        self._digests = dict(state["digests"])
        for number in self._digests:
            self.read(number)  # a damaged row is found now and not after many rounds

    def close(self) -> None:
        """Close the file; it stays on disk."""
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
        self._digests[number] = hashlib.sha256(content).hexdigest()
        offset, written = number * self.width * self.dtype.itemsize, 0
        try:
            while written < len(content):
                written += os.pwrite(self._file(), content[written:], offset + written)
        except OSError as error:
            raise FedloomError(f"cannot write {self.path}: {error.strerror}.") from error


def _refuse_unusable(folder: Path) -> None:
    """Raise an error if no rows can be written to `folder`. It creates nothing, as the run has not started yet."""
    try:
        there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    except OSError as error:
        raise InputError(f"cannot keep rows in {folder}: {error.strerror}.") from error
    if not there.is_dir():
        raise InputError(f"cannot keep rows in {folder}: {there} is not a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"cannot keep rows in {folder}: {there} is not writable.")


ALIGN = 64
"""Every row starts at a multiple of this many bytes. At other addresses kernels may take another path and round
differently, and one model trained in two slots must give the same bits."""


class Bank:
    """Hold `count` rows of `width` elements. `rows` is the matrix; a row is `bank.rows[i]`.

    A shared bank lies at the same address in every process that is forked after its creation. So a worker gets the
    address of a row (`locate`) instead of a copy.
    """

    _mapped: ClassVar["weakref.WeakValueDictionary[int, Bank]"] = weakref.WeakValueDictionary()
    _num_mapped = 0

    def __init__(self, flat: Tensor, count: int, width: int, *, mapped: bool) -> None:
        stride = aligned_row_stride(width, flat.dtype)
        self.rows = flat[: count * stride].view(count, stride)[:, :width]
        self.mapped = mapped
        self._start = flat.data_ptr()
        self._end = self._start + flat.numel() * flat.dtype.itemsize
        if mapped:
            Bank._num_mapped += 1
            Bank._mapped[Bank._num_mapped] = self

    @classmethod
    def memory(
        cls, count: int, width: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "Bank":
        """Create rows of zeros in ordinary memory, or on a GPU."""
        flat = torch.zeros(count * aligned_row_stride(width, dtype), dtype=dtype, device=device)
        return cls(flat, count, width, mapped=False)

    @classmethod
    def shared(cls, count: int, width: int, dtype: torch.dtype = torch.float32) -> "Bank":
        """Create rows of zeros that processes forked later can read and write.

        The memory is anonymous, so killed processes leave nothing behind, and the small /dev/shm of a container is no
        limit. Pages are allocated when they are first written.
        """
        nbytes = max(count * aligned_row_stride(width, dtype) * dtype.itemsize, ALIGN)  # an empty mapping is an error
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        flat = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=dtype, count=nbytes // dtype.itemsize)
        return cls(flat, count, width, mapped=True)

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def num_mapped(cls) -> int:
        """Return how many shared banks have been created. A process forked now knows these and no later ones."""
        return cls._num_mapped

    @classmethod
    def locate(cls, tensor: Tensor, num_mapped: int) -> int | None:
        """Return the address of `tensor`, or None if it is not inside one of the first `num_mapped` shared banks."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.dtype.itemsize
        for serial, bank in list(cls._mapped.items()):
            if serial <= num_mapped and bank._start <= start and end <= bank._end:
                return start
        return None


def bank_tensor_at_address(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensor at an address that the parent process located before it forked this one."""
    count = prod(shape)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def aligned_row_stride(width: int, dtype: torch.dtype) -> int:
    """Return the number of elements from one row of a bank to the next."""
    per_line = ALIGN // dtype.itemsize
    return -(-width // per_line) * per_line
