"""Tests that read Digit-5 from the published files of its five domains."""

import bz2
import gzip
import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from PIL import Image
from scipy.io import savemat

from fedloom.data import load_dataset
from fedloom.data.readers.arrays import read_npz_arrays
from fedloom.data.sources import digit5, digit5_files
from fedloom.errors import InputError
from tests.support.damaged_files import attempt, damage

N, M = 6, 3
"""Training and test images of each file."""


def images(n: int, side: int, channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, n)).integers(0, 256, (n, side, side, channels), dtype=np.uint8)


def labels(n: int) -> np.ndarray:
    return np.arange(n) % 10


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape) + values.tobytes()


def mat(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    savemat(buffer, arrays, do_compression=True)
    return buffer.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def one_hot(n: int) -> np.ndarray:
    return np.eye(10)[labels(n)]


def usps_values(n: int) -> np.ndarray:
    return images(n, 16, 1)[..., 0] / 127.5 - 1


def libsvm(n: int) -> bytes:
    rows = usps_values(n).reshape(n, -1)
    lines = (
        f"{y + 1} " + " ".join(f"{i}:{v:.6f}" for i, v in enumerate(row, 1))
        for row, y in zip(rows, labels(n), strict=True)
    )
    return "\n".join(lines).encode()


def zipped(n: int) -> bytes:
    rows = usps_values(n).reshape(n, -1)
    return "\n".join(
        f"{y:.4f} " + " ".join(f"{v:.4f}" for v in row) for row, y in zip(rows, labels(n), strict=True)
    ).encode()


def cells(*values: np.ndarray) -> np.ndarray:
    table = np.empty((2, 2), dtype=object)
    for place, value in zip(np.ndindex(2, 2), values, strict=True):
        table[place] = value
    return table


def planes(n: int) -> np.ndarray:
    return images(n, 28, 1).transpose(0, 3, 1, 2) / 255


def svhn(n: int) -> bytes:
    y = labels(n)[:, None].copy()
    y[y == 0] = 10
    return mat(X=images(n, 32, 3).transpose(1, 2, 3, 0), y=y)


FORMS: dict[str, tuple[str, Callable[[], dict[str, bytes]], int, int]] = {
    "mnist mat": (
        "mnist",
        lambda: {
            "mnist_data.mat": mat(
                train_28=images(N, 28, 1), test_28=images(M, 28, 1), label_train=one_hot(N), label_test=one_hot(M)
            )
        },
        28,
        1,
    ),
    "mnist-m mat": (
        "mnist-m",
        lambda: {
            "mnistm_with_label.mat": mat(
                train=images(N, 28, 3), test=images(M, 28, 3), label_train=one_hot(N), label_test=one_hot(M)
            )
        },
        28,
        3,
    ),
    "mnist-m arrays": (
        "mnist-m",
        lambda: {
            f"mnist-m/{part}.npz": npz(x=images(n, 32, 3), y=labels(n).astype(np.uint8))
            for part, n in (("train", N), ("test", M))
        },
        32,
        3,
    ),
    "svhn mat": ("svhn", lambda: {"SVHN/train_32x32.mat": svhn(N), "SVHN/test_32x32.mat": svhn(M)}, 32, 3),
    "svhn of digit-five": ("svhn", lambda: {"svhn_train_32x32.mat": svhn(N), "svhn_test_32x32.mat": svhn(M)}, 32, 3),
    "synth mat": (
        "synth-digits",
        lambda: {
            "syn_number.mat": mat(
                train_data=images(N, 32, 3),
                train_label=labels(N)[:, None],
                test_data=images(M, 32, 3),
                test_label=labels(M)[:, None],
            )
        },
        32,
        3,
    ),
    "synth like svhn": (
        "synth-digits",
        lambda: {"synth_train_32x32.mat": svhn(N), "synth_test_32x32.mat": svhn(M)},
        32,
        3,
    ),
    "usps arrays": (
        "usps",
        lambda: {
            "usps/usps.npz": npz(
                x_train=np.rint(1000 * usps_values(N)).astype(np.int16),
                y_train=labels(N),
                x_test=np.rint(1000 * usps_values(M)).astype(np.int16),
                y_test=labels(M),
            )
        },
        16,
        1,
    ),
    "usps libsvm": (
        "usps",
        lambda: {"usps/usps.bz2": bz2.compress(libsvm(N)), "usps/usps.t.bz2": bz2.compress(libsvm(M))},
        16,
        1,
    ),
    "usps zip": (
        "usps",
        lambda: {"usps/zip.train.gz": gzip.compress(zipped(N)), "usps/zip.test.gz": gzip.compress(zipped(M))},
        16,
        1,
    ),
    "usps mat": (
        "usps",
        lambda: {"usps_28x28.mat": mat(dataset=cells(planes(N), labels(N)[:, None], planes(M), labels(M)[:, None]))},
        28,
        1,
    ),
}


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def write_mnist(root: Path) -> None:
    files = {
        f"mnist/{part}-{kind}-ubyte": idx(values)
        for part, n in (("train", N), ("t10k", M))
        for kind, values in (("images-idx3", images(n, 28, 1, 1)[..., 0]), ("labels-idx1", labels(n).astype(np.uint8)))
    }
    write(root, files)


def larger(x: np.ndarray) -> np.ndarray:
    """32 x 32 x 3, one image after the other."""
    grown = [
        F.interpolate(torch.from_numpy(image.transpose(2, 0, 1)[None]).double(), (32, 32), mode="bilinear")
        for image in x
    ]
    return np.concatenate([np.rint(image.numpy()) for image in grown]).transpose(0, 2, 3, 1) + np.zeros((1, 1, 1, 3))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("together", [False, True])
def test_every_form_of_every_domain(form: str, together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    domain, make, side, channels = FORMS[form]
    root = tmp_path / "digit5" if together else tmp_path
    write(root, make())
    if domain == "mnist":
        write(root, {"svhn_train_32x32.mat": svhn(N), "svhn_test_32x32.mat": svhn(M)})
        other, first = "svhn", slice(0, N)
    else:
        write_mnist(root)
        other, first = "mnist", slice(N, 2 * N)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    data = load_dataset("digit5")
    assert data.domain_names == tuple(sorted({domain, other}))
    assert data.domains is not None
    assert data.domains.tolist() == [0] * N + [1] * N
    assert data.test_domains is not None
    assert data.test_domains.tolist() == [0] * M + [1] * M
    assert (len(data.train), len(data.test), data.shape, data.classes) == (2 * N, 2 * M, (3, 32, 32), 10)
    assert data.train.y[first].tolist() == labels(N).tolist()
    difference = np.abs(data.train.x[first].numpy() - larger(images(N, side, channels)))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.05
    (note,) = data.notes
    assert note.startswith("'digit5' is read without ")
    assert all(name in note for name in digit5.DOMAINS if name not in (domain, other))


def test_mnist_m_as_images_with_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path)
    for part, n in (("train", N), ("test", M)):
        folder = tmp_path / "mnist_m" / f"mnist_m_{part}"
        folder.mkdir(parents=True)
        for i, pixels in enumerate(images(n, 32, 3)):
            Image.fromarray(pixels).save(folder / f"{i:08d}.png")
        order = np.random.default_rng(0).permutation(n)  # a list in any order
        lines = "".join(f"{i:08d}.png {labels(n)[i]}\n" for i in order)
        (tmp_path / "mnist_m" / f"mnist_m_{part}_labels.txt").write_text(lines)
        if part == "train":
            shuffled = images(n, 32, 3)[order]
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    data = load_dataset("digit5")
    assert data.domain_names == ("mnist", "mnist-m")
    assert np.array_equal(data.train.x[N:].numpy(), shuffled)


def test_one_domain_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    with pytest.raises(InputError, match="'digit5' is not on this machine"):
        load_dataset("digit5", download=False)


@pytest.mark.parametrize(
    ("domain", "files", "message"),
    [
        (
            "svhn",
            {"train_32x32.mat": mat(X=images(N, 32, 3), y=labels(N))},
            r"images of type uint8 and shape \(3, 6, 32, 32\)",
        ),
        ("svhn", {"train_32x32.mat": mat(x=images(N, 32, 3))}, "lacks the array 'X'"),
        ("svhn", {"train_32x32.mat": b"\x89HDF\r\n\x1a\n" + bytes(1000)}, "not a whole MATLAB file|7.3"),
        ("usps", {"zip.train.gz": gzip.compress(b"5 " + b"0.1 " * 255)}, "line of 256 numbers; expected 257"),
        ("usps", {"zip.train.gz": gzip.compress(b"5 " + b"1.1 " * 256)}, "values outside of -1 to 1"),
        ("usps", {"zip.train.gz": gzip.compress(b"12 " + b"0.1 " * 256)}, "labels from 12 to 12; expected digits"),
        ("usps", {"zip.train.gz": gzip.compress(b"nan " + b"0.1 " * 256)}, "no number"),
        ("usps", {"zip.train.gz": gzip.compress(b"")}, "is empty"),
        ("usps", {"usps.bz2": bz2.compress(b"5 2:0.1 1:0.1")}, "expected a label and the values 1: to 256:"),
        ("usps", {"usps.npz": npz(x_train=images(N, 16, 1)[..., 0])}, "lacks the array 'y_train'"),
    ],
)
def test_files_with_something_wrong(
    domain: str, files: dict[str, bytes], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    partner = {"train_32x32.mat": "test_32x32.mat", "zip.train.gz": "zip.test.gz", "usps.bz2": "usps.t.bz2"}
    beside = {partner[name]: content for name, content in files.items() if name in partner}
    write(tmp_path / domain, {**files, **beside})
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    with pytest.raises(InputError, match=message):
        load_dataset("digit5")


def test_a_published_count_means_the_published_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"train_32x32.mat": svhn(N), "test_32x32.mat": svhn(M)})
    monkeypatch.setitem(digit5_files.PUBLISHED, "train_32x32.mat", (N, "0" * 32))
    with pytest.raises(InputError, match=r"train_32x32.mat has 6 images but is not the published file"):
        digit5_files.read_digit5_svhn_mat(tmp_path / "train_32x32.mat", tmp_path / "test_32x32.mat")


FUZZED = {
    "npz": (lambda: npz(x=images(4, 8, 3), y=labels(4).astype(np.uint8)), digit5_files.read_digit5_npz_pair),
    "mat": (lambda: svhn(4), digit5_files.read_digit5_svhn_mat),
    "cells": (
        lambda: mat(dataset=cells(planes(4), labels(4)[:, None], planes(4), labels(4)[:, None])),
        digit5_files.read_digit5_usps_mat,
    ),
    "libsvm.bz2": (lambda: bz2.compress(libsvm(4)), digit5_files.read_digit5_usps_libsvm),
    "libsvm": (lambda: libsvm(4), digit5_files.read_digit5_usps_libsvm),
    "zip.gz": (lambda: gzip.compress(zipped(4)), digit5_files.read_digit5_usps_text),
    "zip": (lambda: zipped(4), digit5_files.read_digit5_usps_text),
}


@pytest.mark.filterwarnings("ignore")  # scipy's own, about what it finds in broken files
@pytest.mark.parametrize("kind", FUZZED)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=damage())
def test_broken_files_are_refused_in_one_sentence(kind: str, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    make, read = FUZZED[kind]
    path = tmp_path / f"it.{kind.rpartition('.')[2]}"
    path.write_bytes(change(make()))
    found: list[digit5_files.Both] = []
    said = attempt(lambda: found.append(read(path, path)))
    assert said is None or "it." in said
    for both in found:  # and what is read is at least made of digits
        for x, y in both:
            assert x.dtype == np.uint8
            assert len(x) == len(y)
            assert y.min() >= 0
            assert y.max() <= 9


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=damage())
def test_a_broken_npz_is_never_taken_for_another(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    """Its arrays have checksums: what is read is what was written."""
    whole = images(4, 8, 3)
    path = tmp_path / "it.npz"
    path.write_bytes(change(npz(x=whole)))
    found: list[np.ndarray] = []
    if attempt(lambda: found.append(read_npz_arrays(path, {"x": ("u", 4)})["x"])) is None:
        assert np.array_equal(found[0], whole)


def test_npz_files_are_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    np.savez(tmp_path / "it.npz", x=np.array([Trap()], dtype=object))
    with pytest.raises(InputError, match="'x' of type object"):
        read_npz_arrays(tmp_path / "it.npz", {"x": ("u", 1)})
    assert not (tmp_path / "sprung").exists()


def test_a_lying_npz_header_costs_no_memory(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(10, np.uint8))
    with zipfile.ZipFile(tmp_path / "it.npz", "w") as archive:
        archive.writestr("x.npy", buffer.getvalue().replace(b"(10,), }           ", b"(9999999999999,), }"))
    with pytest.raises(InputError, match=r"says that 'x' has shape \(9999999999999,\), but it holds only"):
        read_npz_arrays(tmp_path / "it.npz", {"x": ("u", 1)})


@pytest.mark.data("mnist")
@pytest.mark.data("mnist-m")
@pytest.mark.data("svhn")
@pytest.mark.data("usps")
def test_the_real_domains() -> None:
    data = load_dataset("digit5", download=False)
    assert data.domain_names == ("mnist", "mnist-m", "svhn", "usps")
    assert data.domains is not None
    assert np.bincount(data.domains).tolist() == [60_000, 7_438, 7_438, 7_291]
    assert len(data.test) == 10_000 + 2_000 + 2_000 + 2_007
    assert data.train.x.shape[1:] == (32, 32, 3)
    assert "synth-digits" in data.notes[0]
    means = [float(data.train.x[data.domains == k].float().mean()) for k in range(4)]
    # Enlarging leaves the mean as it is: MNIST's is known, the others are those of the stored arrays.
    assert means == pytest.approx([0.1307 * 255, 113.3, 116.1, 64.9], abs=0.1)
