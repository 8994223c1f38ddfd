"""Any table, CSV or Parquet, with a column of labels and perhaps one that says whose a row is."""

from pathlib import Path

import numpy as np
import torch

from fedloom.data.arrow import read_parquet
from fedloom.data.columns import Columns, Texts, read_csv
from fedloom.data.content import Content, positions
from fedloom.data.features import Encoder
from fedloom.data.samples import Samples
from fedloom.data.spec import Spec, home_path, number
from fedloom.data.targets import make_owners, make_targets, task_of, test_rows
from fedloom.errors import InputError, unknown


def read_table(spec: Spec) -> Content:
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
    separate = _labelled(_read(home_path(test), words), label, Path(test)) if share != share else None
    labels = _texts(columns[label])
    owners, names = make_owners(_texts(columns[owner]), str(path), owner) if owner else (None, ())
    if separate is None:
        held = test_rows(owners, len(labels), share)
        train_rows, rows, held_columns, held_name = np.flatnonzero(~held), np.flatnonzero(held), columns, path.name
        targets = make_targets(labels, task, str(path))
        y, test_y = targets.y[train_rows], targets.y[rows]
        test_owners = None if owners is None else owners[rows]
    else:
        held_columns, more = separate
        notes, held_name = notes + more, Path(test).name
        both = make_targets(labels + _texts(held_columns[label]), task, f"{path} with {test}")
        targets, train_rows = both, np.arange(len(labels))
        rows = np.arange(len(both.y) - len(labels))
        y, test_y = both.y[: len(labels)], both.y[len(labels) :]
        test_owners = positions(_texts(held_columns[owner]), names) if owner in held_columns else None
        if both.class_names and len(new := sorted(set(test_y.tolist()) - set(y.tolist()))):
            raise InputError(f"{test} has the label {both.class_names[new[0]]!r}, which {path} does not have.")
    if not len(rows):
        raise InputError(f"{path} has too few rows to hold out a share of {test} for testing.")
    encoder = Encoder(columns, [name for name in columns if name not in {label, owner, *drop}], train_rows, path.name)
    x, test_x = encoder.encode(columns, train_rows, path.name), encoder.encode(held_columns, rows, f"test: {held_name}")
    return Content(
        Samples(torch.from_numpy(x), torch.from_numpy(y)),
        Samples(torch.from_numpy(test_x), torch.from_numpy(test_y)),
        targets.class_names,
        None if owners is None else owners[train_rows],
        names,
        notes=(*notes, *encoder.notes),
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
    there = [row for row, text in enumerate(_texts(columns[label])) if text is not None]
    missing = len(columns[label]) - len(there)
    if not missing:
        return columns, []
    if not there:
        raise InputError(f"{path} has no row with a label in column {label!r}.")
    kept: Columns = {
        name: [values[row] for row in there] if isinstance(values, list) else values[there]
        for name, values in columns.items()
    }
    return kept, [f"{path.name}: {missing} rows without a label were left out."]


def _texts(column: object) -> Texts:
    assert isinstance(column, list), "label and owner are read as words"
    return column
