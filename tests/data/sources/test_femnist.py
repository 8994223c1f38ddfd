"""Tests that read FEMNIST from LEAF's files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from fedloom.data import load_dataset
from fedloom.data.sources.femnist import FEMNIST
from fedloom.errors import InputError
from tests.support.damaged_files import attempt, damage


def pixels(writer: int, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((writer, n, seed)).integers(0, 256, (n, 784), dtype=np.uint8)


def leaf(counts: dict[str, int], seed: int = 0) -> dict[str, Any]:
    """What LEAF's data_to_json.py writes: users, num_samples, user_data, and pixels divided by 255."""
    data = {
        name: {
            "x": (pixels(int(name[1:6]), n, seed) / 255).tolist(),
            "y": [(3 * i + int(name[1:6])) % 62 for i in range(n)],
        }
        for name, n in counts.items()
    }
    return {"users": list(counts), "num_samples": list(counts.values()), "hierarchies": [], "user_data": data}


TRAIN = ({"f00003_10": 4, "f00001_05": 2}, {"f00002_07": 3})
TEST = ({"f00001_05": 1, "f00003_10": 2},)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    for part, files in (("train", TRAIN), ("test", TEST)):
        folder = tmp_path / "femnist" / "data" / part
        folder.mkdir(parents=True)
        for number, counts in enumerate(files):
            content = leaf(counts, seed=len(part))
            (folder / f"all_data_{number}_niid_0_keep_0_{part}_9.json").write_text(json.dumps(content))
    return tmp_path / "femnist" / "data"


def test_writers_are_owners(root: Path) -> None:
    data = load_dataset("femnist")
    assert (data.classes, data.shape, len(data.train), len(data.test)) == (62, (1, 28, 28), 9, 3)
    assert data.owner_names == ("f00001_05", "f00002_07", "f00003_10")
    assert data.owners is not None
    assert data.owners.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert np.array_equal(data.train.x[data.owners == 1].numpy().reshape(3, 784), pixels(2, 3, 5))
    assert data.train.y[data.owners == 2].tolist() == [3, 6, 9, 12]
    assert data.test_owners is not None
    assert data.test_owners.tolist() == [0, 2, 2]
    assert np.array_equal(data.test.x[:1].numpy().reshape(1, 784), pixels(1, 1, 4))
    assert (data.class_names[9], data.class_names[10], data.class_names[36]) == ("9", "A", "a")


def change(root: Path, edit: Callable[[dict[str, Any]], object], part: str = "train") -> None:
    path = sorted((root / part).glob("*.json"))[0]
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def stranger(content: dict[str, Any]) -> None:
    content["users"][0] = "f00009_01"
    content["user_data"]["f00009_01"] = content["user_data"].pop("f00001_05")


def user(content: dict[str, Any]) -> dict[str, Any]:
    held: dict[str, Any] = content["user_data"]["f00003_10"]
    return held


@pytest.mark.parametrize(
    ("part", "edit", "message"),
    [
        (
            "train",
            lambda c: user(c)["y"].__setitem__(1, 62),
            "'f00003_10' has the label 62; expected labels from 0 to 61",
        ),
        ("train", lambda c: user(c)["y"].__setitem__(1, -1), "the label -1"),
        ("train", lambda c: user(c)["y"].__setitem__(1, 3.0), "the label 3.0"),
        ("train", lambda c: user(c)["y"].__setitem__(1, True), "the label True"),
        ("train", lambda c: user(c)["x"].__setitem__(1, [0.5] * 783), "not lists of 784 numbers"),
        ("train", lambda c: user(c).update(x=[[0.5] * 783] * 4), r"images of shape \(783,\); expected 784"),
        ("train", lambda c: user(c)["x"][0].__setitem__(5, 1.5), "pixels outside of 0 to 1"),
        ("train", lambda c: user(c)["x"][0].__setitem__(5, float("nan")), "pixels outside of 0 to 1"),
        ("train", lambda c: user(c)["x"][0].__setitem__(5, "dark"), "not lists of 784 numbers"),
        ("train", lambda c: user(c)["y"].pop(), "4 x and 3 y for the user"),
        ("train", lambda c: c["num_samples"].reverse(), "num_samples"),
        ("train", lambda c: c.pop("user_data"), "not one of LEAF's files"),
        ("test", stranger, r"writer 'f00009_01' in test/ but not in train/"),
    ],
)
def test_what_is_wrong_is_said(root: Path, part: str, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    change(root, edit, part)
    with pytest.raises(InputError, match=message):
        load_dataset("femnist")


def test_it_must_be_fetched_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"'femnist' must be downloaded by hand: clone .*leaf and run .*preprocess.sh"):
        load_dataset("femnist")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(breaks=damage())
def test_broken_files_are_refused_in_one_sentence(root: Path, breaks: Callable[[bytes], bytes]) -> None:
    path = sorted((root / "train").glob("*.json"))[1]
    whole = json.dumps(leaf(TRAIN[1], 5)).encode()
    path.write_bytes(breaks(whole))
    attempt(lambda: FEMNIST.read(root))
    path.write_bytes(whole)
    assert attempt(lambda: FEMNIST.read(root)) is None
