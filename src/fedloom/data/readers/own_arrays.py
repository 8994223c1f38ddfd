"""Read a user's arrays from an .npz file.

They are x, y, and optionally x_test, y_test and owner. Nothing is unpickled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.array_pool import TEST_SHARE, make_array_dataset
from fedloom.data.dataset import Dataset, DatasetSpec
from fedloom.data.readers.arrays import read_npz_arrays
from fedloom.data.readers.tables import parse_table_task
from fedloom.errors import InputError

MOST_EXACT = 2**53
"""Floats below this size are exact integers if they are whole."""
NUMBERS = ("uifb", None)
EXPECTED: dict[str, tuple[str, int | None]] = {
    **dict.fromkeys(("x", "y", "x_test", "y_test"), NUMBERS),
    "owner": ("uiU", 1),
}


def read_array_dataset(spec: DatasetSpec) -> Dataset:
    """Read the arrays in the file of `spec`.

    Options: `test`, the share of each owner's samples for testing if the file has no `x_test`; `task`.
    """
    assert spec.path is not None
    has_share, test_share = "test" in spec.options, spec.fraction_option("test", TEST_SHARE)
    task, path = parse_table_task(spec), spec.path
    spec.refuse_unused_options()
    if path.is_dir():
        raise InputError(f"{path} is a folder; expected an .npz file, as numpy.savez writes it.")
    arrays = read_npz_arrays(path, EXPECTED, optional=("x_test", "y_test", "owner"))
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise InputError(f"{path} has only one of x_test and y_test; expected both or none.")
    if has_share and "x_test" in arrays:
        raise InputError(f"{path} has test samples, x_test and y_test; leave out test={test_share:g}.")
    notes: list[str] = []
    y = _targets(arrays["y"], task, path, "y", notes)
    test: Any = test_share
    if "x_test" in arrays:
        test = arrays["x_test"], _targets(arrays["y_test"], task, path, "y_test", [])
    parts = str(path), f"the test set of {path}"
    dataset = make_array_dataset(arrays["x"], y, owner=arrays.get("owner"), test=test, parts=parts)
    return replace(dataset, notes=tuple(notes))


def _targets(y: NDArray[Any], task: str, path: Path, name: str, notes: list[str]) -> NDArray[Any]:
    """Return the labels in the type of the task: integers for classes, floats for a regression."""
    if task == "regression":
        return y.astype(np.float64)
    if y.dtype.kind != "f":
        return y
    whole = bool((np.abs(y) < MOST_EXACT).all() and (y == np.rint(y)).all())  # false for NaN too
    if task == "classification":
        if not whole:
            raise InputError(f"{path} has labels with fractions in {name}; a classification wants integers from 0 on.")
        return y.astype(np.int64)
    if whole:
        notes.append(
            f"{path.name}: {name} has whole numbers stored as floats, which is a regression; for classes store "
            "integers or say task=classification."
        )
    return y
