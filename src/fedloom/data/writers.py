"""Who wrote the digits of MNIST, where a file beside them says so."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.data.npz import read_npz
from fedloom.errors import InputError

WRITERS = "qmnist_writer_ids.npz"
"""QMNIST found them again: the number of the writer of every image, as `writer_train` and `writer_test`."""


def read_writers(path: Path, images: int) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """For each of the training images a position in the names of the writers; None where there is no such file."""
    if not path.is_file():
        return None, ()
    numbers = read_npz(path, {"writer_train": ("ui", 1)})["writer_train"]
    if len(numbers) != images:
        raise InputError(f"{path} names the writers of {len(numbers)} images, but there are {images}.")
    known, owners = np.unique(numbers, return_inverse=True)
    return owners.astype(np.int64), tuple(f"writer {number}" for number in known.tolist())
