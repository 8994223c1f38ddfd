"""Read and write partitions as files.

A file holds lists of positions in JSON, or integer arrays in npz (never unpickled).
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.partitions.base import Indices, Labels, PartitionPool, PartitionRequest
from fedloom.data.readers.arrays import read_npz_arrays
from fedloom.errors import InputError
from fedloom.utils.storage import write_atomically

HEADER = 4096
"""Bytes that an array in an npz may need besides its values."""


def partition_from_file(request: PartitionRequest) -> list[Indices]:
    """Return the positions that a file lists; a sample may be in no part, and a client may be empty."""
    if not request.value:
        raise InputError("partition 'file' wants the path of a file, as in file:split.json.")
    if "\0" in request.value:
        raise InputError(f"cannot read the partition {request.value!r}: no path has a zero byte.")
    parts = _read_partition_file(Path(request.value), request.pool)
    if request.requested_num_clients not in (None, len(parts)):
        raise InputError(
            f"{request.value} has {len(parts)} clients, but {request.requested_num_clients} were asked for."
        )
    return parts


def _read_partition_file(path: Path, pool: PartitionPool) -> list[Indices]:
    """Read the parts in `path`, sort each, and check that they are disjoint positions in `pool`.

    A JSON file has a list with a list of positions for each client, or an object with these by client ("0", "1",
    ...), or such a list or object under `clients`. An npz file has an array for each client, named "0", "1", ...
    A file by `write_partition_file` is rejected if the labels differ from those it was written for.
    """
    try:
        found = _read_npz(path, len(pool)) if path.suffix == ".npz" else _read_json(path, pool)
    except OSError as error:
        raise InputError(f"cannot read the partition {path}: {error.strerror or error}.") from None
    lists = _in_order(path, found) if isinstance(found, Mapping) else found
    if not isinstance(lists, list) or not lists:
        raise InputError(f"{path} is not a partition; expected a list of positions for each client.")
    seen = np.zeros(len(pool), dtype=np.bool_)
    return [_checked(path, client, part, seen) for client, part in enumerate(lists)]


def write_partition_file(
    path: Path, client_indices: Sequence[Indices], labels: Labels, metadata: Mapping[str, Any]
) -> None:
    """Write a partition that `partition_from_file` reads, as npz or JSON depending on the suffix.

    JSON also stores `metadata` and a checksum of the labels, which detects use with other data. An existing file with
    other content is not overwritten, because runs may depend on it.
    """
    if path.suffix not in (".json", ".npz"):
        raise InputError(f"a partition is written as .json or .npz, not as {path.name!r}.")
    if path.suffix == ".npz":
        content = io.BytesIO()
        # Not np.savez: it writes the time of day, and equal partitions must be equal files.
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
            for client_id, part in enumerate(client_indices):
                with archive.open(zipfile.ZipInfo(f"{client_id}.npy"), "w") as file:
                    np.lib.format.write_array(file, part, allow_pickle=False)
        _write_new(path, content.getvalue())
        return
    head = {**metadata, "samples": len(labels), "labels_sha256": _checksum(labels)}
    lines = ",\n".join(json.dumps(part.tolist(), separators=(",", ":")) for part in client_indices)
    text = f'{json.dumps(head, indent=1)[:-2]},\n "clients": [\n{lines}\n]}}\n'
    _write_new(path, text.encode())


def _write_new(path: Path, content: bytes) -> None:
    try:
        before = path.read_bytes()
    except FileNotFoundError:
        before = b""
    except OSError as error:
        raise InputError(f"cannot write the partition {path}: {error.strerror or error}.") from None
    if before == content:
        return
    if before:
        raise InputError(f"{path} is there already and is not this partition; choose another --out, or delete it.")
    write_atomically(path, content)


def _checksum(labels: Labels) -> str:
    return hashlib.sha256(np.ascontiguousarray(labels, dtype="<f8").tobytes()).hexdigest()


def _read_json(path: Path, pool: PartitionPool) -> Any:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0] if isinstance(error, ValueError) else "it is nested too deeply"
        raise InputError(f"{path} is not JSON: {reason}.") from None
    if not isinstance(found, dict) or "clients" not in found:
        return found
    if found.get("samples", len(pool)) != len(pool):
        raise InputError(
            f"{path} is a partition of {found['samples']!r} samples, but {pool.name!r} has {len(pool)} to share."
        )
    if found.get("labels_sha256", None) not in (None, _checksum(pool.labels)):
        raise InputError(f"{path} is a partition of other data: the labels of {pool.name!r} have another checksum.")
    return found["clients"]


def _read_npz(path: Path, num_examples: int) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except OSError:
        raise
    except Exception as error:  # zipfile raises many types of errors for damaged bytes
        raise InputError(f"{path} is not an npz file: {str(error).rstrip('.') or type(error).__name__}.") from None
    # Disjoint positions of 8 bytes cannot take more, so do not unpack a file that claims more.
    if sum(member.file_size for member in members) > 8 * num_examples + HEADER * len(members):
        raise InputError(f"{path} lists more positions than the {num_examples} samples there are.")
    names = [member.filename.removesuffix(".npy") for member in members]
    return dict(read_npz_arrays(path, dict.fromkeys(names, ("ui", 1))))


def _in_order(path: Path, found: Mapping[str, Any]) -> list[Any]:
    """Return the values of an object with the keys "0", "1", ... in that order."""
    try:
        return [found[str(client)] for client in range(len(found))]
    except KeyError as error:
        raise InputError(f"{path} has {len(found)} entries but none called {error}; expected 0, 1, 2, ...") from None


def _checked(path: Path, client_id: int, listed: Any, seen: np.ndarray[Any, np.dtype[np.bool_]]) -> Indices:
    """Check and sort one client's positions, and mark them in `seen`."""
    if isinstance(listed, list):
        whole = all(type(one) is int and abs(one) < 2**63 for one in listed)
        listed = np.array(listed, dtype=np.int64) if whole else None
    if not isinstance(listed, np.ndarray) or listed.ndim != 1 or not np.issubdtype(listed.dtype, np.integer):
        raise InputError(f"client {client_id} of {path} does not hold a list of whole numbers.")
    part = listed
    if part.size and (part.min() < 0 or part.max() >= len(seen)):
        span = f"positions from {part.min()} to {part.max()}"
        raise InputError(f"client {client_id} of {path} holds {span}, but there are {len(seen)} samples.")
    part = np.sort(part.astype(np.int64))
    twice = part[seen[part] | (np.diff(part, prepend=-1) == 0)]
    if twice.size:
        raise InputError(f"client {client_id} of {path} holds sample {twice[0]}, which is held already.")
    seen[part] = True
    return part
