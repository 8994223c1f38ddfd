"""Parquet and Arrow files as columns. pyarrow reads them; it is an extra, and asked for by name where it is missing."""

from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedloom.data.columns import Column, Columns, check_names
from fedloom.errors import InputError

FILE_MARK = b"ARROW1"
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def need_pyarrow(path: Path) -> ModuleType:
    """pyarrow, or a sentence that says how to get it."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path} can only be read with pyarrow: pip install 'fedloom[tables]'.") from None
    module: ModuleType = pyarrow
    return module


def read_arrow(paths: Sequence[Path]) -> Any:
    """One pyarrow table of all rows of these files: `.parquet`, or `.arrow` as a stream or a file."""
    arrow = need_pyarrow(paths[0])
    tables = []
    for path in paths:
        try:
            table = (
                arrow.parquet.read_table(path, partitioning=None) if path.suffix == ".parquet" else _ipc(arrow, path)
            )
            table.validate(full=True)
        except (arrow.ArrowException, OSError, ValueError, MemoryError) as error:
            raise InputError(f"{path} is truncated or broken: {_first_line(error)}.") from error
        tables.append(table)
        if not table.schema.equals(tables[0].schema):
            raise InputError(f"{path} has other columns, or columns of other types, than {paths[0].name}.")
    check_names(paths[0], tables[0].column_names)
    return arrow.concat_tables(tables)


def _ipc(arrow: ModuleType, path: Path) -> Any:
    with path.open("rb") as file:
        start = file.read(len(FILE_MARK))
        file.seek(max(0, path.stat().st_size - len(STREAM_END)))
        end = file.read()
    if start != FILE_MARK and end != STREAM_END:
        # pyarrow takes a stream that was cut off between two batches for a shorter one.
        raise InputError(f"{path} is truncated or broken: the mark at the end of an Arrow stream is missing.")
    with arrow.memory_map(str(path)) as source:
        reader = arrow.ipc.open_file(source) if start == FILE_MARK else arrow.ipc.open_stream(source)
        return reader.read_all()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def read_parquet(path: Path, words: Collection[str] = ()) -> Columns:
    """The columns of a Parquet file; those named in `words` are words even if they are numbers."""
    if not path.is_file():
        raise InputError(f"cannot read {path}: No such file.")
    table = read_arrow([path])
    if not table.num_rows:
        raise InputError(f"{path} has no rows.")
    return {name: to_column(table.column(name), name, name in words, path) for name in table.column_names}


def to_column(values: Any, name: str, as_words: bool, where: Path) -> Column:
    """A pyarrow column as numbers or words."""
    import pyarrow.types as kinds

    kind = values.type
    if kinds.is_dictionary(kind):
        kind, values = kind.value_type, values.cast(kind.value_type)
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        return list(values.to_pylist())
    whole = kinds.is_integer(kind) or kinds.is_boolean(kind)
    if not (whole or kinds.is_floating(kind) or kinds.is_decimal(kind) or kinds.is_null(kind)):
        raise InputError(f"{where} has values of type {kind} in column {name!r}; leave it out with drop={name}.")
    plain = values.to_pylist()
    if as_words:
        if kinds.is_boolean(kind):
            return [None if value is None else str(value) for value in plain]
        return [None if value is None or value != value else str(value if whole else float(value)) for value in plain]
    return np.array([np.nan if value is None else value for value in plain], dtype=np.float64)
