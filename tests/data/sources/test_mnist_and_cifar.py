"""Tests that read MNIST and CIFAR-10 and reject damaged files."""

import gzip
import struct
import tracemalloc
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.data.sources import cifar
from fedloom.data.sources.mnist import _read_idx_file, _read_idx_samples
from fedloom.errors import InputError


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape) + values.tobytes()


def pixels(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, 28, 28), dtype=np.uint8)


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_round_trip(tmp_path: Path, suffix: str) -> None:
    x = pixels(5)
    assert np.array_equal(_read_idx_file(put(tmp_path / f"images{suffix}", idx(x)), (28, 28)), x)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 2 * 784 + 16))
def test_a_truncated_idx_file_is_refused(tmp_path: Path, suffix: str, cut: int) -> None:
    path = put(tmp_path / f"images{suffix}", idx(pixels(2))[:-cut])
    found = 2 * 784 - cut
    message = f"{found} bytes found after its header, 1568 expected" if found >= 0 else "16 expected in its header"
    with pytest.raises(InputError, match=f"{path.name} is truncated.*{message}"):
        _read_idx_file(path, (28, 28))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_lying_header_costs_no_memory(tmp_path: Path, suffix: str) -> None:
    head = struct.pack(">4I", 0x803, 2**32 - 1, 28, 28)
    path = put(tmp_path / f"images{suffix}", head + bytes(10_000))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=f"10000 bytes found after its header, {(2**32 - 1) * 784} expected"):
            _read_idx_file(path, (28, 28))
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(pixels(2)) + b"x", "too long: at least 1569 bytes found after its header, 1568 expected"),
        (b"\0\0\x08\x01" + idx(pixels(2))[4:], "magic number 0x801; expected 0x803"),
        (idx(pixels(2)[:, :27]), r"items of shape \(27, 28\); expected \(28, 28\)"),
        (b"", "0 bytes found, 16 expected in its header"),
    ],
)
def test_other_broken_idx_files(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _read_idx_file(put(tmp_path / "images", content), (28, 28))


def test_unreadable_idx_files(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path / "broken.gz"):
        if path.suffix:
            path.write_bytes(b"not gzip at all")
        with pytest.raises(InputError, match=f"cannot read .*{path.name}"):
            _read_idx_file(path, (28, 28))
    whole = gzip.compress(idx(pixels(2)))
    for content in (whole[:-5], whole[:40] + b"\xff\xff\xff" + whole[43:]):
        (tmp_path / "cut.gz").write_bytes(content)
        with pytest.raises(InputError, match=r"cut\.gz"):
            _read_idx_file(tmp_path / "cut.gz", (28, 28))


def pair(tmp_path: Path, x: np.ndarray, y: np.ndarray) -> tuple[Path, Path]:
    return put(tmp_path / "images", idx(x)), put(tmp_path / "labels.gz", idx(y))


def test_images_and_labels_become_samples(tmp_path: Path) -> None:
    x, y = pixels(3), np.array([2, 0, 9], np.uint8)
    samples = _read_idx_samples(*pair(tmp_path, x, y), 10, {"images": (60_000, ""), "labels": (60_000, "")})
    assert samples.x.shape == (3, 28, 28, 1)
    assert np.array_equal(samples.x.numpy()[..., 0], x)
    assert samples.y.tolist() == [2, 0, 9]


@pytest.mark.parametrize(
    ("n", "labels", "message"),
    [
        (3, [1, 2], "3 images but .* 2 labels"),
        (2, [1, 10], "label 10; expected labels from 0 to 9"),
        (0, [], "no images"),
    ],
)
def test_pairs_that_do_not_fit(tmp_path: Path, n: int, labels: list[int], message: str) -> None:
    paths = pair(tmp_path, pixels(n), np.array(labels, np.uint8))
    with pytest.raises(InputError, match=message):
        _read_idx_samples(*paths, 10, {"images": (60_000, ""), "labels": (60_000, "")})


def test_a_file_of_the_published_length_must_be_the_published_one(tmp_path: Path) -> None:
    x, y = pixels(3), np.array([2, 0, 9], np.uint8)
    official = {"images": (3, sha256(idx(x)).hexdigest()), "labels": (3, sha256(idx(y)).hexdigest())}
    assert len(_read_idx_samples(*pair(tmp_path, x, y), 10, official)) == 3
    x[1, 5, 5] ^= 1
    with pytest.raises(InputError, match="images has 3 items but is not the published file"):
        _read_idx_samples(*pair(tmp_path, x, y), 10, official)


def test_cifar_planes_become_pixels() -> None:
    planes = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    labels = np.array([[3], [0], [9], [1]], np.uint8)
    content = np.concatenate([labels, planes.reshape(4, -1)], axis=1).flatten()
    samples = cifar.CIFAR10.decode(content, Path("batch"))
    assert samples.y.tolist() == [3, 0, 9, 1]
    assert samples.x.is_contiguous()
    assert np.array_equal(samples.x.numpy(), planes.transpose(0, 2, 3, 1))


def test_cifar100_has_a_coarse_and_a_fine_label() -> None:
    content = np.random.default_rng(0).integers(0, 256, (3, 2 + 3072), dtype=np.uint8)
    content[:, :2] = [[19, 99], [0, 7], [4, 0]]
    fine, coarse = (
        source.decode(content.flatten(), Path("batch")) for source in (cifar.CIFAR100, cifar.CIFAR100_COARSE)
    )
    assert (fine.y.tolist(), coarse.y.tolist()) == ([99, 7, 0], [19, 0, 4])
    assert np.array_equal(fine.x.numpy(), content[:, 2:].reshape(3, 3, 32, 32).transpose(0, 2, 3, 1))
    assert np.array_equal(fine.x.numpy(), coarse.x.numpy())


@pytest.mark.parametrize("wrong", [(20, 0), (0, 100)])
def test_both_labels_of_cifar100_are_checked(wrong: tuple[int, int]) -> None:
    content = np.zeros(3074, np.uint8)
    content[:2] = wrong
    for source in (cifar.CIFAR100, cifar.CIFAR100_COARSE):
        with pytest.raises(InputError, match=f"batch holds the label {max(wrong)}; expected labels from 0 to"):
            source.decode(content, Path("batch"))


def test_cifar_labels_are_checked() -> None:
    content = np.zeros(2 * cifar.CIFAR10.record_size, np.uint8)
    content[cifar.CIFAR10.record_size] = 10
    with pytest.raises(InputError, match="batch holds the label 10"):
        cifar.CIFAR10.decode(content, Path("batch"))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (30_729_999, "truncated: 30729999 bytes found, 30730000 expected"),
        (30_730_000 - cifar.CIFAR10.record_size, "truncated"),
        (30_730_001, "too long: 30730001 bytes found"),
        (30_730_000, "not the published file"),
    ],
)
def test_cifar_files_must_be_the_published_ones(tmp_path: Path, size: int, message: str) -> None:
    path = tmp_path / "data_batch_1.bin"
    with path.open("wb") as file:
        file.truncate(size)
    with pytest.raises(InputError, match=message):
        cifar.CIFAR10.read_file(path, *cifar.CIFAR10.train_files[path.name])


def test_a_missing_cifar_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*test_batch.bin: No such file"):
        cifar.CIFAR10.read_part(tmp_path, cifar.CIFAR10.test_files)
