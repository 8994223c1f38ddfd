"""Tests of arrays in an .npz file: their meaning, and what is refused."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedloom
from fedloom.data import Dataset, load_dataset, with_normalization
from fedloom.data.dataset import NO_OWNER
from tests.support.damaged_files import attempt, damage

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(40, 5)), np.arange(40) % 4


def saved(folder: Path, options: str = "", **arrays: Any) -> Dataset:
    np.savez(folder / "mine.npz", **arrays)
    return load_dataset(f"arrays:{folder / 'mine.npz'}{options}")


def test_inputs_are_kept_and_a_fifth_is_for_testing(tmp_path: Path) -> None:
    data = saved(tmp_path, x=X, y=Y)
    assert (data.classes, data.class_names, data.shape) == (4, ("0", "1", "2", "3"), (5,))
    assert (len(data.train), len(data.test)) == (32, 8)
    rows = np.concatenate([data.train.x.numpy(), data.test.x.numpy()])
    assert sorted(map(tuple, rows)) == sorted(map(tuple, X.astype(np.float32)))
    again = saved(tmp_path, x=X, y=Y)
    assert np.array_equal(again.test.x.numpy(), data.test.x.numpy())
    assert len(saved(tmp_path, ",test=0.5", x=X, y=Y).test) == 20


def test_test_samples_of_the_file_are_used(tmp_path: Path) -> None:
    data = saved(tmp_path, x=X, y=Y, x_test=X[:6], y_test=np.arange(6), owner=np.arange(40) // 10)
    assert (len(data.train), len(data.test), data.classes) == (40, 6, 6)
    assert data.test_owners is None


@pytest.mark.parametrize("owners", [np.arange(40) % 3 * 7, np.array(["b", "a", "c"])[np.arange(40) % 3]])
def test_owners_are_clients(tmp_path: Path, owners: np.ndarray) -> None:
    data = saved(tmp_path, x=X, y=Y, owner=owners)
    assert data.owner_names == tuple(str(name) for name in sorted(set(owners.tolist())))
    assert data.owners is not None
    assert data.test_owners is not None
    assert NO_OWNER not in data.test_owners
    assert np.bincount(data.test_owners).tolist() == [3, 3, 3]  # a fifth of each owner's, rounded
    run = fedloom.run(data=str(tmp_path / "mine.npz"), partition="natural", rounds=1, engine="sequential")
    assert run.config.clients == 3


@pytest.mark.parametrize(("x", "shape"), [((40, 6, 7), (1, 6, 7)), ((40, 6, 7, 3), (3, 6, 7))])
def test_bytes_are_images_that_are_scaled_and_then_normalised(
    tmp_path: Path, x: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    data = saved(tmp_path, x=DRAW.integers(0, 256, x).astype(np.uint8), y=Y)
    assert data.shape == shape
    scaled = data.transform(data.train.x)
    assert scaled.shape == (32, *shape)
    assert 0 <= float(scaled.min()) < 0.05
    assert 0.95 < float(scaled.max()) <= 1
    measured = with_normalization(data, "mean-std").transform(data.train.x)
    assert float(measured.mean()) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("kind", [">f8", ">i4", "<u2", "float16", "bool"])
def test_types_of_other_machines(tmp_path: Path, kind: str) -> None:
    x, y = (X > 0).astype(kind), Y.astype(">i8")
    data = saved(tmp_path, x=x, y=y)
    assert data.train.are_tokens == (np.dtype(kind).kind in "iu")
    assert sorted(data.train.y.tolist() + data.test.y.tolist()) == sorted(Y.tolist())


def test_fractions_are_a_regression_of_one_column(tmp_path: Path) -> None:
    data = saved(tmp_path, x=X, y=X.sum(axis=1))
    assert (data.classes, data.train.y.shape, data.notes) == (0, (32, 1), ())
    assert saved(tmp_path, ",task=regression", x=X, y=Y).classes == 0
    mine = f"{tmp_path / 'mine.npz'},task=regression"
    run = fedloom.run(data=mine, partition="iid", clients=4, model="logreg", rounds=1, engine="sequential")
    assert run.accuracy is None
    assert run.summary["loss"] > 0


def test_whole_floats_are_named_and_may_be_classes(tmp_path: Path) -> None:
    data = saved(tmp_path, x=X, y=Y.astype(float))
    assert data.classes == 0
    assert "y has whole numbers stored as floats" in data.notes[0]
    chosen = saved(tmp_path, ",task=classification", x=X, y=Y.astype(float)[:, None])
    assert (chosen.classes, chosen.train.y.shape, chosen.notes) == (4, (32,), ())


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": Y}, "lacks the array 'x'; it has 'y'."),
        ({"x": X}, "lacks the array 'y'; it has 'x'."),
        ({"x_train": X, "y_train": Y}, "lacks the array 'x'; it has 'x_train' and 'y_train'."),
        ({}, "lacks the array 'x'; it has no array."),
        ({"x": X, "y": Y[1:]}, "inputs of shape (40, 5) and labels of shape (39,) do not pair up"),
        ({"x": X, "y": Y, "x_test": X}, "only one of x_test and y_test"),
        ({"x": X, "y": Y, "x_test": X[:, 1:], "y_test": Y}, "the test set of"),
        ({"x": X, "y": Y, "owner": Y[1:]}, "the owners are of type int64 and shape (39,); expected 40 integers"),
        ({"x": X, "y": Y, "owner": X[:, 0]}, "'owner' of type float64"),
        ({"x": X, "y": Y - 1}, "has the label -1; expected labels from 0 on"),
        ({"x": X, "y": 0 * Y}, "has only the label 0"),
        ({"x": X, "y": Y + 10**7}, "so there would be 10,000,004 classes"),
        ({"x": X, "y": np.stack([Y, Y], axis=1)}, "labels of shape (40, 2); expected one integer"),
        ({"x": X * np.nan, "y": Y}, "inputs that are NaN or infinite"),
        ({"x": X, "y": Y * np.nan}, "labels that are NaN or infinite"),
        ({"x": X * 1e60, "y": Y}, "inputs that are NaN or infinite"),
        ({"x": X[:, 0], "y": Y}, "inputs of shape (40,); expected a row for each sample"),
        ({"x": X * 1j, "y": Y}, "'x' of type complex128"),
        ({"x": X, "y": np.array(["a", "b"] * 20)}, "'y' of type <U1"),
        ({"x": X.astype(int) - 9, "y": Y}, "integers are token ids from 0 on, so store quantities as floats"),
        ({"x": np.zeros((40, 3, 8, 8), np.uint8), "y": Y}, "expected n x height x width x channels"),
        ({"x": X[:0], "y": Y[:0]}, "has no samples"),
        ({"x": X[:1], "y": Y[:1]}, "too few samples to hold out"),
    ],
)
def test_arrays_that_cannot_be_used(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    said = attempt(lambda: saved(tmp_path, **arrays))
    assert said is not None
    assert message in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (",test=2", "expected a share above 0 and below 1"),
        (",label=y", "unknown option of 'arrays' 'label'"),
        (",task=guess", "unknown task 'guess'"),
        (",task=classification", "labels with fractions in y; a classification wants integers"),
    ],
)
def test_options_that_cannot_be_used(tmp_path: Path, options: str, message: str) -> None:
    said = attempt(lambda: saved(tmp_path, options, x=X, y=Y + 0.5))
    assert said is not None
    assert message in said


def test_a_share_is_refused_where_the_file_has_test_samples(tmp_path: Path) -> None:
    said = attempt(lambda: saved(tmp_path, ",test=0.1", x=X, y=Y, x_test=X, y_test=Y))
    assert said is not None
    assert "leave out test=0.1" in said


class _Trap:
    """An object that would write a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("unpickled"),))


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    objects = np.array([_Trap(), None], dtype=object)
    for arrays in ({"x": objects, "y": np.arange(2)}, {"x": np.eye(2), "y": objects}):
        said = attempt(lambda arrays=arrays: saved(tmp_path, **arrays))
        assert said is not None
        assert "of type object" in said
    (tmp_path / "mine.npz").write_bytes(pickle.dumps(_Trap()))
    assert "not a whole .npz file" in (attempt(lambda: load_dataset("mine.npz")) or "")
    assert not (tmp_path / "unpickled").exists()


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "No such file" in (attempt(lambda: load_dataset(f"arrays:{tmp_path / 'none.npz'}")) or "")
    assert "is a folder" in (attempt(lambda: load_dataset(f"arrays:{tmp_path}")) or "")


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_are_refused_or_consistent(tmp_path: Path, data: st.DataObject) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, x=X, y=Y, owner=Y)
    path = tmp_path / "mine.npz"
    path.write_bytes(data.draw(damage())(buffer.getvalue()))
    read: list[Dataset] = []
    if attempt(lambda: read.append(load_dataset(str(path)))) is None:
        assert read[0].owners is not None
        assert len(read[0].train) == len(read[0].owners)
