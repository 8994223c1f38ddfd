"""Tables as columns: what a CSV file holds, checked, with numbers told from words."""

import csv
import gzip
import math
import re
import zlib
from collections.abc import Collection, Iterator
from itertools import compress, islice
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError

Numbers = NDArray[np.float64]
Texts = list[str | None]
Column = Numbers | Texts
"""Numbers, NaN where one is missing; or words, None where one is missing."""
Columns = dict[str, Column]

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})
"""What stands for a missing value, in small or capital letters."""

MOST_COLUMNS = 100_000

CHUNK = 4096
"""Rows that are cleaned in one go."""

_SIGNS = frozenset("0123456789+-.eE")


def read_csv(path: Path, words: Collection[str] = ()) -> Columns:
    """The columns of a CSV file, plain or `.gz`; those named in `words` are words even if they look like numbers.

    The first line has the names. What separates the fields, a comma, a semicolon or a tab, is what it has most of.
    """
    try:
        with _open(path) as file:
            return _columns(path, file, words)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _columns(path: Path, file: IO[str], words: Collection[str]) -> Columns:
    first = file.readline(1 << 20)
    separator = max(",;\t", key=first.count)
    file.seek(0)
    rows = _rows(path, file, separator)
    names = check_names(path, next(rows, (0, []))[1])
    held: list[Texts] = [[] for _ in names]
    # One string for equal values: a word that stands in every row is kept once.
    known: list[dict[str, str]] = [{} for _ in names]
    while chunk := list(islice(rows, CHUNK)):
        for line, row in chunk:
            if len(row) != len(names):
                expected = f"expected {len(names)}, as its first line has"
                raise InputError(f"line {line} of {path} has {len(row)} fields; {expected}.")
        for values, seen, fields in zip(held, known, zip(*(row for _, row in chunk), strict=True), strict=True):
            texts = (field.strip() for field in fields)
            values += [None if text.lower() in MISSING else seen.setdefault(text, text) for text in texts]
    if not held[0]:
        raise InputError(f"{path} has no rows below its first line.")
    return {
        name: texts if name in words or (found := to_numbers(texts)) is None else found
        for name, texts in zip(names, held, strict=True)
    }


def _rows(path: Path, file: IO[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """The rows with the number of the line they end in."""
    reader = csv.reader(file, delimiter=separator, strict=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputError(f"line {reader.line_num} of {path} cannot be read: {error}.") from error
        if row is None:
            return
        if row:  # an empty line is no row
            yield reader.line_num, row


def check_names(path: Path, names: list[str]) -> list[str]:
    """The names of a table's columns if they can be told apart."""
    names = [name.strip() for name in names]
    if not names:
        raise InputError(f"{path} is empty; expected names of columns in its first line.")
    if len(names) > MOST_COLUMNS:
        raise InputError(f"{path} has {len(names)} columns; at most {MOST_COLUMNS} can be read.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{path} has two columns called {twice!r}; expected different names in its first line.")
    return names


def as_texts(column: Column) -> Texts:
    """A column that was read as words."""
    assert isinstance(column, list), "asked for as words"
    return column


def pick(columns: Columns, rows: NDArray[np.bool_]) -> Columns:
    """The chosen rows of a table."""
    return {
        name: list(compress(values, rows)) if isinstance(values, list) else values[rows]
        for name, values in columns.items()
    }


def to_numbers(texts: Texts) -> Numbers | None:
    """Words as numbers, if all that are there are numbers and one is there at least."""
    there = [text for text in texts if text is not None]
    # Python would take 1_000, inf and digits of other scripts too.
    if not there or not _SIGNS.issuperset("".join(there)):
        return None
    try:
        return np.array([math.nan if text is None else float(text) for text in texts])
    except ValueError:
        return None


def are_whole(texts: Texts) -> bool:
    """Whether all words are whole numbers, written as such."""
    return all(text is None or re.fullmatch(r"[+-]?\d+", text, flags=re.ASCII) for text in texts)
