"""The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.samples import Samples


def read_digits() -> tuple[Samples, Samples]:
    """The training and the test samples: of each class every fifth is for testing, in the file's order.

    The file lists writers one after the other, so both parts hold digits of every writer. The split is
    always the same: results on `digits` compare across seeds and machines.
    """
    table = _table()
    # Grey values are 0..16; whole numbers of 0..255 keep them apart.
    images = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = table[:, 64].astype(np.int64)
    held_out = np.zeros(len(labels), dtype=np.bool_)
    for label in range(10):
        held_out[np.flatnonzero(labels == label)[2::5]] = True
    pool = Samples(torch.from_numpy(images), torch.from_numpy(labels))
    return pool.take(np.flatnonzero(~held_out)), pool.take(np.flatnonzero(held_out))


def _table() -> NDArray[np.float64]:
    """64 grey values and a label in every row."""
    # Importing scikit-learn takes over a second; finding its folder takes none.
    spec = find_spec("sklearn")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            with gzip.open(path, "rt") as lines:
                return np.loadtxt(lines, delimiter=",", dtype=np.float64)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target]).astype(np.float64)
