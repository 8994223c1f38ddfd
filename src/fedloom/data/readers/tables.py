"""Any table, CSV or Parquet, with a column of labels and perhaps one that says whose a row is.

Columns of a table as network input: numbers standardised, words one-hot, by what the training rows hold.

What a column of labels and a column of owners mean.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset, DatasetSpec, owner_positions, parse_number_option
from fedloom.data.readers.columns import (
    Column,
    Columns,
    Numbers,
    Texts,
    as_texts,
    parse_numeric_column,
    pick,
    read_csv_columns,
    read_parquet_columns,
)
from fedloom.data.samples import Samples
from fedloom.errors import InputError, unknown_name_error
from fedloom.utils.system import expand_user_path


def _are_whole_numbers(texts: Texts) -> bool:
    """Whether all words are whole numbers, written as such."""
    return all(text is None or re.fullmatch(r"[+-]?\d+", text, flags=re.ASCII) for text in texts)


MOST_WORDS = 1000
"""A column of more different words than this is a name or a text, and no category."""

Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class _StandardizedColumn:
    """A column of numbers; a missing one becomes the mean, which is 0 then."""

    mean: float
    std: float

    width = 1

    def encode(self, values: Numbers) -> Matrix:
        scaled = (values - self.mean) / self.std
        return np.nan_to_num(scaled, nan=0.0).astype(np.float32)[:, None]


@dataclass(frozen=True)
class _OneHotColumn:
    """A column of words; a missing or new one has zeros everywhere."""

    words: dict[str, int]

    @property
    def width(self) -> int:
        return len(self.words)

    def encode(self, values: Texts) -> Matrix:
        matrix = np.zeros((len(values), len(self.words)), dtype=np.float32)
        at = np.array([self.words.get(word, -1) if word is not None else -1 for word in values], dtype=np.int64)
        rows = np.flatnonzero(at >= 0)
        matrix[rows, at[rows]] = 1
        return matrix


def encode(
    train: Columns, test: Columns, names: Sequence[str], where: str, tested: str
) -> tuple[Matrix, Matrix, list[str]]:
    """The columns called `names` of both as inputs, and sentences about what was left out, missing or new."""
    encoder = TableEncoder(train, names, where)
    return encoder.encode(train, where), encoder.encode(test, f"test: {tested}"), encoder.notes


class TableEncoder:
    """How the columns called `names` become inputs, learnt from those for training."""

    def __init__(self, columns: Columns, names: Sequence[str], where: str) -> None:
        self._where, self.notes = where, []
        self._parts: dict[str, _StandardizedColumn | _OneHotColumn] = {}
        empty = []
        for name in names:
            values = columns[name]
            if isinstance(values, list):
                part: _StandardizedColumn | _OneHotColumn = self._one_hot(name, values)
            else:
                part = self._standardise(name, values)
            if part.width and not (isinstance(part, _StandardizedColumn) and np.isnan(part.mean)):
                self._parts[name] = part
            else:
                empty.append(name)
        if empty:
            self.notes.append(f"{where}: left out, for all values are missing: {', '.join(empty)}.")
        if not self._parts:
            raise InputError(f"{where} has no column to learn from beside label and owner.")
        numeric = sum(isinstance(part, _StandardizedColumn) for part in self._parts.values())
        self.width = sum(part.width for part in self._parts.values())
        self.notes.append(
            f"{where}: columns of numbers: {numeric}, standardised by all training rows together; of words: "
            f"{len(self._parts) - numeric}, one-hot; inputs: {self.width}."
        )

    def _standardise(self, name: str, values: Numbers) -> _StandardizedColumn:
        there = values[~np.isnan(values)]
        if not len(there):
            return _StandardizedColumn(float("nan"), 1.0)
        # Divided first: the sum of values near the largest float would be infinite.
        scale = float(np.abs(there).max())
        if not np.isfinite(scale):
            raise InputError(f"{self._where} has an infinite value in column {name!r}; expected finite numbers.")
        mean = float((there / scale).mean()) * scale if scale else 0.0
        std = float((there / scale).std()) * scale if scale else 0.0
        # A column that never changes may have a deviation of rounding alone.
        return _StandardizedColumn(mean, std if std > 1e-12 * scale else max(scale, 1.0))

    def _one_hot(self, name: str, values: Texts) -> _OneHotColumn:
        words = sorted({word for word in values if word is not None})
        # A slip of the pen among numbers makes them all words: it must be found.
        strange = [word for word in words if parse_numeric_column([word]) is None]
        slip = f"{strange[0]!r} is no number" if 0 < len(strange) <= len(words) / 2 else ""
        if len(words) > MOST_WORDS:
            raise InputError(
                f"{self._where} has {len(words)} different words in column {name!r}, too many to be categories"
                f"{f' ({slip})' if slip else ''}; leave it out with drop={name}."
            )
        if slip:
            self.notes.append(f"{self._where}: column {name!r} was read as words, for {slip}.")
        return _OneHotColumn({word: position for position, word in enumerate(words)})

    def encode(self, columns: Columns, which: str) -> Matrix:
        """The inputs of all rows; what is missing or new in them is added to `notes`."""
        pieces, missing, new = [], 0, 0
        for name, part in self._parts.items():
            values = columns.get(name)
            if values is None:
                raise InputError(f"{which} has no column {name!r}, which {self._where} has.")
            if isinstance(part, _StandardizedColumn):
                numbers = self._numbers(name, values, which)
                missing += int(np.isnan(numbers).sum())
                pieces.append(part.encode(numbers))
            else:
                texts = self._texts(values)
                missing += texts.count(None)
                new += sum(word is not None and word not in part.words for word in texts)
                pieces.append(part.encode(texts))
        if missing:
            self.notes.append(
                f"{which}: {missing} missing values, read as the column's mean or as none of its categories."
            )
        if new:
            self.notes.append(f"{which}: {new} words that no training row has, read as none of the categories.")
        matrix = np.concatenate(pieces, axis=1)
        if not np.isfinite(matrix).all():
            raise InputError(f"{which} has numbers too far from those of the training rows to be standardised.")
        return matrix

    def _numbers(self, name: str, values: Column, which: str) -> Numbers:
        if not isinstance(values, list):
            return values
        strange = next((value for value in values if value is not None), None)
        if strange is not None:
            raise InputError(f"{which} has {strange!r} in column {name!r}, which holds numbers in {self._where}.")
        return np.full(len(values), np.nan)

    @staticmethod
    def _texts(values: Column) -> Texts:
        if isinstance(values, list):
            return values
        return [None if np.isnan(value) else f"{value:g}" for value in values]


MOST_CLASSES = 1000
"""Above this many different whole numbers nobody can know whether they are classes or quantities."""

TASKS = ("auto", "classification", "regression")


@dataclass(frozen=True)
class TableTargets:
    """Labels as numbers: int64 of n, or for a regression, which has no class names, float32 of n x 1."""

    y: NDArray[np.int64] | NDArray[np.float32]
    class_names: tuple[str, ...]


def parse_table_task(spec: DatasetSpec) -> str:
    """The option `task`."""
    task = spec.text("task", "auto")
    if task not in TASKS:
        raise unknown_name_error("task", task, TASKS)
    return task


def make_table_targets(texts: Texts, task: str, where: str) -> TableTargets:
    """The targets that a column of labels without gaps means: whole numbers and words are classes, others are not."""
    numbers = parse_numeric_column(texts)
    if task == "auto":
        task = "regression" if numbers is not None and not _are_whole_numbers(texts) else "classification"
        if task == "classification" and numbers is not None and len(set(texts)) > MOST_CLASSES:
            raise InputError(
                f"{where} has {len(set(texts))} different whole numbers as labels; say task=regression or "
                "task=classification."
            )
    if task == "regression":
        if numbers is None:
            strange = next(text for text in texts if text is None or parse_numeric_column([text]) is None)
            raise InputError(f"{where} has the label {strange!r}; a regression wants numbers.")
        with np.errstate(over="ignore"):
            y = numbers.astype(np.float32)[:, None]
        if not np.isfinite(y).all():
            raise InputError(f"{where} has labels that are infinite in single precision; expected finite numbers.")
        return TableTargets(y, ())
    names = _sort_unique_texts(texts)
    if len(names) < 2:
        raise InputError(f"{where} has only the label {names[0]!r}; there must be two to tell apart.")
    position = {name: number for number, name in enumerate(names)}
    return TableTargets(np.array([position[str(text)] for text in texts], dtype=np.int64), names)


def join_targets(train: Texts, test: Texts, task: str, where: str, tested: str) -> TableTargets:
    """The targets of both, one after the other; a class that no training row has cannot be tested."""
    targets = make_table_targets(train + test, task, where)
    if targets.class_names and (new := set(test) - set(train)):
        raise InputError(f"{tested} has the label {min(map(str, new))!r}, which no training row has.")
    return targets


def _sort_unique_texts(texts: Texts) -> tuple[str, ...]:
    """The different words, in the order of numbers where all of them are numbers."""
    words = sorted({text for text in texts if text is not None})
    if (numbers := parse_numeric_column(list(words))) is not None:
        return tuple(words[i] for i in np.argsort(numbers, kind="stable"))
    return tuple(words)


def make_table_owners(texts: Texts, where: str, column: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Whose each row is, and the owners' names."""
    if None in texts:
        raise InputError(f"{where} does not say whose row {texts.index(None) + 1} is: {column!r} is missing there.")
    names = _sort_unique_texts(texts)
    position = {name: number for number, name in enumerate(names)}
    return np.array([position[str(text)] for text in texts], dtype=np.int64), names


def select_table_test_rows(owners: NDArray[np.int64] | None, count: int, share: float) -> NDArray[np.bool_]:
    """Which rows are for testing: of each owner's a share, always the same ones; each keeps one to train on."""
    rng = np.random.default_rng(0)
    held = np.zeros(count, dtype=np.bool_)
    groups = [np.arange(count)] if owners is None else [np.flatnonzero(owners == k) for k in range(owners.max() + 1)]
    for rows in groups:
        held[rng.permutation(rows)[: min(int(share * len(rows) + 0.5), len(rows) - 1)]] = True
    return held


def read_table_dataset(spec: DatasetSpec) -> Dataset:
    """The table at the spec's path.

    Options: `label`, the column of labels; `owner`, the column that says whose a row is; `test`, a table of test rows
    or the share of each owner's rows that are for testing; `task`; `drop`, columns to leave out, joined by +.
    """
    assert spec.path is not None
    label, owner, test, task = spec.text("label"), spec.text("owner"), spec.text("test", "0.2"), parse_table_task(spec)
    drop = [name for name in spec.text("drop").split("+") if name]
    spec.done()
    if not label:
        raise InputError(f"'table' wants to know which column holds the labels, as in {spec.name}:PATH,label=NAME.")
    share = parse_number_option(test)
    if share == share and not 0 < share < 1:
        raise InputError(f"test of 'table' is {test!r}; expected a file, or a share above 0 and below 1.")
    path, words = spec.path, {label, owner}
    columns = _read(path, words)
    for name in (label, *([owner] if owner else []), *drop):
        if name not in columns:
            raise unknown_name_error(f"column of {path}", name, columns)
    if named := {label, owner} & set(drop):
        raise InputError(f"'table' drops {min(named)!r}, which it also names as label or owner.")
    columns, notes = _labelled(columns, label, path)
    labels = as_texts(columns[label])
    owners, names = make_table_owners(as_texts(columns[owner]), str(path), owner) if owner else (None, ())
    if share == share:
        held, held_name = select_table_test_rows(owners, len(labels), share), path.name
        targets = make_table_targets(labels, task, str(path))
        if not held.any():
            raise InputError(f"{path} has too few rows to hold out a share of {test} for testing.")
        y, test_y = targets.y[~held], targets.y[held]
        owners, test_owners = (None if owners is None else owners[part] for part in (~held, held))
        columns, held_columns = pick(columns, ~held), pick(columns, held)
    else:
        held_columns, more = _labelled(_read(expand_user_path(test), words), label, Path(test))
        notes, held_name = notes + more, Path(test).name
        targets = join_targets(labels, as_texts(held_columns[label]), task, f"{path} with {test}", test)
        y, test_y = targets.y[: len(labels)], targets.y[len(labels) :]
        test_owners = owner_positions(as_texts(held_columns[owner]), names) if owner in held_columns else None
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
    return read_parquet_columns(path, words) if path.suffix == ".parquet" else read_csv_columns(path, words)


def _labelled(columns: Columns, label: str, path: Path) -> tuple[Columns, list[str]]:
    """The rows that have a label, and a sentence about the others."""
    if label not in columns:
        raise unknown_name_error(f"column of {path}", label, columns)
    there = np.array([text is not None for text in as_texts(columns[label])])
    if there.all():
        return columns, []
    if not there.any():
        raise InputError(f"{path} has no row with a label in column {label!r}.")
    return pick(columns, there), [f"{path.name}: {np.count_nonzero(~there)} rows without a label were left out."]
