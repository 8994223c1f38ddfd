"""Readers of the files of MNIST-M, SVHN, USPS and SynthDigits.

A reader takes the file of the training images and the file of the test images, which may be the same. It returns the
images of both as bytes, n x H x W x C, and their labels from 0 to 9.
"""

import bz2
import gzip
import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.data.readers.arrays import read_mat_arrays, read_npz_arrays
from fedloom.data.readers.images import decode_image_files
from fedloom.errors import InputError

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Part = tuple[Images, Labels]
Both = tuple[Part, Part]

PUBLISHED = {
    "train_32x32.mat": (73_257, "e26dedcc434d2e4c54c9b2d4a06d8373"),
    "test_32x32.mat": (26_032, "eb5a983be6a315427106f1b164d9cef3"),
    "usps.bz2": (7_291, "ec16c51db3855ca6c91edd34d0e9b197"),
    "usps.t.bz2": (2_007, "8ea070ee2aca1ac39742fdd1ef5ed118"),
}
"""Images and MD5 of the published files: one with that name and count must be that file."""
MOST_TEXT = 1 << 27
"""Bytes of text that USPS may have; it has 12 million."""


def _each(read: Callable[[Path], Part]) -> Callable[[Path, Path], Both]:
    """What reads two files that are alike, each by itself."""
    return lambda train, test: (read(train), read(test))


@_each
def read_digit5_npz_pair(path: Path) -> Part:
    """x (uint8, n x H x W x 3) and y, in one file for training and one for testing."""
    arrays = read_npz_arrays(path, {"x": ("u", 4), "y": ("ui", 1)})
    return _checked(arrays["x"], arrays["y"], path)


def read_digit5_usps_npz(train: Path, _test: Path) -> Both:
    """Thousandths of the values of -1 to 1, n x 16 x 16."""
    names = {"x_train": ("i", 3), "y_train": ("ui", 1), "x_test": ("i", 3), "y_test": ("ui", 1)}
    arrays = read_npz_arrays(train, names)

    def part(name: str) -> Part:
        return _checked(_bytes(arrays[f"x_{name}"] / 1000, -1, train)[..., None], arrays[f"y_{name}"], train)

    return part("train"), part("test")


@_each
def read_digit5_svhn_mat(path: Path) -> Part:
    """SVHN's own format, and SynthDigits': X is 32 x 32 x 3 x n, and where y is 10 the digit is 0."""
    x, y = read_mat_arrays(path, ["X", "y"])
    if x.ndim != 4:
        raise InputError(f"{path} has X of shape {x.shape}; expected height x width x channels x images.")
    labels = _flat(y, path)
    part = _checked(x.transpose(3, 0, 1, 2), np.where(labels == 10, 0, labels), path)
    _verify_checksum(path, len(labels))
    return part


def read_digit5_mnist_mat(train: Path, _test: Path) -> Both:
    """mnist_data.mat of Digit-Five: 55,000 + 10,000."""
    *images, y, y_test = read_mat_arrays(train, ["train_28", "test_28", "label_train", "label_test"])
    gray = [x.reshape(-1, 28, 28, 1) if x.size % 784 == 0 else x for x in images]
    return _checked(gray[0], _one_hot(y, train), train), _checked(gray[1], _one_hot(y_test, train), train)


def read_digit5_mnistm_mat(train: Path, _test: Path) -> Both:
    """mnistm_with_label.mat of Digit-Five: 55,000 + 10,000."""
    x, x_test, y, y_test = read_mat_arrays(train, ["train", "test", "label_train", "label_test"])
    return _checked(x, _one_hot(y, train), train), _checked(x_test, _one_hot(y_test, train), train)


def read_digit5_synth_mat(train: Path, _test: Path) -> Both:
    """syn_number.mat of Digit-Five: 25,000 + 9,000."""
    x, y, x_test, y_test = read_mat_arrays(train, ["train_data", "train_label", "test_data", "test_label"])
    return _checked(x, _flat(y, train), train), _checked(x_test, _flat(y_test, train), train)


def read_digit5_usps_mat(train: Path, _test: Path) -> Both:
    """usps_28x28.mat of Digit-Five: 7,438 + 1,860 of values from 0 to 1, in a 2 x 2 array of arrays."""
    (cells,) = read_mat_arrays(train, ["dataset"])
    if cells.shape != (2, 2) or cells.dtype != object:
        raise InputError(f"{train} has a 'dataset' of shape {cells.shape}; expected 2 x 2 arrays.")

    def part(x: NDArray[Any], y: NDArray[Any]) -> Part:
        if x.ndim != 4 or x.shape[1] != 1:
            raise InputError(f"{train} has images of shape {x.shape}; expected n x 1 x 28 x 28.")
        return _checked(_bytes(x, 0, train).transpose(0, 2, 3, 1), _flat(y, train), train)

    return part(*cells[0]), part(*cells[1])


@_each
def read_digit5_usps_libsvm(path: Path) -> Part:
    """LIBSVM's lines `7 1:-1 2:-0.6 ... 256:-1`, in which labels count from 1."""
    rows, labels = [], []
    for line in _text(path).splitlines():
        first, *pairs = line.split()
        values = [pair.split(":") for pair in pairs]
        if [number for number, *_ in values] != [str(i) for i in range(1, 257)] or any(len(v) != 2 for v in values):
            raise InputError(f"{path} has the line {line[:40]!r}...; expected a label and the values 1: to 256:.")
        rows.append([value for _, value in values])
        labels.append(first)
    part = _usps(rows, labels, path, 1)
    _verify_checksum(path, len(labels))
    return part


@_each
def read_digit5_usps_text(path: Path) -> Part:
    """zip.train.gz and zip.test.gz: lines of a label and 256 values of -1 to 1."""
    rows = [line.split() for line in _text(path).splitlines()]
    if wrong := next((row for row in rows if len(row) != 257), None):
        raise InputError(f"{path} has a line of {len(wrong)} numbers; expected 257.")
    return _usps([row[1:] for row in rows], [row[0] for row in rows], path, 0)


@_each
def read_digit5_mnistm_images(path: Path) -> Part:
    """mnist_m_train_labels.txt with lines `00000000.png 5`, and the images in mnist_m_train/ beside it."""
    folder = path.with_name(path.name.removesuffix("_labels.txt"))
    lines = [line.split() for line in _text(path).splitlines()]
    if wrong := next((line for line in lines if len(line) != 2 or "/" in line[0] or not line[1].isdecimal()), None):
        raise InputError(f"{path} has the line {' '.join(wrong)[:80]!r}; expected a file and its digit.")
    images = decode_image_files([folder / name for name, _ in lines], None)
    return _checked(images, np.array([int(label[:9]) for _, label in lines]), path)


def _checked(x: NDArray[Any], y: NDArray[Any], path: Path) -> Part:
    """Images and labels that fit each other: bytes, no more than 32 x 32, in one or three channels."""
    if x.ndim != 4 or x.dtype.kind not in "uif" or x.shape[3] not in (1, 3) or max(x.shape[1:3]) > 32:
        raise InputError(f"{path} has images of type {x.dtype} and shape {x.shape}; expected n x 32 x 32 x 3 at most.")
    if len(x) != len(y) or not len(y) or not x.size:
        raise InputError(f"{path} has {len(x)} images and {len(y)} labels; expected as many, and some.")
    if y.dtype.kind not in "ui" or y.min() < 0 or y.max() > 9:
        raise InputError(f"{path} has labels from {y.min()} to {y.max()}; expected digits from 0 to 9.")
    if x.dtype != np.uint8:
        if not bool(((x >= 0) & (x <= 255)).all()):
            raise InputError(f"{path} has pixels outside of 0 to 255.")
        x = np.rint(x)
    return np.ascontiguousarray(x, dtype=np.uint8), y.astype(np.int64)


def _verify_checksum(path: Path, count: int) -> None:
    """Refuses a file that has the name and the count of a published one and is another."""
    published = PUBLISHED.get(path.name)
    if published is not None and count == published[0]:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if found != published[1]:
            raise InputError(f"{path} has {count} images but is not the published file: its MD5 differs.")


def _usps(rows: list[list[str]], labels: list[str], path: Path, first: int) -> Part:
    try:
        values = np.array(rows, dtype=np.float64).reshape(-1, 16, 16)
        digits = np.array([int(float(label)) - first for label in labels], dtype=np.int64)
    except (ValueError, OverflowError):
        raise InputError(f"{path} has something that is no number, or lines of different length.") from None
    return _checked(_bytes(values, -1, path)[..., None], digits, path)


def _bytes(values: NDArray[Any], low: int, path: Path) -> Images:
    """Values from `low` to 1 as bytes from 0 to 255."""
    if values.dtype.kind not in "uif" or not bool(((values >= low) & (values <= 1)).all()):
        raise InputError(f"{path} has values outside of {low} to 1.")
    return np.rint((values - low) * (255 / (1 - low))).astype(np.uint8)


def _one_hot(y: NDArray[Any], path: Path) -> NDArray[Any]:
    if y.ndim != 2 or y.shape[1] != 10 or y.dtype.kind not in "uifb" or not ((y == 1).sum(1) == 1).all():
        raise InputError(f"{path} has labels of shape {y.shape}; expected a one among ten numbers for each image.")
    return np.asarray((y == 1).argmax(1))


def _flat(y: NDArray[Any], path: Path) -> NDArray[Any]:
    """Labels n x 1 or 1 x n; MATLAB writes whole numbers as floats."""
    flat = y.reshape(-1)
    if flat.dtype.kind == "f" and bool(np.isfinite(flat).all()) and bool((flat == np.rint(flat)).all()):
        flat = flat.astype(np.int64)
    if flat.dtype.kind not in "ui":
        raise InputError(f"{path} has labels of type {flat.dtype}; expected whole numbers.")
    return flat


def _text(path: Path) -> str:
    """A text file, plain or packed by gzip or bzip2."""
    try:
        with (
            gzip.open(path)
            if path.suffix == ".gz"
            else bz2.open(path)
            if path.suffix == ".bz2"
            else path.open("rb") as f
        ):
            content: bytes = f.read(MOST_TEXT + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}.") from None
    if len(content) > MOST_TEXT:
        raise InputError(f"{path} holds more than {MOST_TEXT} bytes of text; that is too long.")
    try:
        text = content.decode("ascii")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text.") from None
    if not text.strip():
        raise InputError(f"{path} is empty.")
    return "\n".join(line for line in text.splitlines() if line.strip())
