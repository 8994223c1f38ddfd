"""Tests of partition files: round trip, other formats, invalid content."""

import io
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data.partitions import partition_indices
from fedloom.data.partitions.base import PartitionPool
from fedloom.data.partitions.files import _read_partition_file, write_partition_file
from fedloom.errors import InputError

LABELS = np.arange(60) % 10
POOL = PartitionPool(LABELS, name="sixty")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def as_lists(parts: list[np.ndarray]) -> list[list[int]]:
    return [part.tolist() for part in parts]


@settings(max_examples=30, deadline=None)
@given(clients=st.integers(1, 20), seed=st.integers(0, 1000), ending=st.sampled_from(["json", "npz"]))
def test_what_was_written_reads_back(
    tmp_path_factory: pytest.TempPathFactory, clients: int, seed: int, ending: str
) -> None:
    path = tmp_path_factory.mktemp("parts") / f"split.{ending}"
    parts = partition_indices("iid", LABELS, clients, rng(seed))
    write_partition_file(path, parts, LABELS, {"seed": seed})
    first = path.read_bytes()
    assert as_lists(_read_partition_file(path, POOL)) == as_lists(parts)
    assert as_lists(partition_indices(f"file:{path}", POOL, None, rng())) == as_lists(parts)
    write_partition_file(path, parts, LABELS, {"seed": seed})
    assert path.read_bytes() == first
    if ending == "json":
        assert json.loads(first)["seed"] == seed


def test_a_file_for_other_data_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    write_partition_file(path, partition_indices("iid", LABELS, 3, rng()), LABELS, {})
    with pytest.raises(InputError, match="a partition of 60 samples, but 'other' has 61"):
        _read_partition_file(path, PartitionPool(np.arange(61) % 10, name="other"))
    with pytest.raises(InputError, match="other data: the labels of 'other'"):
        _read_partition_file(path, PartitionPool(LABELS[::-1].copy(), name="other"))


@pytest.mark.parametrize(
    "text",
    [
        "[[5, 1, 3], [0], []]",
        '{"0": [1, 3, 5], "1": [0], "2": []}',
        '{"2": [], "1": [0], "0": [1, 3, 5]}',
        '{"clients": [[1, 3, 5], [0], []], "made by": "somebody"}',
        '{"clients": {"0": [1, 3, 5], "1": [0], "2": []}}',
    ],
)
def test_the_ways_to_list_positions(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a, b=c.json"  # any character may be in a path
    path.write_text(text)
    assert as_lists(partition_indices(f"file:{path}", POOL, None, rng())) == [[1, 3, 5], [0], []]
    with pytest.raises(InputError, match="has 3 clients, but 4 were asked for"):
        partition_indices(f"file:{path}", POOL, 4, rng())
    with pytest.raises(InputError, match=r"cannot read the partition 'a\\x00b': no path has a zero byte"):
        partition_indices("file:a\0b", POOL, None, rng())


def test_an_npz_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "split.npz"
    np.savez(path, **{"1": np.array([7], dtype=np.uint8), "0": np.array([4, 2], dtype=np.int32)})
    assert as_lists(_read_partition_file(path, POOL)) == [[2, 4], [7]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[[1, 2]", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\x00", "is not JSON"),
        ("[]", "is not a partition"),
        ("3", "is not a partition"),
        ('"text"', "is not a partition"),
        ('{"clients": 3}', "is not a partition"),
        ("{}", "is not a partition"),
        ("[[1], 2]", "client 1 of .* list of whole numbers"),
        ("[[1.0]]", "list of whole numbers"),
        ("[[true]]", "list of whole numbers"),
        ("[[[1]]]", "list of whole numbers"),
        ('["12"]', "list of whole numbers"),
        ("[{}]", "list of whole numbers"),
        ("[[NaN]]", "list of whole numbers"),
        ("[[99999999999999999999999]]", "list of whole numbers"),
        ("[[0], [60]]", "client 1 of .* positions from 60 to 60, but there are 60 samples"),
        ("[[-1, 3]]", "positions from -1 to 3"),
        ("[[4, 4]]", "client 0 of .* holds sample 4, which is held already"),
        ("[[4], [3, 4]]", "client 1 of .* holds sample 4"),
        ('{"a": [1], "b": [2]}', "none called '0'"),
        ('{"1": [1], "2": [2]}', "none called '0'"),
        ('{"clients": [[1]], "samples": "many"}', "partition of 'many' samples"),
        ('{"clients": [[1]], "labels_sha256": 3}', "another checksum"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "split.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        _read_partition_file(path, POOL)


def npz(**arrays: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, value in arrays.items():
            archive.writestr(f"{name.removeprefix('_')}.npy", value)
    return content.getvalue()


def npy(array: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, array)
    return content.getvalue()


HUGE = npy(np.arange(3)).replace(b"(3,)", b"(3333333333333,)")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an npz file"),
        (b"PK\x03\x04 and no more", "not an npz file"),
        (npz(_0=npy(np.array([1, 2])))[:-30], "not an npz file"),
        (npz(_0=b"text"), "split.npz"),
        (npz(_0=npy(np.array([1.5]))), "split.npz"),
        (npz(_0=npy(np.array([[1]]))), "split.npz"),
        (npz(_0=npy(np.array([{}], dtype=object))), "split.npz"),
        (npz(_0=npy(np.zeros(10_000_000, dtype=np.int64))), "more positions than the 60 samples"),
        (npz(_0=HUGE), "split.npz"),
        (npz(_1=npy(np.array([1]))), "none called '0'"),
        (npz(), "is not a partition"),
        (npz(_0=npy(np.array([2**63 + 5], dtype=np.uint64))), "positions from 9223372036854775813"),
    ],
)
def test_broken_npz_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "split.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        _read_partition_file(path, POOL)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (tmp_path / "sprung",)

    for name, content in (
        ("split.npz", npz(_0=npy(np.array([Trap()], dtype=object)))),
        ("split.json", pickle.dumps([Trap()])),
        ("split.npz", pickle.dumps([Trap()])),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError):
            _read_partition_file(tmp_path / name, POOL)
    assert not (tmp_path / "sprung").exists()


@settings(max_examples=200, deadline=None)
@given(
    junk=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("012a"), inner, max_size=3),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode()),
    ),
    ending=st.sampled_from(["json", "npz"]),
)
def test_any_file_is_a_partition_or_refused(tmp_path_factory: pytest.TempPathFactory, junk: bytes, ending: str) -> None:
    path = tmp_path_factory.mktemp("junk") / f"split.{ending}"
    path.write_bytes(junk)
    try:
        parts = _read_partition_file(path, POOL)
    except InputError:
        return
    held = np.concatenate(parts)
    assert len(set(held)) == len(held)
    assert set(held) <= set(range(60))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for name in ("no.json", "no.npz"):
        with pytest.raises(InputError, match=r"cannot read the partition .*No such file"):
            _read_partition_file(tmp_path / name, POOL)
    with pytest.raises(InputError, match=r"as \.json or \.npz, not as 'split.pkl'"):
        write_partition_file(tmp_path / "split.pkl", [np.arange(3)], LABELS, {})
