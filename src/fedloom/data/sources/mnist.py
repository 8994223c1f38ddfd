"""MNIST, Fashion-MNIST and scikit-learn's digits: IDX files, checksums, writers.

An IDX file holds a magic number, the dimensions, then bytes. It may be compressed by gzip. scikit-learn includes 1,797
handwritten digits of 8 x 8 pixels. A file beside MNIST may list who wrote each digit.
"""

import gzip
import struct
import zlib
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.cache import Progress, download_to_cache
from fedloom.data.dataset import Dataset
from fedloom.data.readers.arrays import read_npz_arrays
from fedloom.data.samples import InputTransform, Samples
from fedloom.data.sources.base import DatasetSource
from fedloom.errors import InputError
from fedloom.utils.data_folders import ExpectedFiles

CHUNK = 1 << 20


def _read_idx_file(path: Path, item: tuple[int, ...]) -> NDArray[np.uint8]:
    """The array of unsigned bytes in `path`, whose items must have the shape `item`."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return _read(stream, path, item)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}.") from None


def _read(stream: gzip.GzipFile | BufferedReader, path: Path, item: tuple[int, ...]) -> NDArray[np.uint8]:
    rank = 1 + len(item)
    head = stream.read(4 + 4 * rank)
    if len(head) < 4 + 4 * rank:
        raise InputError(f"{path} is truncated: {len(head)} bytes found, {4 + 4 * rank} expected in its header.")
    magic, count, *shape = struct.unpack(f">{1 + rank}I", head)
    if magic != 0x0800 + rank:  # 8: unsigned bytes
        raise InputError(f"{path} starts with the magic number {magic:#x}; expected {0x0800 + rank:#x}.")
    if tuple(shape) != item:
        raise InputError(f"{path} holds items of shape {tuple(shape)}; expected {item}.")
    size = count * int(np.prod(item, dtype=np.int64))
    # By chunks, so that what is allocated follows what is there and not what the header claims.
    content = bytearray()
    while len(content) <= size and (chunk := stream.read(min(CHUNK, size + 1 - len(content)))):
        content += chunk
    if len(content) != size:
        state = "truncated: " if len(content) < size else "too long: at least "
        raise InputError(f"{path} is {state}{len(content)} bytes found after its header, {size} expected.")
    return np.frombuffer(content, dtype=np.uint8).reshape(count, *item)


def _find_idx_file(folder: Path, name: str) -> Path | None:
    """The file `name` of `folder`, plain or with .gz."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_idx_samples(images: Path, labels: Path, classes: int, official: dict[str, tuple[int, str]]) -> Samples:
    """Images of 28 x 28 and their labels, checked against each other.

    `official` gives each published file's count and the SHA-256 of it uncompressed; a file of that count
    must be that file, so that nothing measured on it was measured on something else.
    """
    x, y = _read_idx_file(images, (28, 28)), _read_idx_file(labels, ())
    if len(x) != len(y):
        raise InputError(f"{images} holds {len(x)} images but {labels} holds {len(y)} labels.")
    if len(y) == 0:
        raise InputError(f"{images} holds no images.")
    if y.max() >= classes:
        raise InputError(f"{labels} holds the label {y.max()}; expected labels from 0 to {classes - 1}.")
    for path, values in ((images, x), (labels, y)):
        count, digest = official[path.name.removesuffix(".gz")]
        if len(values) == count and _digest(values) != digest:
            raise InputError(f"{path} has {count} items but is not the published file: its SHA-256 differs.")
    return Samples(torch.from_numpy(x).unsqueeze(-1), torch.from_numpy(y).long())


def _digest(values: NDArray[np.uint8]) -> str:
    """The SHA-256 of the plain file that holds `values`."""
    content = sha256(struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape))
    content.update(values.data)
    return content.hexdigest()


WRITERS = "qmnist_writer_ids.npz"
"""QMNIST found them again: the number of the writer of every image, as `writer_train` and `writer_test`."""


def _read_qmnist_writers(path: Path, num_images: int) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """For each of the training images a position in the names of the writers; None where there is no such file."""
    if not path.is_file():
        return None, ()
    numbers = read_npz_arrays(path, {"writer_train": ("ui", 1)})["writer_train"]
    if len(numbers) != num_images:
        raise InputError(f"{path} names the writers of {len(numbers)} images, but there are {num_images}.")
    known, owners = np.unique(numbers, return_inverse=True)
    return owners.astype(np.int64), tuple(f"writer {number}" for number in known.tolist())


TEN_DIGITS = tuple("0123456789")


@dataclass(frozen=True, kw_only=True)
class MnistSource(DatasetSource):
    """Four files in MNIST's format."""

    checksums: dict[str, tuple[int, str, str]] = field(repr=False)
    """For each file its count, the SHA-256 of it uncompressed, and the MD5 of the published .gz."""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(self.checksums)

    @property
    def expected_files(self) -> ExpectedFiles:
        return ExpectedFiles({name: [[f"{name}|{name}.gz"]] for name in self.files})

    def read(self, folder: Path) -> Dataset:
        official = {name: (count, digest) for name, (count, digest, _) in self.checksums.items()}
        images, labels, test_images, test_labels = (
            _find_idx_file(folder, name) or folder / name for name in self.files
        )
        classes = len(self.class_names)
        train = _read_idx_samples(images, labels, classes, official)
        test = _read_idx_samples(test_images, test_labels, classes, official)
        writers, names = _read_qmnist_writers(folder / WRITERS, len(train))
        return Dataset(train, test, self.class_names, writers, names)

    def download(self, folder: Path, progress: Progress | None) -> None:
        for name, (_, _, md5) in self.checksums.items():
            download_to_cache(f"{self.base_url}/{name}.gz", folder / f"{name}.gz", md5, progress)


MNIST = MnistSource(
    name="mnist",
    summary="handwritten digits, gray, 28 x 28",
    shape=(1, 28, 28),
    num_train_examples=60_000,
    num_test_examples=10_000,
    transform=InputTransform((0.1307,), (0.3081,)),
    class_names=TEN_DIGITS,
    folder_names=("mnist",),
    base_url="https://ossci-datasets.s3.amazonaws.com/mnist",
    checksums={
        "train-images-idx3-ubyte": (
            60_000,
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        ),
        "train-labels-idx1-ubyte": (
            60_000,
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "d53e105ee54ea40749a09fcbcd1e9432",
        ),
        "t10k-images-idx3-ubyte": (
            10_000,
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "9fb629c4189551a2d022fa330f9573f3",
        ),
        "t10k-labels-idx1-ubyte": (
            10_000,
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    },
)

FASHION_MNIST = MnistSource(
    name="fashion-mnist",
    summary="pieces of clothing, gray, 28 x 28",
    shape=(1, 28, 28),
    num_train_examples=60_000,
    num_test_examples=10_000,
    transform=InputTransform((0.2860,), (0.3530,)),
    class_names=(
        *("T-shirt/top", "trouser", "pullover", "dress", "coat"),
        *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
    ),
    folder_names=("fashion-mnist",),
    system_folders=(Path("/usr/share/datasets/fashion-mnist"),),  # Debian's package dataset-fashion-mnist
    base_url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    checksums={
        "train-images-idx3-ubyte": (
            60_000,
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        ),
        "train-labels-idx1-ubyte": (
            60_000,
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "25c81989df183df01b3e8a0aad5dffbe",
        ),
        "t10k-images-idx3-ubyte": (
            10_000,
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "bef4ecab320f06d8554ea6380940ec79",
        ),
        "t10k-labels-idx1-ubyte": (
            10_000,
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    },
)


def read_sklearn_digits() -> tuple[Samples, Samples]:
    """The training and the test samples: of each class every fifth is for testing, in the file's order.

    The file lists writers one after the other, so both parts hold digits of every writer. The split is
    always the same: results on `digits` compare across seeds and machines.
    """
    table = _table()
    # Gray values are 0..16; whole numbers of 0..255 keep them apart.
    images = np.rint(table[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = table[:, 64].astype(np.int64)
    held_out = np.zeros(len(labels), dtype=np.bool_)
    for label in range(10):
        held_out[np.flatnonzero(labels == label)[2::5]] = True
    pool = Samples(torch.from_numpy(images), torch.from_numpy(labels))
    return pool.take(np.flatnonzero(~held_out)), pool.take(np.flatnonzero(held_out))


def _table() -> NDArray[np.float64]:
    """64 gray values and a label in every row."""
    # Importing scikit-learn takes over a second; finding its folder takes none.
    spec = find_spec("sklearn")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            with gzip.open(path, "rt") as lines:
                return np.loadtxt(lines, delimiter=",", dtype=np.float64)
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target]).astype(np.float64)
