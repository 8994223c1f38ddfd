"""Tests that read the files that Hugging Face `datasets` writes."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.data import load_dataset
from fedloom.data.readers.huggingface import _find_split_files
from fedloom.errors import InputError

pa = pytest.importorskip("pyarrow")
Image = pytest.importorskip("PIL.Image")


def schema_of(table: Any, features: dict[str, Any] | None) -> Any:
    """With the note that `datasets` leaves in a file."""
    if features is None:
        return table
    return table.replace_schema_metadata({b"huggingface": json.dumps({"info": {"features": features}}).encode()})


def save_split(folder: Path, columns: dict[str, Any], features: dict[str, Any] | None = None, shards: int = 1) -> Path:
    """What `Dataset.save_to_disk` writes: Arrow streams, and `state.json` that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    table = schema_of(pa.table(columns), features)
    names = [f"data-{k:05d}-of-{shards:05d}.arrow" for k in range(shards)]
    size = -(-table.num_rows // shards)
    for k, name in enumerate(names):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table.slice(k * size, size))
    state = {"_data_files": [{"filename": name} for name in names], "_split": folder.name, "_fingerprint": "0"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features or {}}))
    return folder


def save(folder: Path, splits: dict[str, dict[str, Any]], features: dict[str, Any] | None = None) -> Path:
    """What `DatasetDict.save_to_disk` writes."""
    for name, columns in splits.items():
        save_split(folder / name, columns, features)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def parquet(path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None) -> Path:
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(schema_of(pa.table(columns), features), path)
    return path


def png(pixels: np.ndarray) -> dict[str, Any]:
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "PNG")
    return {"bytes": held.getvalue(), "path": None}


def pictures(count: int, channels: int, seed: int = 0) -> np.ndarray:
    shape = (count, 6, 5) if channels == 1 else (count, 6, 5, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


LABELS = {"_type": "ClassLabel", "names": ["cat", "dog", "cow"]}
IMAGES = {"image": {"_type": "Image"}, "label": LABELS}


@pytest.mark.parametrize("channels", [1, 3])
def test_images_by_split(tmp_path: Path, channels: int) -> None:
    parts = {"train": pictures(4, channels), "test": pictures(2, channels, 1)}
    labels = {"train": [0, 2, 1, 0], "test": [2, 0]}
    save(tmp_path, {k: {"image": [png(x) for x in v], "label": labels[k]} for k, v in parts.items()}, IMAGES)
    data = load_dataset(f"hf:{tmp_path}")
    assert data.class_names == ("cat", "dog", "cow")
    assert data.shape == (channels, 6, 5)
    assert np.array_equal(data.train.x.numpy(), parts["train"].reshape(4, 6, 5, channels))
    assert np.array_equal(data.test.x.numpy(), parts["test"].reshape(2, 6, 5, channels))
    assert (data.train.y.tolist(), data.test.y.tolist()) == (labels["train"], labels["test"])
    assert data.transform(data.train.x).max() <= 1
    assert load_dataset(f"hf:{tmp_path},size=8").shape == (channels, 8, 8)


def test_text_and_owners_in_parquet_shards(tmp_path: Path) -> None:
    rows = {
        "text": ["so good", "so bad", "good good"],
        "label": [1, 0, 1],
        "user": ["ann", "bob", "ann"],
        "id": [1, 2, 3],
    }
    parquet(tmp_path / "data" / "train-00000-of-00002.parquet", rows)
    parquet(tmp_path / "data" / "train-00001-of-00002.parquet", rows)
    parquet(tmp_path / "data" / "validation-00000-of-00001.parquet", rows)
    data = load_dataset(f"hf:{tmp_path},owner=user,length=4")
    assert data.train.x.tolist() == [[1, 0, 3, 3], [1, 2, 3, 3], [0, 0, 3, 3]] * 2
    assert data.vocabulary_size == 4
    assert data.owner_names == ("ann", "bob")
    assert data.owners is not None
    assert data.owners.tolist() == [0, 1, 0] * 2
    assert data.test_owners is not None
    assert data.test_owners.tolist() == [0, 1, 0]
    assert (len(data.test), data.class_names, data.shape) == (3, ("0", "1"), (4,))


def test_feature_columns_are_a_table(tmp_path: Path) -> None:
    rows = {"a": [1.0, 3.0, None, 5.0], "b": ["x", "y", "x", "x"], "target": [0.5, 1.5, 2.5, 3.5], "skip": [[1]] * 4}
    save(tmp_path, {"train": rows, "test": rows})
    data = load_dataset(f"hf:{tmp_path},drop=skip")
    assert (data.classes, data.shape) == (0, (3,))
    torch.testing.assert_close(data.train.x[:, 1:], torch.tensor([[1.0, 0], [0, 1], [1, 0], [1, 0]]))
    assert data.train.y.tolist() == [[0.5], [1.5], [2.5], [3.5]]
    assert load_dataset(f"hf:{tmp_path},input=a").shape == (1,)


def test_lists_are_tokens_or_features(tmp_path: Path) -> None:
    rows = {"input_ids": [[5, 6, 7], [8], []], "vector": [[0.5, 1.0]] * 3, "label": [0, 1, 0]}
    save(tmp_path, {"train": rows, "test": rows})
    tokens = load_dataset(f"hf:{tmp_path},input=input_ids")
    assert tokens.train.x.tolist() == [[5, 6, 7], [8, 0, 0], [0, 0, 0]]
    assert tokens.train.are_tokens
    assert tokens.vocabulary_size == 9
    assert load_dataset(f"hf:{tmp_path},input=vector").train.x.tolist() == [[0.5, 1.0]] * 3


def test_one_split_is_cut_by_a_share_of_each_owner(tmp_path: Path) -> None:
    rows = {"x": list(range(20)), "label": [k % 2 for k in range(20)], "who": ["ab"[k % 4 == 0] for k in range(20)]}
    save_split(tmp_path, rows, shards=3)
    data = load_dataset(f"hf:{tmp_path},owner=who,test=0.4")
    assert data.owners is not None
    assert np.bincount(data.owners).tolist() == [9, 3]
    assert data.test_owners is not None
    assert np.bincount(data.test_owners).tolist() == [6, 2]
    assert len(data.test) == 8
    assert len(load_dataset(f"hf:{tmp_path}").test) == 4


def test_where_splits_are_found(tmp_path: Path) -> None:
    parquet(tmp_path / "default" / "train" / "0000.parquet", {"x": [1]})
    parquet(tmp_path / "default" / "train" / "0001.parquet", {"x": [1]})
    parquet(tmp_path / "test.parquet", {"x": [1]})
    found = _find_split_files(tmp_path)
    assert {name: len(files) for name, files in found.items()} == {"train": 2, "test": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (",label=lable", "unknown column of .* 'lable'; did you mean 'label'"),
        (",owner=whom", "unknown column of .* 'whom'"),
        (",input=imag", "unknown column of .* 'imag'; did you mean 'image'"),
        (",train=all", "unknown split of .* 'all'"),
        (",test=other", "unknown split of .* 'other'"),
        (",test=2", "expected a split, or a share above 0 and below 1"),
        (",input=label,lenght=3", "unknown option of 'hf' 'lenght'; did you mean 'length'"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: str, message: str) -> None:
    rows = {"image": [png(x) for x in pictures(2, 1)], "label": [0, 1]}
    save(tmp_path, {"train": rows, "test": rows}, IMAGES)
    with pytest.raises(InputError, match=message):
        load_dataset(f"hf:{tmp_path}{options}")


@pytest.mark.parametrize(
    ("rows", "features", "message"),
    [
        ({"image": [{"bytes": None, "path": "/etc/passwd"}], "label": [0]}, IMAGES, "does not hold its image"),
        ({"image": [{"bytes": b"no image", "path": None}], "label": [0]}, IMAGES, "row 1 in column 'image'"),
        ({"text": ["a"], "label": [3]}, {"label": LABELS}, "labels that are not among its 3 class names"),
        ({"text": ["a"], "label": [-1]}, {"label": LABELS}, "labels that are not among its 3 class names"),
        ({"text": ["a"], "label": [None]}, None, "rows without a label"),
        ({"text": ["a", "b"], "label": [1, 1]}, None, "only the label '1'"),
        ({"text": ["a"], "other": [1]}, None, "does not say which column holds the labels"),
        ({"v": [[1.0], [1.0, 2.0]], "label": [0, 1]}, None, "lists of different lengths"),
        ({"v": [[1], [-2]], "label": [0, 1]}, None, "tokens below 0"),
        ({"v": [[1.0], [None]], "label": [0, 1]}, None, "lists of numbers without gaps"),
        ({"v": [[1.0], [float("nan")]], "label": [0, 1]}, None, "not finite"),
        ({"v": [["a"], ["b"]], "label": [0, 1]}, None, "lists of numbers without gaps"),
        ({"text": pa.array([], pa.string()), "label": pa.array([], pa.int64())}, None, "no rows to train with"),
    ],
)
def test_contents_that_cannot_be_used(tmp_path: Path, rows: Any, features: Any, message: str) -> None:
    save(tmp_path, {"train": rows, "test": rows}, features)
    with pytest.raises(InputError, match=message):
        load_dataset(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({"image": [b"no image"], "label": [0]}, "cannot decode test row 1 in column 'image' of .*: no image"),
        ({"image": [png(pictures(1, 3)[0, :4])["bytes"]], "label": [0]}, "test row 1 in .* has 5 x 4 pixels .* 5 x 6"),
        ({"image": [png(pictures(1, 3)[0])["bytes"]], "label": [2]}, "test part of .* '2', which no training row has"),
    ],
)
def test_what_is_wrong_with_the_rows_for_testing(tmp_path: Path, test: dict[str, Any], message: str) -> None:
    train = {"image": [png(x)["bytes"] for x in pictures(2, 3)], "label": [0, 1]}
    save(tmp_path, {"train": train, "test": test})
    with pytest.raises(InputError, match=message):
        load_dataset(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("dataset_dict.json", '{"splits": ["../train"]}', "does not list splits"),
        ("dataset_dict.json", "[]", "does not list splits"),
        ("train/state.json", '{"_data_files": [{"filename": "../../x.arrow"}]}', "does not list data files"),
        ("train/state.json", '{"_data_files": []}', "does not list data files"),
        ("train/state.json", "{", "truncated, or not JSON"),
        ("train/data-00000-of-00001.arrow", "no arrow", "is truncated or broken"),
    ],
)
def test_broken_folders(tmp_path: Path, name: str, content: str, message: str) -> None:
    rows = {"text": ["a", "b"], "label": [0, 1]}
    save(tmp_path, {"train": rows, "test": rows})
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        load_dataset(f"hf:{tmp_path}")


def test_a_stream_cut_between_two_batches_is_not_a_shorter_one(tmp_path: Path) -> None:
    rows = {"text": ["a", "b", "c", "d"], "label": [0, 1, 0, 1]}
    save_split(tmp_path, rows)
    path, table = tmp_path / "data-00000-of-00001.arrow", pa.table(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table.slice(0, 2))
        end = file.tell()
        writer.write_table(table.slice(2, 2))
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(InputError, match="the mark at the end of an Arrow stream is missing"):
        load_dataset(f"hf:{tmp_path}")


def test_splits_must_have_the_same_columns(tmp_path: Path) -> None:
    save(tmp_path, {"train": {"text": ["a", "b"], "label": [0, 1]}, "test": {"txt": ["a"], "label": [0]}})
    with pytest.raises(InputError, match="other columns in 'test' than in 'train'"):
        load_dataset(f"hf:{tmp_path}")


def test_folders_without_a_data_set(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither what save_to_disk writes nor files like"):
        load_dataset(f"hf:{tmp_path}")
    with pytest.raises(InputError, match="is not a folder"):
        load_dataset(f"hf:{tmp_path / 'gone'}")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_arrow_files_are_refused_or_consistent(tmp_path: Path, data: st.DataObject) -> None:
    rows = {"text": ["so good", "so bad", "fine"], "label": [1, 0, 1]}
    save(tmp_path, {"train": rows, "test": rows})
    path = tmp_path / "train" / "data-00000-of-00001.arrow"
    damaged = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(damaged))
    try:
        found = load_dataset(f"hf:{tmp_path}")
    except InputError:
        return
    assert len(found.train) == len(found.train.y) >= 1
    assert int(found.train.x.max()) < found.vocabulary_size or not found.train.are_tokens
