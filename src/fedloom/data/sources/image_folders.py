"""Published folders of images: CINIC-10, DomainNet and PACS."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedloom.data.dataset import Dataset, DatasetSpec
from fedloom.data.readers.arrays import read_npz_arrays
from fedloom.data.readers.images import (
    ImageFile,
    decode_images,
    decode_labeled_images,
    parse_image_size,
    read_images_in_folders,
)
from fedloom.data.samples import InputTransform, Samples
from fedloom.data.sources.base import DatasetSource
from fedloom.data.sources.cifar import CIFAR10
from fedloom.errors import InputError, unknown_name_error
from fedloom.utils.data_folders import ExpectedFiles
from fedloom.utils.storage import list_files_recursively

IMAGENET = InputTransform((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, kw_only=True)
class _ImageFolderSource(DatasetSource):
    """Image files in folders; `size` is the side to which they are resized."""

    size: int

    def with_options(self, spec: DatasetSpec) -> "_ImageFolderSource":
        size = parse_image_size(spec) or self.size
        return replace(self, size=size, shape=(3, size, size))

    def cache_key(self) -> str:
        return f"{super().cache_key()} {self.size}"


@dataclass(frozen=True, kw_only=True)
class CinicSource(_ImageFolderSource):
    """train/, valid/ and test/ with a folder for each class."""

    train_on_validation: bool = False
    """Whether the images of valid/ are for training, too."""

    def with_options(self, spec: DatasetSpec) -> "CinicSource":
        changed = super().with_options(spec)
        assert isinstance(changed, CinicSource)
        use = spec.text_option("valid", "none")
        if use not in ("none", "train"):
            raise unknown_name_error("use of CINIC-10's validation images", use, ["none", "train"])
        return replace(changed, train_on_validation=use == "train")

    def cache_key(self) -> str:
        return f"{super().cache_key()} {self.train_on_validation}"

    def read(self, folder: Path) -> Dataset:
        content = read_images_in_folders(
            folder, (), self.size, extra_train_folders=("valid",) if self.train_on_validation else ()
        )
        if content.class_names != self.class_names:
            raise InputError(f"{folder} has the classes {', '.join(content.class_names)}; expected those of CIFAR-10.")
        for part, samples, expected in (
            ("training", content.train, (self.num_train_examples or 0) * (1 + self.train_on_validation)),
            ("test", content.test, self.num_test_examples),
        ):
            if len(samples) != expected:
                raise InputError(f"{folder} has {len(samples)} {part} images; CINIC-10 has {expected}.")
        return content


@dataclass(frozen=True, kw_only=True)
class _ImageDomainSource(_ImageFolderSource):
    """A folder for each domain, in it one for each class."""

    domain_names: tuple[str, ...]
    classes: int
    images_per_domain: tuple[int, ...] = ()
    """How many images each domain has, where that is known."""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(f"{domain}/" for domain in self.domain_names)

    def root(self, folder: Path) -> Path:
        """PACS comes with its domains in a folder `kfold` of their own."""
        inside = folder / "kfold"
        return inside if any((inside / domain).is_dir() for domain in self.domain_names) else folder

    def found_domains(self, folder: Path) -> tuple[str, ...]:
        return tuple(domain for domain in self.domain_names if (self.root(folder) / domain).is_dir())

    @property
    def expected_files(self) -> ExpectedFiles:
        parts = {domain: [[f"kfold/{domain}/"], [f"{domain}/"]] for domain in self.domain_names}
        return ExpectedFiles(parts, enough_parts=2)

    def input_files(self, folder: Path) -> list[Path]:
        # Of other things that lie in the same folder nothing is read.
        beside = sorted(path for path in folder.iterdir() if path.suffix in (".txt", ".npz"))
        return beside + [
            path for domain in self.found_domains(folder) for path in list_files_recursively(self.root(folder) / domain)
        ]

    def read(self, folder: Path) -> Dataset:
        return self._checked(read_images_in_folders(self.root(folder), self.found_domains(folder), self.size), folder)

    def _checked(self, content: Dataset, folder: Path) -> Dataset:
        if len(content.class_names) != self.classes:
            raise InputError(f"{folder} has {len(content.class_names)} classes; {self.name!r} has {self.classes}.")
        return content


@dataclass(frozen=True, kw_only=True)
class DomainNetSource(_ImageDomainSource):
    """DomainNet says in DOMAIN_train.txt and DOMAIN_test.txt which images are for what."""

    def read(self, folder: Path) -> Dataset:
        found, pictures, names = self.found_domains(folder), list[ImageFile](), dict[int, str]()
        lists = [(folder / f"{domain}_{part}.txt", domain, part) for part in ("train", "test") for domain in found]
        if not any(path.is_file() for path, _, _ in lists):
            return super().read(folder)
        for path, domain, part in lists:
            for name, kind, label in _read_list(path, domain):
                if names.setdefault(label, kind) != kind:
                    raise InputError(f"{path} gives {kind!r} the label {label}, which {names[label]!r} has.")
                pictures.append(ImageFile(folder / name, label, found.index(domain), part == "test"))
        if sorted(names) != list(range(len(names))):
            raise InputError(f"the lists in {folder} leave labels below {max(names)} out.")
        class_names = tuple(names[label] for label in sorted(names))
        if len(set(class_names)) < len(class_names):
            raise InputError(f"the lists in {folder} give one class two labels.")
        return self._checked(decode_labeled_images(pictures, class_names, found, self.size), folder)


def _read_list(path: Path, domain: str) -> Iterator[tuple[str, str, int]]:
    """The file, the class and the label of lines such as `clipart/zebra/clipart_344_000001.jpg 344`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text.") from None
    if not lines:
        raise InputError(f"{path} is empty.")
    for line in lines:
        name, _, label = line.rpartition(" ")
        parts = name.split("/")
        if len(parts) != 3 or parts[0] != domain or ".." in parts or not label.isdecimal() or len(label) > 6:
            raise InputError(f"{path} has the line {line[:80]!r}; expected {domain}/CLASS/FILE LABEL.")
        yield name, parts[1], int(label)


@dataclass(frozen=True, kw_only=True)
class PacsSource(_ImageDomainSource):
    """PACS as folders, or packed in one file of JPEGs, pacs64.npz."""

    PACKED = "pacs64.npz"

    @property
    def expected_files(self) -> ExpectedFiles:
        folders = super().expected_files
        return replace(folders, parts={domain: [[self.PACKED], *found] for domain, found in folders.parts.items()})

    def read(self, folder: Path) -> Dataset:
        path = folder / self.PACKED
        content = self._unpacked(path) if path.is_file() else super().read(folder)
        if content.class_names != self.class_names:
            raise InputError(f"{folder} has the classes {', '.join(content.class_names)}; PACS has others.")
        found, expected = len(content.train) + len(content.test), sum(self.images_per_domain)
        if not self.missing_parts(folder) and found != expected:
            raise InputError(f"{folder} has {found} images; PACS has {expected}.")
        return content

    def _unpacked(self, path: Path) -> Dataset:
        numbers = {"jpeg": ("u", 1), "offset": ("ui", 1), "y": ("ui", 1), "domain": ("ui", 1)}
        arrays = read_npz_arrays(path, {**numbers, "domains": ("U", 1), "classes": ("U", 1)})
        jpeg = arrays["jpeg"]
        offset, labels, domains = (arrays[name].astype(np.int64) for name in ("offset", "y", "domain"))
        if len(offset) != len(labels) + 1 or len(domains) != len(labels):
            raise InputError(f"{path} has {len(labels)} labels, {len(domains)} domains and {len(offset)} offsets.")
        if offset[0] != 0 or offset[-1] != len(jpeg) or (np.diff(offset) <= 0).any():
            raise InputError(f"{path} has offsets that do not cut its {len(jpeg)} bytes into images.")
        names = tuple(map(str, arrays["domains"].tolist()))
        if names != self.domain_names or not len(labels) or labels.max() >= self.classes or domains.max() >= len(names):
            raise InputError(f"{path} has domains or labels that PACS does not have.")
        counts = tuple(np.bincount(domains, minlength=len(names)).tolist())
        if counts != self.images_per_domain:
            raise InputError(f"{path} has {counts} images by domain; PACS has {self.images_per_domain}.")
        images = decode_images(
            len(labels),
            lambda i: jpeg[offset[i] : offset[i + 1]].tobytes(),
            lambda i: f"image {i} of {path}",
            self.size,
        )
        held_out = np.zeros(len(labels), dtype=np.bool_)
        for group in np.unique(np.stack([domains, labels]), axis=1).T:  # every fifth, as in folders
            held_out[np.flatnonzero((domains == group[0]) & (labels == group[1]))[2::5]] = True
        pool = Samples(torch.from_numpy(images), torch.from_numpy(labels))
        train, test = (pool.take(np.flatnonzero(chosen)) for chosen in (~held_out, held_out))
        classes = tuple(map(str, arrays["classes"].tolist()))
        marks = (domains[~held_out], domains[held_out])
        return Dataset(train, test, classes, domains=marks[0], domain_names=names, test_domains=marks[1])


CINIC10 = CinicSource(
    name="cinic10",
    summary="photographs of CIFAR-10's ten kinds, from CIFAR-10 and ImageNet, color, 32 x 32",
    shape=(3, 32, 32),
    size=32,
    num_train_examples=90_000,
    num_test_examples=90_000,
    transform=InputTransform((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
    class_names=CIFAR10.class_names,
    file_names=("train/", "valid/", "test/"),
    file_patterns={name: [[name]] for name in ("train/", "valid/", "test/")},
    folder_names=("cinic-10", "cinic10", "CINIC-10"),
    base_url="https://datashare.ed.ac.uk/handle/10283/3192",
    manual_steps=(
        "download CINIC-10.tar.gz (MD5 6ee4d0c996905fe93221de577967a372) from "
        "https://datashare.ed.ac.uk/handle/10283/3192 and unpack it"
    ),
)

DOMAINNET = DomainNetSource(
    name="domainnet",
    summary="345 kinds of things in six domains, color, resized to 64 x 64",
    shape=(3, 64, 64),
    size=64,
    num_train_examples=409_832,
    num_test_examples=176_743,
    transform=IMAGENET,
    class_names=tuple(str(label) for label in range(345)),
    folder_names=("domainnet", "DomainNet"),
    base_url="http://ai.bu.edu/M3SDA",
    manual_steps=(
        "download the six domains (the cleaned version) and their lists DOMAIN_train.txt and DOMAIN_test.txt from "
        "http://ai.bu.edu/M3SDA and unpack them"
    ),
    domain_names=("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    classes=345,
)

PACS = PacsSource(
    name="pacs",
    summary="seven kinds of things in four domains, color, resized to 64 x 64",
    shape=(3, 64, 64),
    size=64,
    num_train_examples=7_993,
    num_test_examples=1_998,
    transform=IMAGENET,
    class_names=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
    folder_names=("pacs", "PACS", "pacs64"),
    base_url="https://dali-dl.github.io/project_iccv2017.html",
    manual_steps="download it from the page of its authors, https://dali-dl.github.io/project_iccv2017.html, "
    "and unpack it",
    domain_names=("art_painting", "cartoon", "photo", "sketch"),
    classes=7,
    images_per_domain=(2_048, 2_344, 1_670, 3_929),
)
