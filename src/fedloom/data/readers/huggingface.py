"""Read Hugging Face data sets: `save_to_disk` files, or Parquet files by split.

Only pyarrow reads the files: nothing is downloaded, and no code of a data set is executed.
"""

import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.dataset import Dataset, DatasetSpec, dataset_owner_positions, parse_dataset_number
from fedloom.data.readers.columns import Texts, pyarrow_to_column, read_pyarrow_columns, require_text_column
from fedloom.data.readers.images import decode_images, parse_image_size
from fedloom.data.readers.tables import (
    TableTargets,
    encode_train_and_test_tables,
    join_targets_of_tables,
    make_table_owners,
    parse_table_task,
    select_table_test_rows,
)
from fedloom.data.readers.text import LONGEST, TextTokenizer
from fedloom.data.samples import Samples
from fedloom.errors import InputError, unknown_name_error
from fedloom.utils.storage import parse_json_file

TESTS = ("test", "validation", "valid", "dev")
TEXT_NAMES = ("text", "sentence", "content")
LABEL_NAMES = ("label", "labels", "fine_label", "target")

Arrays = tuple[NDArray[Any], NDArray[Any]]
"""Training inputs and test inputs."""


def read_huggingface_dataset(spec: DatasetSpec) -> Dataset:
    """Read the data set at the spec's path.

    Options: the columns `label`, `owner` and `input`; the splits `train` and `test`, or `test` as the share of each
    owner's rows; `task`; `size` of images; `length`, `words`, `vocabulary` and `lower` of texts; `drop`.
    """
    assert spec.path is not None
    path, label, owner = spec.path, spec.text_option("label"), spec.text_option("owner")
    inputs, drop = ([name for name in spec.text_option(key).split("+") if name] for key in ("input", "drop"))
    task, size, tokenizer = parse_table_task(spec), parse_image_size(spec), TextTokenizer.from_spec(spec)
    train_split, test_split = spec.text_option("train", "train"), spec.text_option("test")
    spec.refuse_unused_options()
    train, test, test_share = _open(path, train_split, test_split)
    features = _features(train.schema)
    kinds = {field.name: _kind(field.type, features.get(field.name, {})) for field in train.schema}
    label = label or _guess_label(path, kinds, features)
    for name in (label, *([owner] if owner else []), *drop, *inputs):
        if name not in kinds:
            raise unknown_name_error(f"column of {path}", name, kinds)

    words = _words(train, test, owner, path) if owner else ([], [])
    owners, owner_names = make_table_owners(words[0], str(path), owner) if owner else (None, ())
    test_owners = dataset_owner_positions(words[1], owner_names) if owner else None
    if test_share:
        held = select_table_test_rows(owners, train.num_rows, test_share)
        train, test = train.filter(~held), train.filter(held)
        owners, test_owners = (None if owners is None else owners[part] for part in (~held, held))
    if not test.num_rows:
        raise InputError(f"{path} has no rows to test with.")
    targets = _targets(_words(train, test, label, path), features.get(label, {}), task, f"column {label!r} of {path}")

    left = [name for name in kinds if name not in {label, owner, *drop}]
    images = [name for name in left if kinds[name] == "image"]
    texts = [name for name in TEXT_NAMES if name in left and kinds[name] == "text"]
    inputs = inputs or images[:1] or texts[:1] or left
    x, test_x, vocabulary_size, notes = _read_inputs(
        train, test, inputs, kinds, path, size, tokenizer, spec.rows_not_fitted
    )
    count = len(x)
    return Dataset(
        Samples(torch.from_numpy(x), torch.from_numpy(targets.y[:count])),
        Samples(torch.from_numpy(test_x), torch.from_numpy(targets.y[count:])),
        targets.class_names,
        owners,
        owner_names,
        notes=tuple(notes),
        vocabulary_size=vocabulary_size,
        test_owners=test_owners,
        fitted=len(inputs) > 1 or kinds[inputs[0]] not in ("image", "list", "text"),
    )


def _words(train: Any, test: Any, name: str, path: Path) -> tuple[Texts, Texts]:
    """Return a column of both tables as words."""
    first, second = (pyarrow_to_column(table.column(name), name, True, path) for table in (train, test))
    return require_text_column(first), require_text_column(second)


def _read_inputs(
    train: Any,
    test: Any,
    inputs: list[str],
    kinds: dict[str, str],
    path: Path,
    size: int | None,
    tokenizer: TextTokenizer,
    rows_not_fitted: NDArray[np.int64] | None,
) -> tuple[NDArray[Any], NDArray[Any], int, list[str]]:
    """Return training inputs, test inputs, the vocabulary size and notes: of one column, or of features together."""
    name = inputs[0] if len(inputs) == 1 else ""
    kind, source = kinds.get(name, "features"), f"column {name!r} of {path}"
    if kind == "image":
        return *_images(train.column(name), test.column(name), size, source), 0, []
    if kind == "list":
        x, test_x = _lists(train.column(name), test.column(name), source)
        return x, test_x, 1 + int(max(x.max(), test_x.max())) if np.issubdtype(x.dtype, np.integer) else 0, []
    if kind == "text":
        said, test_said = ([text or "" for text in part] for part in _words(train, test, name, path))
        x, test_x, vocabulary_size, note = tokenizer.tokenize(said, test_said, path.name)
        return x, test_x, vocabulary_size, [note]
    columns, test_columns = (
        {name: pyarrow_to_column(table.column(name), name, False, path) for name in inputs} for table in (train, test)
    )
    x, test_x, notes = encode_train_and_test_tables(
        columns, test_columns, inputs, path.name, path.name, rows_not_fitted
    )
    return x, test_x, 0, notes


def _open(path: Path, train_split: str, test_split: str) -> tuple[Any, Any, float]:
    """Return the training and the test table; or one table twice, and the share of its rows for testing."""
    splits = _find_split_files(path)
    test_share = parse_dataset_number(test_split) if test_split else math.nan if set(TESTS) & splits.keys() else 0.2
    other = test_split or next(name for name in TESTS if name in splits) if math.isnan(test_share) else train_split
    for name in (train_split, other):
        if name not in splits:
            raise unknown_name_error(f"split of {path}", name, splits)
    if not math.isnan(test_share) and not 0 < test_share < 1:
        raise InputError(f"test of 'hf' is {test_split!r}; expected a split, or a share above 0 and below 1.")
    train = read_pyarrow_columns(splits[train_split])
    if not train.num_rows:
        raise InputError(f"{path} has no rows to train with.")
    if not math.isnan(test_share):
        return train, train, test_share
    test = read_pyarrow_columns(splits[other])
    if train.column_names != test.column_names:
        raise InputError(f"{path} has other columns in {other!r} than in {train_split!r}.")
    return train, test, 0.0


def _find_split_files(path: Path) -> dict[str, list[Path]]:
    """Return the files of each split in a folder."""
    if path.is_file() and path.suffix in (".parquet", ".arrow"):
        return {"train": [path]}
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; hf:PATH wants one that holds a data set.")
    if (path / "dataset_dict.json").is_file():
        return {name: _saved(path / name) for name in _listed(path / "dataset_dict.json", "splits")}
    if (path / "state.json").is_file():
        return {"train": _saved(path)}
    splits: dict[str, list[Path]] = {}
    for file in sorted((*path.glob("*.parquet"), *path.glob("data/*.parquet"), *path.glob("*/*/*.parquet"))):
        inside = file.parent.name if re.fullmatch(r"\d+\.parquet", file.name) else file.stem.partition("-")[0]
        splits.setdefault(inside, []).append(file)
    if not splits:
        raise InputError(f"{path} holds neither what save_to_disk writes nor files like train-00000-of-00001.parquet.")
    return splits


def _saved(folder: Path) -> list[Path]:
    return [folder / name for name in _listed(folder / "state.json", "_data_files")]


def _listed(path: Path, key: str) -> list[str]:
    """Return the file names that a JSON file lists, as texts or as `filename` of an entry; none may be a path."""
    content = parse_json_file(path)
    listed = content.get(key) if isinstance(content, dict) else None
    entries = listed if isinstance(listed, list) else []
    names = [each.get("filename") if isinstance(each, dict) else each for each in entries]
    plain = [
        name for name in names if isinstance(name, str) and name not in ("", ".", "..") and not set("/\\\0") & set(name)
    ]
    if not plain or len(plain) < len(names):
        raise InputError(f"{path} does not list {key.strip('_').replace('_', ' ')}.")
    return plain


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Return the features in the metadata that the `datasets` library writes."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in found.items() if isinstance(feature, dict)}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return {}


def _kind(kind: Any, feature: dict[str, Any]) -> str:
    """Return what a column holds: `image`, `text`, `list`, or `features` (numbers and words)."""
    name = str(kind).removeprefix("large_")
    if feature.get("_type") == "Image" or name == "binary":
        return "image"
    return "text" if name == "string" else "list" if name.startswith(("list<", "fixed_size_list<")) else "features"


def _guess_label(path: Path, names: Collection[str], features: dict[str, dict[str, Any]]) -> str:
    marked = [name for name in names if features.get(name, {}).get("_type") == "ClassLabel"]
    found = marked if len(marked) == 1 else [name for name in LABEL_NAMES if name in names]
    if not found:
        raise InputError(f"{path} does not say which column holds the labels; say label=NAME.")
    return found[0]


def _targets(labels: tuple[Texts, Texts], feature: dict[str, Any], task: str, source: str) -> TableTargets:
    """Return the training labels followed by the test labels."""
    if None in labels[0] or None in labels[1]:
        raise InputError(f"{source} has rows without a label.")
    names = feature.get("names")
    if feature.get("_type") != "ClassLabel" or not isinstance(names, list) or task == "regression":
        return join_targets_of_tables(*labels, task, source, f"the test part of {source}")
    y = [int(text) if re.fullmatch(r"\d{1,9}", text) else -1 for part in labels for text in map(str, part)]
    if min(y) < 0 or max(y) >= len(names):
        raise InputError(f"{source} has labels that are not among its {len(names)} class names.")
    return TableTargets(np.array(y, dtype=np.int64), tuple(map(str, names)))


def _images(train: Any, test: Any, size: int | None, source: str) -> Arrays:
    """Decode the images, which must have one size; they get one channel if all are gray."""
    count = len(train)

    def name(row: int) -> str:
        return f"row {row + 1} in {source}" if row < count else f"test row {row - count + 1} in {source}"

    def content(row: int) -> bytes:
        value = (train[row] if row < count else test[row - count]).as_py()
        held = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(held, bytes):
            raise InputError(f"{name(row)} does not hold its image; save the data set with images in it.")
        return held

    x = decode_images(count + len(test), content, name, size)
    if (x[..., :1] == x).all():
        x = np.ascontiguousarray(x[..., :1])
    return x[:count], x[count:]


def _lists(train: Any, test: Any, source: str) -> Arrays:
    """Convert lists: whole numbers are tokens, padded with 0; lists of floats must have equal lengths."""
    import pyarrow.types as kinds

    inner = train.type.value_type
    rows = train.to_pylist() + test.to_pylist()
    if not (kinds.is_integer(inner) or kinds.is_floating(inner)) or any(row is None or None in row for row in rows):
        raise InputError(f"{source}: expected lists of numbers without gaps.")
    longest = max(map(len, rows))
    if not 0 < longest <= LONGEST:
        raise InputError(f"{source} has lists of up to {longest} numbers; expected 1 to {LONGEST}.")
    if kinds.is_integer(inner):
        if any(row and min(row) < 0 for row in rows):
            raise InputError(f"{source} has tokens below 0.")
        rows = [row + [0] * (longest - len(row)) for row in rows]
    elif min(map(len, rows)) < longest:
        raise InputError(f"{source} has lists of different lengths; expected equal ones.")
    x = np.array(rows, dtype=np.int64 if kinds.is_integer(inner) else np.float32)
    if not np.isfinite(x).all():
        raise InputError(f"{source} has numbers that are not finite.")
    return x[: len(train)], x[len(train) :]
