"""Read a table, CSV or Parquet, with a column of labels.

It may have a column of owners.

Columns of numbers are standardized and columns of words become one-hot, both fitted to the training rows.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset, DatasetSpec, dataset_owner_positions, parse_dataset_number
from fedloom.data.readers.columns import (
    Columns,
    Numbers,
    Texts,
    filter_columns,
    parse_numeric_column,
    read_csv_columns,
    read_parquet_columns,
    require_text_column,
)
from fedloom.data.samples import Samples
from fedloom.errors import InputError, unknown_name_error
from fedloom.utils.formatting import format_list
from fedloom.utils.system import expand_user_path

MOST_WORDS = 1000
"""A column with more different words is not a category, but a name or a text."""

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class _StandardizedColumn:
    """A column of numbers; a missing value becomes the mean, which is 0 after scaling."""

    mean: float
    std: float

    width = 1

    def encode(self, values: Numbers) -> Matrix:
        scaled = (values - self.mean) / self.std
        return np.nan_to_num(scaled, nan=0.0).astype(np.float32)[:, None]


@dataclass(frozen=True)
class _OneHotColumn:
    """A column of words; a missing or unknown word becomes all zeros."""

    categories: dict[str, int]

    @property
    def width(self) -> int:
        return len(self.categories)

    def encode(self, values: Texts) -> Matrix:
        matrix = np.zeros((len(values), len(self.categories)), dtype=np.float32)
        at = np.array([self.categories.get(word, -1) if word is not None else -1 for word in values], dtype=np.int64)
        rows = np.flatnonzero(at >= 0)
        matrix[rows, at[rows]] = 1
        return matrix


def encode_train_and_test_tables(
    train: Columns,
    test: Columns,
    column_names: Sequence[str],
    source: str,
    test_source: str,
    rows_not_fitted: NDArray[np.int64] | None = None,
) -> tuple[Matrix, Matrix, list[str]]:
    """Encode `column_names` of both tables; return inputs, and notes about dropped, missing and unknown values.

    The encoding does not depend on the training rows `rows_not_fitted`.
    """
    fitted_rows = train
    if rows_not_fitted is not None:
        kept = np.ones(len(train[column_names[0]]) if column_names else 0, dtype=np.bool_)
        kept[rows_not_fitted] = False
        fitted_rows = filter_columns({name: train[name] for name in column_names}, kept)
    encoder = _TableEncoder(fitted_rows, column_names, source)
    return encoder.encode(train, source), encoder.encode(test, f"test: {test_source}"), encoder.notes


class _TableEncoder:
    """Encoder of table columns, fitted to the training rows."""

    def __init__(self, columns: Columns, column_names: Sequence[str], train_source: str) -> None:
        self._train_source, self.notes = train_source, []
        self._column_encoders: dict[str, _StandardizedColumn | _OneHotColumn] = {}
        empty = []
        for name in column_names:
            values = columns[name]
            if isinstance(values, list):
                part: _StandardizedColumn | _OneHotColumn = self._fit_one_hot_column(name, values)
            else:
                part = self._fit_standardized_column(name, values)
            if part.width and not (isinstance(part, _StandardizedColumn) and np.isnan(part.mean)):
                self._column_encoders[name] = part
            else:
                empty.append(name)
        if empty:
            self.notes.append(f"{train_source}: left out, for all values are missing: {', '.join(empty)}.")
        if not self._column_encoders:
            raise InputError(f"{train_source} has no column to learn from beside label and owner.")
        numeric = sum(isinstance(part, _StandardizedColumn) for part in self._column_encoders.values())
        width = sum(part.width for part in self._column_encoders.values())
        self.notes.append(
            f"{train_source}: columns of numbers: {numeric}, standardized by all training rows together; of words: "
            f"{len(self._column_encoders) - numeric}, one-hot; inputs: {width}."
        )

    def _fit_standardized_column(self, name: str, values: Numbers) -> _StandardizedColumn:
        there = values[~np.isnan(values)]
        if not len(there):
            return _StandardizedColumn(float("nan"), 1.0)
        # Divide first, because the sum of values near the largest float would be infinite.
        scale = float(np.abs(there).max())
        if not np.isfinite(scale):
            raise InputError(f"{self._train_source} has an infinite value in column {name!r}; expected finite numbers.")
        mean = float((there / scale).mean()) * scale if scale else 0.0
        std = float((there / scale).std()) * scale if scale else 0.0
        # The deviation of a constant column may be a rounding error.
        return _StandardizedColumn(mean, std if std > 1e-12 * scale else max(scale, 1.0))

    def _fit_one_hot_column(self, name: str, values: Texts) -> _OneHotColumn:
        words = sorted({word for word in values if word is not None})
        # One typo among numbers turns the whole column into words, so report it.
        strange = [word for word in words if parse_numeric_column([word]) is None]
        slip = f"{strange[0]!r} is no number" if 0 < len(strange) <= len(words) / 2 else ""
        if len(words) > MOST_WORDS:
            raise InputError(
                f"{self._train_source} has {len(words)} different words in column {name!r}, too many to be categories"
                f"{f' ({slip})' if slip else ''}; leave it out with drop={name}."
            )
        if slip:
            self.notes.append(f"{self._train_source}: column {name!r} was read as words, for {slip}.")
        return _OneHotColumn({word: position for position, word in enumerate(words)})

    def encode(self, columns: Columns, source: str) -> Matrix:
        """Return the inputs of all rows, and add missing and unknown values to `notes`."""
        pieces, missing, new = [], 0, 0
        for name, part in self._column_encoders.items():
            values = columns.get(name)
            if values is None:
                raise InputError(f"{source} has no column {name!r}, which {self._train_source} has.")
            if isinstance(part, _StandardizedColumn):
                if isinstance(values, list):
                    if (strange := next((value for value in values if value is not None), None)) is not None:
                        where = f"which holds numbers in {self._train_source}"
                        raise InputError(f"{source} has {strange!r} in column {name!r}, {where}.")
                    values = np.full(len(values), np.nan)
                missing += int(np.isnan(values).sum())
                pieces.append(part.encode(values))
            else:
                if not isinstance(values, list):
                    values = [None if np.isnan(value) else f"{value:g}" for value in values]
                missing += values.count(None)
                new += sum(word is not None and word not in part.categories for word in values)
                pieces.append(part.encode(values))
        if missing:
            self.notes.append(
                f"{source}: {missing} missing values, read as the column's mean or as none of its categories."
            )
        if new:
            self.notes.append(f"{source}: {new} words that no training row has, read as none of the categories.")
        matrix = np.concatenate(pieces, axis=1)
        if not np.isfinite(matrix).all():
            raise InputError(f"{source} has numbers too far from those of the training rows to be standardized.")
        return matrix


MOST_CLASSES = 1000
"""With more different integers it is unclear whether they are classes or quantities."""

DEFAULT_LABEL = "label"
"""The column of labels, if no other is named."""

TASKS = ("auto", "classification", "regression")


@dataclass(frozen=True)
class TableTargets:
    """Labels: int64 of shape n with class names, or for a regression float32 of shape n x 1 without."""

    y: NDArray[np.int64] | NDArray[np.float32]
    class_names: tuple[str, ...]


def parse_table_task(spec: DatasetSpec) -> str:
    """Return the option `task`."""
    task = spec.text_option("task", "auto")
    if task not in TASKS:
        raise unknown_name_error("task", task, TASKS)
    return task


def _make_table_targets(texts: Texts, task: str, source: str) -> TableTargets:
    """Convert labels to targets; with `auto`, integers and words are classes, other numbers a regression."""
    numbers = parse_numeric_column(texts)
    if task == "auto":
        whole = all(text is None or re.fullmatch(r"[+-]?\d+", text, flags=re.ASCII) for text in texts)
        task = "classification" if numbers is None or whole else "regression"
        if task == "classification" and numbers is not None and len(set(texts)) > MOST_CLASSES:
            raise InputError(
                f"{source} has {len(set(texts))} different whole numbers as labels; say task=regression or "
                "task=classification."
            )
    if task == "regression":
        if numbers is None:
            strange = next(text for text in texts if text is None or parse_numeric_column([text]) is None)
            raise InputError(f"{source} has the label {strange!r}; a regression wants numbers.")
        with np.errstate(over="ignore"):
            y = numbers.astype(np.float32)[:, None]
        if not np.isfinite(y).all():
            raise InputError(f"{source} has labels that are infinite in single precision; expected finite numbers.")
        return TableTargets(y, ())
    names = _sort_unique_texts(texts)
    if len(names) < 2:
        raise InputError(f"{source} has only the label {names[0]!r}; there must be two to tell apart.")
    position = {name: number for number, name in enumerate(names)}
    return TableTargets(np.array([position[str(text)] for text in texts], dtype=np.int64), names)


def join_targets_of_tables(train: Texts, test: Texts, task: str, source: str, test_source: str) -> TableTargets:
    """Return the targets of training and test rows in one array; every class needs a training row."""
    targets = _make_table_targets(train + test, task, source)
    if targets.class_names and (new := set(test) - set(train)):
        raise InputError(f"{test_source} has the label {min(map(str, new))!r}, which no training row has.")
    return targets


def _sort_unique_texts(texts: Texts) -> tuple[str, ...]:
    """Return the different words, sorted as numbers if all of them are numbers."""
    words = sorted({text for text in texts if text is not None})
    if (numbers := parse_numeric_column(list(words))) is not None:
        return tuple(words[i] for i in np.argsort(numbers, kind="stable"))
    return tuple(words)


def make_table_owners(texts: Texts, source: str, column: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the owner of each row as a position, and the names of the owners."""
    if None in texts:
        raise InputError(f"{source} does not say whose row {texts.index(None) + 1} is: {column!r} is missing there.")
    names = _sort_unique_texts(texts)
    position = {name: number for number, name in enumerate(names)}
    return np.array([position[str(text)] for text in texts], dtype=np.int64), names


def select_table_test_rows(owners: NDArray[np.int64] | None, row_count: int, test_share: float) -> NDArray[np.bool_]:
    """Select a fixed share of each owner's rows for testing; each owner keeps one for training."""
    rng = np.random.default_rng(0)
    held = np.zeros(row_count, dtype=np.bool_)
    groups = (
        [np.arange(row_count)] if owners is None else [np.flatnonzero(owners == k) for k in range(owners.max() + 1)]
    )
    for rows in groups:
        held[rng.permutation(rows)[: min(int(test_share * len(rows) + 0.5), len(rows) - 1)]] = True
    return held


def read_table_dataset(spec: DatasetSpec) -> Dataset:
    """Read the table at the spec's path.

    Options: `label`, the column of labels; `owner`, the column of owners; `test`, a table of test rows or the share of
    each owner's rows for testing; `task`; `drop`, columns to leave out, joined by +.
    """
    assert spec.path is not None
    label, owner = spec.text_option("label", DEFAULT_LABEL), spec.text_option("owner")
    test, task = spec.text_option("test", "0.2"), parse_table_task(spec)
    drop = [name for name in spec.text_option("drop").split("+") if name]
    spec.refuse_unused_options()
    test_share = parse_dataset_number(test)
    if test_share == test_share and not 0 < test_share < 1:
        raise InputError(f"test of 'table' is {test!r}; expected a file, or a share above 0 and below 1.")
    path, text_columns = spec.path, {label, owner}
    columns = _read(path, text_columns)
    _check_named_columns(columns, path, label, owner, drop)
    columns, notes = _labeled(columns, label, path)
    labels = require_text_column(columns[label])
    owners, names = make_table_owners(require_text_column(columns[owner]), str(path), owner) if owner else (None, ())
    if test_share == test_share:
        held, held_name = select_table_test_rows(owners, len(labels), test_share), path.name
        targets = _make_table_targets(labels, task, str(path))
        if not held.any():
            raise InputError(f"{path} has too few rows to hold out a share of {test} for testing.")
        y, test_y = targets.y[~held], targets.y[held]
        owners, test_owners = (None if owners is None else owners[part] for part in (~held, held))
        columns, held_columns = filter_columns(columns, ~held), filter_columns(columns, held)
    else:
        held_columns, more = _labeled(_read(expand_user_path(test), text_columns), label, Path(test))
        notes, held_name = notes + more, Path(test).name
        targets = join_targets_of_tables(
            labels, require_text_column(held_columns[label]), task, f"{path} with {test}", test
        )
        y, test_y = targets.y[: len(labels)], targets.y[len(labels) :]
        test_owners = (
            dataset_owner_positions(require_text_column(held_columns[owner]), names) if owner in held_columns else None
        )
    inputs = [name for name in columns if name not in {label, owner, *drop}]
    x, test_x, more = encode_train_and_test_tables(
        columns, held_columns, inputs, path.name, held_name, spec.rows_not_fitted
    )
    return Dataset(
        Samples(torch.from_numpy(x), torch.from_numpy(y)),
        Samples(torch.from_numpy(test_x), torch.from_numpy(test_y)),
        targets.class_names,
        owners,
        names,
        notes=(*notes, *more),
        test_owners=test_owners,
        fitted=True,
    )


def _check_named_columns(columns: Columns, path: Path, label: str, owner: str, drop: Sequence[str]) -> None:
    """Raise `InputError` unless the table has the columns of the options, each in one role."""
    if label == DEFAULT_LABEL and label not in columns:
        raise InputError(
            f"{path} has no column {label!r}; name the column of labels, as in {path.name},label=NAME. Its columns: "
            f"{format_list(list(columns))}."
        )
    for name in (label, *([owner] if owner else []), *drop):
        if name not in columns:
            raise unknown_name_error(f"column of {path}", name, columns)
    if named := {label, owner} & set(drop):
        raise InputError(f"'table' drops {min(named)!r}, which it also names as label or owner.")


def _read(path: Path, text_columns: set[str]) -> Columns:
    if path.is_dir():
        raise InputError(f"{path} is a folder; expected a CSV or Parquet file.")
    return (
        read_parquet_columns(path, text_columns) if path.suffix == ".parquet" else read_csv_columns(path, text_columns)
    )


def _labeled(columns: Columns, label: str, path: Path) -> tuple[Columns, list[str]]:
    """Return the rows with a label, and a note about the others."""
    if label not in columns:
        raise unknown_name_error(f"column of {path}", label, columns)
    there = np.array([text is not None for text in require_text_column(columns[label])])
    if there.all():
        return columns, []
    if not there.any():
        raise InputError(f"{path} has no row with a label in column {label!r}.")
    return filter_columns(columns, there), [
        f"{path.name}: {np.count_nonzero(~there)} rows without a label were left out."
    ]
