"""Read arrays from untrusted .npz files and from MATLAB files (version 5 to 7).

Nothing is unpickled, and an .npz array never takes more memory than its archive entry says.
"""

import io
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError, shorten_error_message
from fedloom.utils.formatting import format_list

LARGEST = 1 << 33
"""Largest size of one array in bytes."""
KINDS = {"u": "unsigned integers", "i": "integers", "f": "floats", "U": "text", "b": "truth values"}


def read_npz_arrays(
    path: Path, expected: Mapping[str, tuple[str, int | None]], optional: Collection[str] = ()
) -> dict[str, NDArray[Any]]:
    """Read the `expected` arrays of a file; each name maps to the allowed kinds (numpy's letters) and the rank.

    A rank of None stands for 1 or more. The result lacks `optional` arrays that the file does not have.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist()}
            there = [name for name in expected if f"{name}.npy" in sizes]
            if lacking := [name for name in expected if name not in there and name not in optional]:
                held = format_list([repr(name.removesuffix(".npy")[:40]) for name in sizes]) if sizes else "no array"
                raise InputError(f"{path} lacks the array {lacking[0]!r}; it has {held}.")
            return {name: _read(archive, name, sizes[f"{name}.npy"], *expected[name], path) for name in there}
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from None
    except Exception as error:  # zipfile and zlib raise many types of errors for damaged bytes
        raise InputError(f"{path} is not a whole .npz file: {shorten_error_message(error)}.") from None


def _read(archive: zipfile.ZipFile, name: str, size: int, kinds: str, rank: int | None, path: Path) -> NDArray[Any]:
    if size > LARGEST:
        raise InputError(f"{path} says that its array {name!r} has {size} bytes; at most {LARGEST} are read.")
    with archive.open(f"{name}.npy") as stream:
        try:
            version = np.lib.format.read_magic(stream)
            read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, fortran, dtype = read(stream)
        except (ValueError, KeyError, TypeError, SyntaxError, EOFError) as error:
            raise InputError(
                f"{path} has no readable header of the array {name!r}: {shorten_error_message(error)}."
            ) from None
        if dtype.kind not in kinds or (len(shape) != rank if rank is not None else not shape):
            what = f"{' or '.join(KINDS[kind] for kind in kinds)} of rank {'1 or more' if rank is None else rank}"
            raise InputError(f"{path} has {name!r} of type {dtype} and shape {shape}; expected {what}.")
        count = 1
        for length in shape:
            count *= length
        if any(length < 0 for length in shape) or count * dtype.itemsize > size:
            raise InputError(f"{path} says that {name!r} has shape {shape}, but it holds only {size} bytes.")
        content = stream.read(count * dtype.itemsize + 1)  # one more byte, to reach the end and verify the checksum
    if len(content) != count * dtype.itemsize:
        raise InputError(f"{path} has {name!r} of shape {shape}, but not as many bytes as that says.")
    values = np.frombuffer(io.BytesIO(content).getbuffer(), dtype=dtype)
    # torch takes no numbers in another machine's byte order.
    return values.reshape(shape, order="F" if fortran else "C").astype(dtype.newbyteorder("="), copy=False)


def read_mat_arrays(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """Read the arrays `names`, in that order."""
    from scipy.io import loadmat

    try:
        found = loadmat(path, variable_names=list(names))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from None
    except NotImplementedError:
        raise InputError(f"{path} is in MATLAB's format 7.3; expected version 7 or older.") from None
    except (Exception, MemoryError) as error:  # loadmat raises any type of error for damaged bytes
        raise InputError(f"{path} is not a whole MATLAB file: {shorten_error_message(error)}.") from None
    if lacking := [name for name in names if not isinstance(found.get(name), np.ndarray)]:
        raise InputError(f"{path} lacks the array {lacking[0]!r}.")
    return [found[name] for name in names]
