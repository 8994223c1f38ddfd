"""Digit-5: five sets of digits as domains of 32 x 32 color images.

The domains are MNIST, MNIST-M, SVHN, SynthDigits and USPS.

Missing domains are left out. The files of a domain may be in a folder of its own name or in one folder for all. They
are those that its owners publish, those of Digit-Five (which the LSS paper uses), or numpy arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fedloom.data.cache import Progress, download_to_cache
from fedloom.data.dataset import Dataset
from fedloom.data.samples import InputTransform, Samples
from fedloom.data.sources import digit5_files as files
from fedloom.data.sources.base import DatasetSource
from fedloom.data.sources.mnist import MNIST, TEN_DIGITS
from fedloom.errors import InputError
from fedloom.utils.data_folders import ExpectedFiles

SIDE = 32
CHUNK = 4096


@dataclass(frozen=True)
class _DigitFileFormat:
    """Two files, for training and for testing, that may be the same, and how they are read."""

    train_file: str
    test_file: str
    read: Callable[[Path, Path], files.Both]


def _one(name: str, read: Callable[[Path, Path], files.Both]) -> _DigitFileFormat:
    return _DigitFileFormat(name, name, read)


ARRAYS = _DigitFileFormat("train.npz", "test.npz", files.read_digit5_npz_pair)
DOMAINS: dict[str, tuple[tuple[str, ...], tuple[_DigitFileFormat, ...], tuple[_DigitFileFormat, ...]]] = {
    "mnist": (("mnist",), (), (_one("mnist_data.mat", files.read_digit5_mnist_mat),)),
    "mnist-m": (
        ("mnist-m", "mnist_m", "mnistm"),
        (
            ARRAYS,
            _DigitFileFormat("mnist_m_train_labels.txt", "mnist_m_test_labels.txt", files.read_digit5_mnistm_images),
        ),
        (_one("mnistm_with_label.mat", files.read_digit5_mnistm_mat),),
    ),
    "svhn": (
        ("svhn", "SVHN"),
        (ARRAYS, _DigitFileFormat("train_32x32.mat", "test_32x32.mat", files.read_digit5_svhn_mat)),
        (_DigitFileFormat("svhn_train_32x32.mat", "svhn_test_32x32.mat", files.read_digit5_svhn_mat),),
    ),
    "synth-digits": (
        ("synth-digits", "synthdigits", "syn"),
        (ARRAYS,),
        (
            _DigitFileFormat("synth_train_32x32.mat", "synth_test_32x32.mat", files.read_digit5_svhn_mat),
            _one("syn_number.mat", files.read_digit5_synth_mat),
        ),
    ),
    "usps": (
        ("usps", "USPS"),
        (
            _one("usps.npz", files.read_digit5_usps_npz),
            _DigitFileFormat("zip.train.gz", "zip.test.gz", files.read_digit5_usps_text),
            _DigitFileFormat("zip.train", "zip.test", files.read_digit5_usps_text),
        ),
        (
            _DigitFileFormat("usps.bz2", "usps.t.bz2", files.read_digit5_usps_libsvm),
            _one("usps_28x28.mat", files.read_digit5_usps_mat),
        ),
    ),
}
"""For each domain its folders, the forms that are known by their folder's name, and those known by their own."""


@dataclass(frozen=True, kw_only=True)
class Digit5Source(DatasetSource):
    """All domains that are found in one place, brought to 32 x 32 x 3."""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(f"{folders[0]}/" for folders, _, _ in DOMAINS.values())

    @property
    def expected_files(self) -> ExpectedFiles:
        parts = {}
        for domain in DOMAINS:
            parts[domain] = [[place + form.train_file, place + form.test_file] for place, form in _choices(domain)]
        for place in DOMAINS["mnist"][0]:
            parts["mnist"].append([f"{place}/{name}|{place}/{name}.gz" for name in MNIST.files])
        return ExpectedFiles(parts, enough_parts=2)

    def input_files(self, folder: Path) -> list[Path]:
        paths: list[Path] = []
        for place, form in _find_domain_files(folder).values():
            own = {place / form.train_file, place / form.test_file} if form else filter(Path.is_file, place.iterdir())
            paths += sorted(own)
        return paths

    def read(self, folder: Path) -> Dataset:
        found = _find_domain_files(folder)
        parts = [_read(place, form) for place, form in found.values()]
        train, test = (_pool([part[i] for part in parts]) for i in (0, 1))
        sizes = [[len(part[i][1]) for part in parts] for i in (0, 1)]
        marks = [np.repeat(np.arange(len(parts), dtype=np.int64), each) for each in sizes]
        return Dataset(train, test, TEN_DIGITS, domains=marks[0], domain_names=tuple(found), test_domains=marks[1])

    def download(self, folder: Path, progress: Progress | None) -> None:
        """MNIST, SVHN and USPS, which their owners publish at fixed addresses; the others are fetched by hand."""
        MNIST.download(folder / "mnist", progress)
        for name in ("train_32x32.mat", "test_32x32.mat"):
            target = folder / "svhn" / name
            download_to_cache(
                f"http://ufldl.stanford.edu/housenumbers/{name}", target, files.PUBLISHED[name][1], progress
            )
        for name in ("usps.bz2", "usps.t.bz2"):
            download_to_cache(f"{self.base_url}/{name}", folder / "usps" / name, files.PUBLISHED[name][1], progress)


def _find_domain_files(folder: Path) -> dict[str, tuple[Path, _DigitFileFormat | None]]:
    """Where each domain is and in which form; no form is MNIST's own."""
    found: dict[str, tuple[Path, _DigitFileFormat | None]] = {}
    for domain, (folders, *_) in DOMAINS.items():
        places = [folder / name for name in folders]
        if domain == "mnist" and (place := next((p for p in places if MNIST.is_complete(p)), None)):
            found[domain] = place, None
            continue
        for name, form in _choices(domain):
            if (folder / name / form.train_file).is_file() and (folder / name / form.test_file).is_file():
                found[domain] = folder / name, form
                break
    return found


def _choices(domain: str) -> list[tuple[str, _DigitFileFormat]]:
    """The places below a folder where a domain may be, each with the form of its files there."""
    folders, own, anywhere = DOMAINS[domain]
    return [(f"{name}/", form) for name in folders for form in own + anywhere] + [("", form) for form in anywhere]


def _read(place: Path, form: _DigitFileFormat | None) -> files.Both:
    if form is not None:
        return form.read(place / form.train_file, place / form.test_file)
    content = MNIST.read(place)
    return (content.train.x.numpy(), content.train.y.numpy()), (content.test.x.numpy(), content.test.y.numpy())


def _pool(parts: list[files.Part]) -> Samples:
    labels: NDArray[np.int64] = np.concatenate([y for _, y in parts])
    images = np.empty((len(labels), SIDE, SIDE, 3), dtype=np.uint8)
    first = 0
    for x, _ in parts:
        for start in range(0, len(x), CHUNK):
            chunk = _resize_images(x[start : start + CHUNK])
            images[first : first + len(chunk)] = chunk  # one channel is repeated
            first += len(chunk)
    return Samples(torch.from_numpy(images), torch.from_numpy(labels))


def _resize_images(x: files.Images) -> files.Images:
    """Small images enlarged to 32 x 32 between the pixels they have."""
    if x.shape[1:3] == (SIDE, SIDE):
        return x
    if max(x.shape[1:3]) > SIDE:
        raise InputError(f"digits of {x.shape[1]} x {x.shape[2]} pixels are larger than {SIDE} x {SIDE}.")
    planes = torch.from_numpy(x).permute(0, 3, 1, 2).float()
    larger = F.interpolate(planes, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return np.asarray(larger.round().to(torch.uint8).permute(0, 2, 3, 1).numpy())


DIGIT5 = Digit5Source(
    name="digit5",
    summary="digits of five domains (MNIST, MNIST-M, SVHN, SynthDigits, USPS), color, 32 x 32",
    shape=(3, SIDE, SIDE),
    num_train_examples=None,
    num_test_examples=None,
    transform=InputTransform((0.5,) * 3, (0.5,) * 3),
    class_names=TEN_DIGITS,
    folder_names=("digit5", "Digit-Five", "."),
    base_url="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass",
)
