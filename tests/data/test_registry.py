"""Tests of the registry of data sets."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.data import Dataset, load_dataset, registry
from fedloom.data.sources import DATASET_SOURCES
from fedloom.data.sources.base import DatasetSource
from fedloom.data.sources.cifar import CIFAR10
from fedloom.data.sources.mnist import FASHION_MNIST, MNIST, read_sklearn_digits
from fedloom.errors import InputError


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    theirs = load_digits()
    expected = {
        (np.rint(image * 255 / 16).astype(np.uint8).tobytes(), int(label))
        for image, label in zip(theirs.images, theirs.target, strict=True)
    }
    digits = load_dataset("digits")
    ours = [
        (x.numpy().tobytes(), int(y))
        for part in (digits.train, digits.test)
        for x, y in zip(part.x, part.y, strict=True)
    ]
    assert len(ours) == 1797
    assert set(ours) == expected


def test_the_split_of_digits_is_stratified_and_fixed() -> None:
    digits = load_dataset("digits")
    assert (len(digits.train), len(digits.test)) == (
        registry.DIGITS.num_train_examples,
        registry.DIGITS.num_test_examples,
    )
    counts = torch.bincount(digits.train.y), torch.bincount(digits.test.y)
    share = counts[1] / (counts[0] + counts[1])
    assert ((share - 0.2).abs() < 0.005).all()
    # The first test sample of every class, as a fingerprint of the split.
    sums = [int(digits.test.x[digits.test.y == label][0].sum()) for label in range(10)]
    assert sums == [5370, 5388, 4240, 4559, 4129, 4098, 6026, 5180, 4971, 5131]


def test_prepared_digits_are_standardised() -> None:
    digits = load_dataset("digits")
    x = digits.transform(digits.train.x)
    assert x.shape == (1438, *digits.shape)
    assert float(x.mean()) == pytest.approx(0, abs=1e-4)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("name", ["digits", "hard-digits"])
def test_digits_do_not_import_scikit_learn(name: str) -> None:
    code = (
        "import sys; from fedloom.data import load_dataset; "
        f"load_dataset({name!r}); assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_digits_come_from_scikit_learn_where_its_file_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = read_sklearn_digits()
    monkeypatch.setattr("fedloom.data.sources.mnist.find_spec", lambda _name: None)
    for ours, theirs in zip(direct, read_sklearn_digits(), strict=True):
        assert torch.equal(ours.x, theirs.x)
        assert torch.equal(ours.y, theirs.y)


def test_an_unknown_name() -> None:
    with pytest.raises(InputError, match="unknown data set 'cifar'; did you mean 'cifar10'"):
        load_dataset("cifar")


def test_a_path_alone_is_told_how_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imgs").mkdir()  # near 'digits', which nobody means who has such a folder
    (tmp_path / "people.dat").touch()
    with pytest.raises(InputError, match=r"^'imgs' is a folder; name it as imgs/ "):
        load_dataset("imgs")
    with pytest.raises(InputError, match=r"^'people.dat' is a file; name it as table:people.dat,label=COLUMN, arrays:"):
        load_dataset("people.dat")
    for name in ("", "x" * 5000, "\0"):
        with pytest.raises(InputError, match="unknown data set"):
            load_dataset(name)


def test_nothing_is_downloaded_where_fedloom_data_is_misspelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "dta"))
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fedloom.data.sources.base.DatasetSource.download", None)
    with pytest.raises(InputError, match=r"^FEDLOOM_DATA names '.*dta', which is no folder, so 'mnist' was not found"):
        load_dataset("mnist")


def touch(folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("source", [MNIST, FASHION_MNIST, CIFAR10], ids=lambda source: source.name)
def test_where_data_sets_are_found(source: DatasetSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Path | None:
        info = next(info for info in registry.available_datasets() if info.name == source.name)
        assert info.state == ("on this machine" if info.folder else "can be downloaded")
        return info.folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    monkeypatch.setitem(DATASET_SOURCES, source.name, replace(source, system_folders=()))
    assert found() is None
    cached = touch(tmp_path / "cache" / "fedloom" / source.folder_names[0], source.files)
    assert found() == cached
    packaged = touch(tmp_path / "packaged", source.files)
    monkeypatch.setitem(DATASET_SOURCES, source.name, replace(source, system_folders=(packaged,)))
    assert found() == packaged
    own = tmp_path / "own" / source.folder_names[-1]
    for root in (tmp_path / "own", own):
        monkeypatch.setenv("FEDLOOM_DATA", str(root))
        touch(own, source.files)
        assert found() == own
        (own / source.files[-1]).unlink()
        assert found() == packaged


def test_a_folder_of_mnist_is_not_taken_for_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDLOOM_DATA", str(touch(tmp_path / "mnist", MNIST.files)))
    found = {info.name: info.folder for info in registry.available_datasets()}
    assert found["mnist"] == tmp_path / "mnist"
    assert found["fashion-mnist"] in (None, *FASHION_MNIST.system_folders)


def check_published(dataset: Dataset, train: int, test_counts: list[int]) -> None:
    assert (len(dataset.train), len(dataset.test)) == (train, sum(test_counts))
    assert torch.bincount(dataset.test.y).tolist() == test_counts
    assert len(dataset.class_names) == dataset.classes == 10
    grey = np.arange(256) / 255
    for channel, (mean, std) in enumerate(zip(dataset.transform.mean, dataset.transform.std, strict=True)):
        share = torch.bincount(dataset.train.x[..., channel].flatten(), minlength=256).numpy()
        assert np.average(grey, weights=share) == pytest.approx(mean, abs=1e-4)
        assert np.average((grey - mean) ** 2, weights=share) ** 0.5 == pytest.approx(std, abs=1e-4)


@pytest.mark.data("mnist")
def test_mnist() -> None:
    mnist = load_dataset("mnist", download=False)
    check_published(mnist, 60_000, [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009])
    assert mnist.train.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]


@pytest.mark.data("fashion-mnist")
def test_fashion_mnist() -> None:
    check_published(load_dataset("fashion-mnist", download=False), 60_000, [1000] * 10)


@pytest.mark.data("cifar10")
def test_cifar10() -> None:
    cifar10 = load_dataset("cifar10", download=False)
    check_published(cifar10, 50_000, [1000] * 10)
    assert cifar10.train.y[:5].tolist() == [6, 9, 9, 4, 1]
    started = time.perf_counter()
    again = load_dataset("cifar10", download=False)
    assert time.perf_counter() - started < 15, "decoded once, it is only mapped into memory"
    assert torch.equal(again.test.y, cifar10.test.y)
    # The first pixel of the first training image, a frog, as anyone can look it up.
    assert cifar10.train.x[0, 0, 0].tolist() == [59, 62, 63]
