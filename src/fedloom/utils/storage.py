"""Write and read files safely: atomic writes, safetensors, JSON, state trees.

Files have checksums.

A state is a tree of dicts, lists, tensors and plain values. Its tensors go into one safetensors file, the rest into
JSON. A file appears under its name only when it is complete and on disk, so a crash at any time loses nothing. Reading
never executes code.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedloom.errors import FedloomError, InputError
from fedloom.utils.checksums import KEY, has_valid_safetensors_checksum, safetensors_checksum

Plain = bool | int | float | str | None
Piece = bytes | memoryview
SMALL, LARGE = 1 << 18, 1 << 25
"""Bytes of a piece of a file. Hashing less than SMALL in a thread does not pay off; no piece is larger than LARGE."""

_CHECKSUM_START, _CHECKSUM_END = f', "{KEY}": "'.encode(), b'"}'
_DIGITS = 64

LARGEST_SHARE = 0.02
"""The share of the run time that checkpoints may take."""

# Their names in a safetensors file, in the order in which the library's own writer sorts them.
DTYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32",
    torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16",
    torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def write_atomically(path: Path, content: bytes | Iterable[Piece]) -> None:
    """Write `content`, whole or in pieces, to `path`: all of it or nothing, even if the machine crashes."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as handle:
            for piece in (content,) if isinstance(content, bytes) else content:
                handle.write(piece)
                if len(piece) >= LARGE:
                    handle.flush()
                    _begin_to_store(handle.fileno())
            handle.flush()
            os.fsync(handle.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:  # producing the pieces may fail too
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise FedloomError(f"cannot write {path}: {error.strerror or error}.") from error
        raise


def _begin_to_store(handle: int) -> None:
    """Start writing to disk without waiting, so that not everything is left for the end."""
    with suppress(AttributeError, OSError):  # not every system and disk supports it
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a rename in it survives a crash."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    check_cancelled: Callable[[], None] = lambda: None,
) -> str:
    """Write tensors as safetensors and return the SHA-256 of the file.

    `metadata` goes into the header. `check_cancelled` is called before each piece and may raise an error to cancel.
    """
    digest = hashlib.sha256()
    write_atomically(path, _hashed(_safetensors_pieces(tensors, metadata), digest, check_cancelled))
    return digest.hexdigest()


def write_checked_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors as safetensors with a checksum in the metadata, for files that users take elsewhere."""

    def pieces(checksum: str) -> Iterator[Piece]:
        return _safetensors_pieces(tensors, {KEY: checksum, **(metadata or {})})

    write_atomically(path, pieces(safetensors_checksum(pieces("0" * 64))))


def _hashed(pieces: Iterable[Piece], digest: "hashlib._Hash", check_cancelled: Callable[[], None]) -> Iterator[Piece]:
    """Yield the same pieces and add them to `digest`, large ones in a thread while they are written."""
    with ThreadPoolExecutor(1) as other:
        for piece in pieces:
            check_cancelled()
            if len(piece) < SMALL:
                digest.update(piece)
                yield piece
            else:
                added = other.submit(digest.update, piece)
                yield piece
                added.result()


def _safetensors_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> Iterator[Piece]:
    """Yield the bytes of a safetensors file, one tensor after the other, equal to those of the library's `save`.

    The library makes two more copies of everything. That takes longer than the disk, and the state of a server may fill
    half of the memory.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise FedloomError(f"{name} cannot be stored: safetensors files have no numbers of type {tensor.dtype}.")
    rank = {dtype: place for place, dtype in enumerate(DTYPES)}
    names = sorted(tensors, key=lambda name: (rank[tensors[name].dtype], name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield from _on_host(tensors[name].detach())


def _on_host(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor. Each piece is valid until the next one is read."""
    if not tensor.is_contiguous() and tensor.nbytes >= SMALL * len(tensor):
        for row in tensor:  # of a bank, which has gaps between its rows: a copy of all would fill the memory
            yield from _on_host(row)
        return
    dense = tensor.contiguous()
    # A tensor of one element or none counts as contiguous with any stride, which a view as bytes does not accept.
    content = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    if content.is_cuda and len(content) >= LARGE:
        # A GPU copies faster to pinned memory than to new pages, and a small buffer is enough.
        pinned = torch.empty(LARGE, dtype=torch.uint8, pin_memory=True)
        for start in range(0, len(content), LARGE):
            part = content[start : start + LARGE]
            yield pinned[: len(part)].copy_(part).numpy().data
    else:
        whole = content.cpu().numpy().data
        for start in range(0, len(whole), LARGE):
            yield whole[start : start + LARGE]


def read_safetensors(path: Path, digest: str | None = None, *, has_checksum: bool = False) -> dict[str, Tensor]:
    """Read tensors, and raise an InputError if the file is damaged.

    With `digest`, the file must have this SHA-256. With `has_checksum`, it must hold its own checksum.

    Each tensor is copied to memory of its own. In the file a tensor starts at any multiple of 8 bytes. Matrix products
    may round differently at such addresses, and a resumed run would not give the same bits.
    """
    try:
        with path.open("rb") as handle:
            if digest is not None and hashlib.file_digest(handle, "sha256").hexdigest() != digest:
                raise InputError(f"{path} is damaged: its checksum is not the one that was stored when it was written.")
            handle.seek(0)
            if has_checksum and not has_valid_safetensors_checksum(handle.read()):
                raise InputError(f"{path} is damaged: its checksum is not the one that was stored when it was written.")
            return _read_tensors(path, handle)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{path} is not a whole safetensors file: {error}.") from error


def _read_tensors(path: Path, handle: BufferedReader) -> dict[str, Tensor]:
    """Read the tensors of an open safetensors file. The library's `load` holds three copies of them at once."""
    with safe_open(path, framework="pt"):  # raises an error unless the header describes the whole file
        pass
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    handle.seek(0)
    header_size = int.from_bytes(handle.read(8), "little")
    header = json.loads(handle.read(header_size))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            content = torch.empty(end - start, dtype=torch.uint8)
            handle.seek(8 + header_size + start)
            if handle.readinto(content.numpy().data) != len(content):
                raise ValueError("it has become shorter")
            tensors[name] = content.view(dtypes[entry["dtype"]]).view(entry["shape"])
    return tensors


def split_stored_tensors(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a state as JSON values that refer to tensors by name, and these tensors."""
    tensors: dict[str, Tensor] = {}

    def named(tensor: Tensor, path: str) -> str:
        name = f"{len(tensors)}{path}"  # a path alone is not unique: {1: ...} and {"1": ...}
        tensors[name] = tensor
        return name

    def plain(value: Any, path: str) -> Any:
        if isinstance(value, np.ndarray):
            return {"@array": named(torch.from_numpy(value.copy()), path)}
        if isinstance(value, Tensor):
            return {"@tensor": named(value, path)}
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, Plain):
                    raise TypeError(f"{path} of a state has the key {key!r}, which cannot be saved")
            return {"@pairs": [[key, plain(item, f"{path}/{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return [plain(item, f"{path}/{index}") for index, item in enumerate(value)]
        if isinstance(value, Plain):
            return value
        raise TypeError(f"{path} of a state is a {type(value).__name__}, which cannot be saved")

    return plain(state, ""), tensors


def join_stored_tensors(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `split_stored_tensors` took apart."""
    # Not with a recursive inner function: it would keep the tensors alive until the next garbage collection.
    if isinstance(tree, dict):
        if "@tensor" in tree:
            return tensors[tree["@tensor"]]
        if "@array" in tree:
            return tensors[tree["@array"]].numpy()
        return {key: join_stored_tensors(item, tensors) for key, item in tree["@pairs"]}
    if isinstance(tree, list):
        return [join_stored_tensors(item, tensors) for item in tree]
    return tree


def add_json_checksum(values: Mapping[str, Any], previous: str = "") -> tuple[bytes, str]:
    """Return values as one line of JSON with a checksum, and the checksum.

    `previous` is the checksum of the line before it, which the new one covers too: a missing line is found.
    """
    body = json.dumps(dict(values))[:-1].encode()
    digest = hashlib.sha256(previous.encode() + body).hexdigest()
    return body + _CHECKSUM_START + digest.encode() + _CHECKSUM_END, digest


def check_json_checksum(line: bytes, previous: str = "") -> tuple[dict[str, Any], str]:
    """Return the values and the checksum of a line from `add_json_checksum`. Raise a ValueError if it was changed."""
    start = len(line) - len(_CHECKSUM_END) - _DIGITS
    body, digest = line[: max(start - len(_CHECKSUM_START), 0)], line[max(start, 0) : start + _DIGITS]
    found = hashlib.sha256(previous.encode() + body).hexdigest()
    if line != body + _CHECKSUM_START + found.encode() + _CHECKSUM_END or digest != found.encode():
        raise ValueError("its checksum is not the one that was stored when it was written")
    values: dict[str, Any] = json.loads(line)
    del values[KEY]
    return values, found


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write JSON with its own checksum."""
    write_atomically(path, add_json_checksum(values)[0] + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read JSON written by `write_json`, and raise an InputError if it was changed or truncated."""
    try:
        content = path.read_bytes()
        if content[-1:] != b"\n":
            raise ValueError("it does not end with a newline")
        return check_json_checksum(content[:-1])[0]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged: its checksum is not the one that was stored when it was written."
        ) from error


class StorageWriteSchedule:
    """Decide when the next checkpoint or partial result is due: `seconds` after the last, or always if that is 0.

    The interval grows if checkpoints take long, for example because the server keeps many models.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._saved_at = time.monotonic()

    def due(self, took: float) -> bool:
        """Return whether it is due. The last one took `took` seconds (so far, if it is still being written)."""
        pause = max(self._seconds, took / LARGEST_SHARE) if self._seconds else 0.0
        return time.monotonic() - self._saved_at >= pause

    def saved(self) -> None:
        """Restart the interval: a checkpoint was written, or its writing starts now."""
        self._saved_at = time.monotonic()


def parse_json_file(path: Path) -> Any:
    """Read a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except RecursionError:
        raise InputError(f"{path} is nested too deeply.") from None
    except ValueError as error:  # includes UnicodeDecodeError
        raise InputError(f"{path} is truncated, or not JSON: {error}.") from error


def list_files_recursively(folder: Path) -> list[Path]:
    """Return all files below `folder`, sorted, without hidden ones. Links to folders are followed, once each."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()

    def walk(place: str | Path) -> None:
        with os.scandir(place) as entries:
            state = os.stat(place)  # noqa: PTH116
            if (state.st_dev, state.st_ino) in seen:
                return
            seen.add((state.st_dev, state.st_ino))
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    walk(entry.path)
                elif entry.is_file():
                    found.append(Path(entry.path))

    try:
        walk(folder)
    except OSError as error:
        raise InputError(f"cannot read {error.filename or folder}: {error.strerror}.") from None
    return found


MODEL_FILE = "model.safetensors"
"""The file of the global model in a run directory; checkpoints of transformers use the same name."""
