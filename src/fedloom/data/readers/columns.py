"""Read CSV, Parquet and Arrow files as columns of numbers or words.

Parquet and Arrow need pyarrow, an optional dependency (`fedloom[tables]`).
"""

import csv
import gzip
import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from itertools import compress, islice
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import InputError, first_line_of_error

Numbers = NDArray[np.float64]
Texts = list[str | None]
Column = Numbers | Texts
"""Numbers with NaN for a missing value, or words with None."""
Columns = dict[str, Column]

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-"})
"""Texts that mean a missing value; case does not matter."""

MOST_COLUMNS = 100_000

CHUNK = 4096
"""Rows that are cleaned at once."""

_SIGNS = frozenset("0123456789+-.eE")


def read_csv_columns(path: Path, text_columns: Collection[str] = ()) -> Columns:
    """Read the columns of a CSV file, plain or `.gz`; `text_columns` stay words even if they look like numbers.

    The first line has the names. The separator is the most frequent one of comma, semicolon and tab in it.
    """
    try:
        with _open(path) as file:
            return _columns(path, file, text_columns)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _columns(path: Path, file: IO[str], text_columns: Collection[str]) -> Columns:
    first = file.readline(1 << 20)
    separator = max(",;\t", key=first.count)
    file.seek(0)
    rows = _rows(path, file, separator)
    names = _check_column_names(path, next(rows, (0, []))[1])
    held: list[Texts] = [[] for _ in names]
    # Share one string between equal values, to save memory.
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
        name: texts if name in text_columns or (found := parse_numeric_column(texts)) is None else found
        for name, texts in zip(names, held, strict=True)
    }


def _rows(path: Path, file: IO[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows, each with the number of its last line."""
    reader = csv.reader(file, delimiter=separator, strict=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputError(f"line {reader.line_num} of {path} cannot be read: {error}.") from error
        if row is None:
            return
        if row:  # skip empty lines
            yield reader.line_num, row


def _check_column_names(path: Path, names: list[str]) -> list[str]:
    """Return the stripped column names, and check that they differ."""
    names = [name.strip() for name in names]
    if not names:
        raise InputError(f"{path} is empty; expected names of columns in its first line.")
    if len(names) > MOST_COLUMNS:
        raise InputError(f"{path} has {len(names)} columns; at most {MOST_COLUMNS} can be read.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{path} has two columns called {twice!r}; expected different names in its first line.")
    return names


def require_text_column(column: Column) -> Texts:
    """Return a column that was read as words."""
    assert isinstance(column, list), "asked for as words"
    return column


def filter_columns(columns: Columns, rows: NDArray[np.bool_]) -> Columns:
    """Return the chosen rows of a table."""
    return {
        name: list(compress(values, rows)) if isinstance(values, list) else values[rows]
        for name, values in columns.items()
    }


def parse_numeric_column(texts: Texts) -> Numbers | None:
    """Convert words to numbers; return None if one of them is not a number or all are missing."""
    there = [text for text in texts if text is not None]
    # float() would accept 1_000, inf and digits of other scripts too.
    if not there or not _SIGNS.issuperset("".join(there)):
        return None
    try:
        return np.array([math.nan if text is None else float(text) for text in texts])
    except ValueError:
        return None


FILE_MARK = b"ARROW1"
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def _import_pyarrow(path: Path) -> ModuleType:
    """Import pyarrow, or raise an error that says how to install it."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path} can only be read with pyarrow: pip install 'fedloom[tables]'.") from None
    module: ModuleType = pyarrow
    return module


def read_pyarrow_columns(paths: Sequence[Path]) -> Any:
    """Read all rows of these files (`.parquet`, or `.arrow` as a stream or a file) into one pyarrow table."""
    arrow = _import_pyarrow(paths[0])
    tables = []
    for path in paths:
        try:
            table = (
                arrow.parquet.read_table(path, partitioning=None) if path.suffix == ".parquet" else _ipc(arrow, path)
            )
            table.validate(full=True)
        except (arrow.ArrowException, OSError, ValueError, MemoryError) as error:
            raise InputError(f"{path} is truncated or broken: {first_line_of_error(error)}.") from error
        tables.append(table)
        if not table.schema.equals(tables[0].schema):
            raise InputError(f"{path} has other columns, or columns of other types, than {paths[0].name}.")
    _check_column_names(paths[0], tables[0].column_names)
    return arrow.concat_tables(tables)


def _ipc(arrow: ModuleType, path: Path) -> Any:
    with path.open("rb") as file:
        start = file.read(len(FILE_MARK))
        file.seek(max(0, path.stat().st_size - len(STREAM_END)))
        end = file.read()
    if start != FILE_MARK and end != STREAM_END:
        # pyarrow does not notice that a stream was cut off between two batches.
        raise InputError(f"{path} is truncated or broken: the mark at the end of an Arrow stream is missing.")
    with arrow.memory_map(str(path)) as source:
        reader = arrow.ipc.open_file(source) if start == FILE_MARK else arrow.ipc.open_stream(source)
        return reader.read_all()


def read_parquet_columns(path: Path, text_columns: Collection[str] = ()) -> Columns:
    """Read the columns of a Parquet file; `text_columns` become words even if they are numbers."""
    if not path.is_file():
        raise InputError(f"cannot read {path}: No such file.")
    table = read_pyarrow_columns([path])
    if not table.num_rows:
        raise InputError(f"{path} has no rows.")
    return {
        name: pyarrow_to_column(table.column(name), name, name in text_columns, path) for name in table.column_names
    }


def pyarrow_to_column(values: Any, name: str, as_text: bool, path: Path) -> Column:
    """Convert a pyarrow column to numbers or words."""
    import pyarrow.types as kinds

    kind = values.type
    if kinds.is_dictionary(kind):
        kind, values = kind.value_type, values.cast(kind.value_type)
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return list(values.to_pylist())
    whole = kinds.is_integer(kind) or kinds.is_boolean(kind)
    if not (whole or kinds.is_floating(kind) or kinds.is_decimal(kind) or kinds.is_null(kind)):
        raise InputError(f"{path} has values of type {kind} in column {name!r}; leave it out with drop={name}.")
    plain = values.to_pylist()
    if as_text:
        if kinds.is_boolean(kind):
            return [None if value is None else str(value) for value in plain]
        return [None if value is None or value != value else str(value if whole else float(value)) for value in plain]
    return np.array([np.nan if value is None else value for value in plain], dtype=np.float64)
