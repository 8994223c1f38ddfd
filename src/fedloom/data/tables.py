"""Any table, CSV or Parquet, with a column of labels and perhaps one that says whose a row is."""

from pathlib import Path

import numpy as np
import torch

from fedloom.data.arrow import read_parquet
from fedloom.data.columns import Columns, as_texts, pick, read_csv
from fedloom.data.content import Dataset, positions
from fedloom.data.features import encode
from fedloom.data.samples import Samples
from fedloom.data.spec import Spec, home_path, number
from fedloom.data.targets import join_targets, make_owners, make_targets, task_of, test_rows
from fedloom.errors import InputError, unknown


def read_table(spec: Spec) -> Dataset:
    """The table at the spec's path.

    Options: `label`, the column of labels; `owner`, the column that says whose a row is; `test`, a table of test rows
    or the share of each owner's rows that are for testing; `task`; `drop`, columns to leave out, joined by +.
    """
    assert spec.path is not None
    label, owner, test, task = spec.text("label"), spec.text("owner"), spec.text("test", "0.2"), task_of(spec)
    drop = [name for name in spec.text("drop").split("+") if name]
    spec.done()
    if not label:
        raise InputError(f"'table' wants to know which column holds the labels, as in {spec.name}:PATH,label=NAME.")
    share = number(test)
    if share == share and not 0 < share < 1:
        raise InputError(f"test of 'table' is {test!r}; expected a file, or a share above 0 and below 1.")
    path, words = spec.path, {label, owner}
    columns = _read(path, words)
    for name in (label, *([owner] if owner else []), *drop):
        if name not in columns:
            raise unknown(f"column of {path}", name, columns)
    if named := {label, owner} & set(drop):
        raise InputError(f"'table' drops {min(named)!r}, which it also names as label or owner.")
    columns, notes = _labelled(columns, label, path)
    labels = as_texts(columns[label])
    owners, names = make_owners(as_texts(columns[owner]), str(path), owner) if owner else (None, ())
    if share == share:
        held, held_name = test_rows(owners, len(labels), share), path.name
        targets = make_targets(labels, task, str(path))
        if not held.any():
            raise InputError(f"{path} has too few rows to hold out a share of {test} for testing.")
        y, test_y = targets.y[~held], targets.y[held]
        owners, test_owners = (None if owners is None else owners[part] for part in (~held, held))
        columns, held_columns = pick(columns, ~held), pick(columns, held)
    else:
        held_columns, more = _labelled(_read(home_path(test), words), label, Path(test))
        notes, held_name = notes + more, Path(test).name
        targets = join_targets(labels, as_texts(held_columns[label]), task, f"{path} with {test}", test)
        y, test_y = targets.y[: len(labels)], targets.y[len(labels) :]
        test_owners = positions(as_texts(held_columns[owner]), names) if owner in held_columns else None
    inputs = [name for name in columns if name not in {label, owner, *drop}]
    x, test_x, more = encode(columns, held_columns, inputs, path.name, held_name)
    return Dataset(
        Samples(torch.from_numpy(x), torch.from_numpy(y)),
        Samples(torch.from_numpy(test_x), torch.from_numpy(test_y)),
        targets.class_names,
        owners,
        names,
        notes=(*notes, *more),
        test_owners=test_owners,
    )


def _read(path: Path, words: set[str]) -> Columns:
    if path.is_dir():
        raise InputError(f"{path} is a folder; expected a CSV or Parquet file.")
    return read_parquet(path, words) if path.suffix == ".parquet" else read_csv(path, words)


def _labelled(columns: Columns, label: str, path: Path) -> tuple[Columns, list[str]]:
    """The rows that have a label, and a sentence about the others."""
    if label not in columns:
        raise unknown(f"column of {path}", label, columns)
    there = np.array([text is not None for text in as_texts(columns[label])])
    if there.all():
        return columns, []
    if not there.any():
        raise InputError(f"{path} has no row with a label in column {label!r}.")
    return pick(columns, there), [f"{path.name}: {np.count_nonzero(~there)} rows without a label were left out."]
