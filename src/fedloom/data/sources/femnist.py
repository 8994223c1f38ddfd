"""FEMNIST: handwritten characters by writer, in LEAF's JSON files."""

from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset
from fedloom.data.readers.leaf import LEAF_SPLIT, Users, find_leaf_files, read_leaf_users
from fedloom.data.samples import InputTransform, Samples
from fedloom.data.sources.base import DatasetSource
from fedloom.errors import InputError

PIXELS = 28 * 28


@dataclass(frozen=True, kw_only=True)
class FemnistSource(DatasetSource):
    """What LEAF's `preprocess.sh` writes, with `train/` and `test/`; each writer is an owner."""

    def input_files(self, folder: Path) -> list[Path]:
        train, test = find_leaf_files(folder) or ([], [])
        return train + test

    def read(self, folder: Path) -> Dataset:
        users, test_users = read_leaf_users(*(find_leaf_files(folder) or ([], [])))
        assert test_users is not None
        if strangers := sorted(test_users.keys() - users.keys()):
            raise InputError(
                f"{folder} has the writer {strangers[0]!r} in test/ but not in train/; split LEAF's data by sample."
            )
        names = tuple(sorted(users))
        train, owners = self._part(users, names)
        test, test_owners = self._part(test_users, names)
        return Dataset(train, test, self.class_names, owners, names, test_owners=test_owners)

    def _part(self, users: Users, names: tuple[str, ...]) -> tuple[Samples, NDArray[np.int64]]:
        held = [(number, *users[name]) for number, name in enumerate(names) if name in users and users[name][1]]
        images = np.concatenate([_images(x, names[number]) for number, x, _ in held])
        labels = np.concatenate([_labels(y, names[number], len(self.class_names)) for number, _, y in held])
        owners = np.concatenate([np.full(len(y), number, dtype=np.int64) for number, _, y in held])
        return Samples(torch.from_numpy(images), torch.from_numpy(labels)), owners


def _images(x: list[Any], writer: str) -> NDArray[np.uint8]:
    """LEAF divides gray values by 255; here they are bytes again, exactly those it started from."""
    try:
        values = np.array(x, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"the writer {writer!r} has images that are not lists of {PIXELS} numbers.") from None
    if values.shape != (len(x), PIXELS):
        raise InputError(
            f"the writer {writer!r} has images of shape {values.shape[1:]}; expected {PIXELS} numbers each."
        )
    if not bool(((values >= 0) & (values <= 1)).all()):
        raise InputError(f"the writer {writer!r} has pixels outside of 0 to 1.")
    return np.rint(values * 255).astype(np.uint8).reshape(-1, 28, 28, 1)


def _labels(y: list[Any], writer: str, classes: int) -> NDArray[np.int64]:
    # A bool is an int to Python, and 3.0 equals 3: neither is a label.
    wrong = next((label for label in y if type(label) is not int or not 0 <= label < classes), None)
    if wrong is not None:
        raise InputError(f"the writer {writer!r} has the label {wrong!r}; expected labels from 0 to {classes - 1}.")
    return np.array(y, dtype=np.int64)


FEMNIST = FemnistSource(
    name="femnist",
    summary="handwritten digits and letters by writer, gray, 28 x 28",
    shape=(1, 28, 28),
    num_train_examples=None,
    num_test_examples=None,
    transform=InputTransform.unit(1),
    class_names=(*digits, *ascii_uppercase, *ascii_lowercase),
    file_names=("train/*.json", "test/*.json"),
    file_patterns={"LEAF's files": LEAF_SPLIT},
    folder_names=("femnist", "FEMNIST"),
    base_url="https://github.com/TalwalkarLab/leaf",
    manual_steps=(
        "clone https://github.com/TalwalkarLab/leaf and run in data/femnist: "
        "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample"
    ),
)
