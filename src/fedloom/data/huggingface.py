"""Data sets of Hugging Face's that lie on disk: what `save_to_disk` wrote, or Parquet files by split.

The files are read with pyarrow alone: nothing is downloaded, and no code that comes with a data set is run.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.arrow import read_arrow, to_column
from fedloom.data.columns import Columns, Texts
from fedloom.data.content import Content, positions
from fedloom.data.features import Encoder
from fedloom.data.leaf import read_json
from fedloom.data.own_images import read_size
from fedloom.data.pictures import decode
from fedloom.data.samples import Samples
from fedloom.data.spec import Spec, number
from fedloom.data.targets import Targets, make_owners, make_targets, task_of, test_rows
from fedloom.data.words import LONGEST, Wording
from fedloom.errors import InputError, unknown

TESTS = ("test", "validation", "valid", "dev")
TEXT_NAMES = ("text", "sentence", "content")
LABEL_NAMES = ("label", "labels", "fine_label", "target")


def read_hf(spec: Spec) -> Content:
    """The data set at the spec's path.

    Options: `label`, `owner` and `input`, columns; `train` and `test`, splits, or `test` the share of each owner's rows
    that are for testing; `task`; `size` of images; `length`, `words`, `vocabulary` and `lower` of texts; `drop`.
    """
    assert spec.path is not None
    options = Options(
        spec.path,
        label=spec.text("label"),
        owner=spec.text("owner"),
        input=spec.text("input"),
        drop=[name for name in spec.text("drop").split("+") if name],
        task=task_of(spec),
        size=read_size(spec),
        wording=Wording.of(spec),
    )
    wanted, tested = spec.text("train", "train"), spec.text("test")
    spec.done()
    splits = find_splits(spec.path)
    if wanted not in splits:
        raise unknown(f"split of {spec.path}", wanted, splits)
    share = number(tested) if tested else (0.2 if not set(TESTS) & splits.keys() else np.nan)
    if np.isnan(share):
        other = tested or next(name for name in TESTS if name in splits)
        if other not in splits:
            raise unknown(f"split of {spec.path}", other, splits)
        tables = [read_arrow(splits[wanted]), read_arrow(splits[other])]
        if tables[0].column_names != tables[1].column_names:
            raise InputError(f"{spec.path} has other columns in {other!r} than in {wanted!r}.")
        return Reader(options, tables[0], tables[1]).read()
    if not 0 < share < 1:
        raise InputError(f"test of 'hf' is {tested!r}; expected a split, or a share above 0 and below 1.")
    table = read_arrow(splits[wanted])
    whole = Reader(options, table, table)
    held = test_rows(whole.owners, table.num_rows, share)
    return Reader(options, table.filter(~held), table.filter(held)).read()


@dataclass(frozen=True)
class Options:
    """What a person says about the data set."""

    path: Path
    label: str
    owner: str
    input: str
    drop: list[str]
    task: str
    size: int | None
    wording: Wording


def find_splits(path: Path) -> dict[str, list[Path]]:
    """The files of each split in a folder."""
    if path.is_file() and path.suffix in (".parquet", ".arrow"):
        return {"train": [path]}
    if not path.is_dir():
        raise InputError(f"{path} is not a folder; hf:PATH wants one that holds a data set.")
    if (path / "dataset_dict.json").is_file():
        content = read_json(path / "dataset_dict.json")
        names = content.get("splits") if isinstance(content, dict) else None
        if not isinstance(names, list) or not names or not all(_plain(name) for name in names):
            raise InputError(f"{path / 'dataset_dict.json'} does not list splits.")
        return {name: _saved(path / name) for name in names}
    if (path / "state.json").is_file():
        return {"train": _saved(path)}
    splits: dict[str, list[Path]] = {}
    for file in sorted((*path.glob("*.parquet"), *path.glob("data/*.parquet"), *path.glob("*/*/*.parquet"))):
        inside = file.parent.name if re.fullmatch(r"\d+\.parquet", file.name) else file.stem.partition("-")[0]
        splits.setdefault(inside, []).append(file)
    if not splits:
        raise InputError(f"{path} holds neither what save_to_disk writes nor files like train-00000-of-00001.parquet.")
    return splits


def _plain(name: Any) -> bool:
    """Whether a name leads nowhere but into the folder it is looked for in."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set("/\\\0") & set(name)


def _saved(folder: Path) -> list[Path]:
    content = read_json(folder / "state.json")
    files = content.get("_data_files") if isinstance(content, dict) else None
    names = (
        [each.get("filename") if isinstance(each, dict) else None for each in files] if isinstance(files, list) else []
    )
    if not names or not all(_plain(name) for name in names):
        raise InputError(f"{folder / 'state.json'} does not list data files.")
    return [folder / str(name) for name in names]


class Reader:
    """One table for training and one for testing, of the same columns."""

    def __init__(self, options: Options, train: Any, test: Any) -> None:
        self.options, self.tables = options, (train, test)
        for which, table in zip(("train", "test"), self.tables, strict=True):
            if not table.num_rows:
                raise InputError(f"{options.path} has no rows to {which} with.")
        self.names: list[str] = train.column_names
        self.features = _features(train.schema)
        self.label = options.label or self._guess_label()
        for name in (self.label, *([options.owner] if options.owner else []), *options.drop):
            if name not in self.names:
                raise unknown(f"column of {options.path}", name, self.names)
        self.owners: NDArray[np.int64] | None = None
        self.test_owners: NDArray[np.int64] | None = None
        self.owner_names: tuple[str, ...] = ()
        if options.owner:
            self.owners, self.owner_names = make_owners(
                self._words(options.owner, train), str(options.path), options.owner
            )
            self.test_owners = positions(self._words(options.owner, test), self.owner_names)

    def read(self) -> Content:
        """What the tables hold."""
        count, tokens, notes = self.tables[0].num_rows, 0, []
        targets = self._targets()
        names = [name for name in self.options.input.split("+") if name] or self._guess_inputs()
        for name in names:
            if name not in self.names:
                raise unknown(f"column of {self.options.path}", name, self.names)
        kind = self._kind(names[0]) if len(names) == 1 else "features"
        x: NDArray[Any]
        test_x: NDArray[Any]
        if kind == "image":
            x, test_x = self._images(names[0])
        elif kind == "text":
            texts = [[text or "" for text in self._words(names[0], table)] for table in self.tables]
            x, test_x, tokens, note = self.options.wording.tokens(texts[0], texts[1], self.options.path.name)
            notes.append(note)
        elif kind == "list":
            x, test_x = self._lists(names[0])
            tokens = 1 + int(max(x.max(), test_x.max())) if np.issubdtype(x.dtype, np.integer) else 0
        else:
            x, test_x, notes = self._table(names)
        train = Samples(torch.from_numpy(x), torch.from_numpy(targets.y[:count]))
        test = Samples(torch.from_numpy(test_x), torch.from_numpy(targets.y[count:]))
        return Content(
            train,
            test,
            targets.class_names,
            self.owners,
            self.owner_names,
            notes=tuple(notes),
            tokens=tokens,
            test_owners=self.test_owners,
        )

    def _guess_label(self) -> str:
        marked = [name for name in self.names if _is(self.features.get(name), "ClassLabel")]
        named = [name for name in LABEL_NAMES if name in self.names]
        found = marked if len(marked) == 1 else named
        if not found:
            raise InputError(f"{self.options.path} does not say which column holds the labels; say label=NAME.")
        return found[0]

    def _targets(self) -> Targets:
        """The labels of both tables, one after the other."""
        where = str(self.options.path)
        labels = [self._words(self.label, table) for table in self.tables]
        if any(None in part for part in labels):
            raise InputError(f"{where} has rows without a label in column {self.label!r}.")
        names = self.features.get(self.label, {}).get("names")
        if (
            _is(self.features.get(self.label), "ClassLabel")
            and isinstance(names, list)
            and self.options.task != "regression"
        ):
            y = [int(text) if re.fullmatch(r"\d{1,9}", text) else -1 for part in labels for text in map(str, part)]
            if min(y) < 0 or max(y) >= len(names):
                raise InputError(f"{where} has labels that are not among its {len(names)} class names.")
            return Targets(np.array(y, dtype=np.int64), tuple(map(str, names)))
        targets = make_targets(labels[0] + labels[1], self.options.task, where)
        if targets.class_names and (new := set(labels[1]) - set(labels[0])):
            raise InputError(f"{where} tests the label {sorted(map(str, new))[0]!r}, which no training row has.")
        return targets

    def _guess_inputs(self) -> list[str]:
        left = [name for name in self.names if name not in {self.label, self.options.owner, *self.options.drop}]
        images = [name for name in left if self._kind(name) == "image"]
        texts = [name for name in TEXT_NAMES if name in left and self._kind(name) == "text"]
        return images[:1] or texts[:1] or left

    def _kind(self, name: str) -> str:
        import pyarrow.types as kinds

        kind = self.tables[0].schema.field(name).type
        if _is(self.features.get(name), "Image") or kinds.is_binary(kind) or kinds.is_large_binary(kind):
            return "image"
        if kinds.is_string(kind) or kinds.is_large_string(kind):
            return "text"
        if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
            return "list"
        return "features"

    def _words(self, name: str, table: Any) -> Texts:
        column = to_column(table.column(name), name, True, self.options.path)
        assert isinstance(column, list), "asked for as words"
        return column

    def _images(self, name: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        both = [self._decode(table.column(name), f"column {name!r} of {self.options.path}") for table in self.tables]
        if all((x[..., :1] == x).all() for x in both):  # grey
            both = [np.ascontiguousarray(x[..., :1]) for x in both]
        if both[0].shape[1:] != both[1].shape[1:]:
            raise InputError(f"{self.options.path} has test images of another size; say size=PIXELS.")
        return both[0], both[1]

    def _decode(self, column: Any, where: str) -> NDArray[np.uint8]:
        def content(row: int) -> bytes:
            value = column[row].as_py()
            held = value.get("bytes") if isinstance(value, dict) else value
            if not isinstance(held, bytes):
                raise InputError(
                    f"row {row + 1} in {where} does not hold its image; save the data set with images in it."
                )
            return held

        return decode(len(column), content, lambda row: f"row {row + 1} in {where}", self.options.size)

    def _lists(self, name: str) -> tuple[Any, Any]:
        """Lists of whole numbers are tokens, short ones filled with 0; lists of other numbers must be equally long."""
        import pyarrow.types as kinds

        where = f"{self.options.path}, column {name!r}"
        inner = self.tables[0].schema.field(name).type.value_type
        both = [table.column(name).to_pylist() for table in self.tables]
        if not (kinds.is_integer(inner) or kinds.is_floating(inner)) or any(
            row is None or None in row for part in both for row in part
        ):
            raise InputError(f"{where}: expected lists of numbers without gaps.")
        longest = max(len(row) for part in both for row in part)
        if not 0 < longest <= LONGEST:
            raise InputError(f"{where} has lists of up to {longest} numbers; expected 1 to {LONGEST}.")
        if kinds.is_integer(inner):
            if any(row and min(row) < 0 for part in both for row in part):
                raise InputError(f"{where} has tokens below 0.")
            x, test_x = (np.array([row + [0] * (longest - len(row)) for row in part], dtype=np.int64) for part in both)
            return x, test_x
        if min(len(row) for part in both for row in part) < longest:
            raise InputError(f"{where} has lists of different lengths; expected equal ones.")
        arrays = [np.array(part, dtype=np.float32) for part in both]
        if not all(np.isfinite(part).all() for part in arrays):
            raise InputError(f"{where} has numbers that are not finite.")
        return arrays[0], arrays[1]

    def _table(self, names: list[str]) -> tuple[Any, Any, list[str]]:
        path = self.options.path
        columns: list[Columns] = [
            {name: to_column(table.column(name), name, False, path) for name in names} for table in self.tables
        ]
        encoder = Encoder(columns[0], names, np.arange(self.tables[0].num_rows), path.name)
        x = encoder.encode(columns[0], np.arange(self.tables[0].num_rows), path.name)
        test_x = encoder.encode(columns[1], np.arange(self.tables[1].num_rows), f"test: {path.name}")
        return x, test_x, encoder.notes


def _is(feature: Any, kind: str) -> bool:
    return isinstance(feature, dict) and feature.get("_type") == kind


def _features(schema: Any) -> dict[str, Any]:
    """What the file says about its columns, where it was written by the library."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return (
        {name: feature for name, feature in found.items() if isinstance(feature, dict)}
        if isinstance(found, dict)
        else {}
    )
