"""CIFAR-10 and CIFAR-100 in their binary versions.

A record has one label, or a coarse and a fine one, and three planes of 32 x 32 bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.cache import Progress, download_to_cache, extract_to_cache
from fedloom.data.dataset import Dataset
from fedloom.data.samples import InputTransform, Samples
from fedloom.data.sources.base import DatasetSource
from fedloom.errors import InputError
from fedloom.utils.data_folders import ExpectedFiles

PIXELS = 3 * 32 * 32


Files = Mapping[str, tuple[int, str]]
"""Published files by name: the number of records, and the SHA-256."""

COARSE = (
    *("aquatic mammals", "fish", "flowers", "food containers", "fruit and vegetables"),
    *("household electrical devices", "household furniture", "insects", "large carnivores"),
    *("large man-made outdoor things", "large natural outdoor scenes", "large omnivores and herbivores"),
    *("medium-sized mammals", "non-insect invertebrates", "people", "reptiles", "small mammals", "trees"),
    *("vehicles 1", "vehicles 2"),
)
FINE = (
    *("apple", "aquarium fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle"),
    *("bowl", "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle"),
    *("chair", "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur"),
    *("dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard"),
    *("lamp", "lawn mower", "leopard", "lion", "lizard", "lobster", "man", "maple tree", "motorcycle", "mountain"),
    *("mouse", "mushroom", "oak tree", "orange", "orchid", "otter", "palm tree", "pear", "pickup truck", "pine tree"),
    *("plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket"),
    *("rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider"),
    *("squirrel", "streetcar", "sunflower", "sweet pepper", "table", "tank", "telephone", "television", "tiger"),
    *("tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow tree", "wolf", "woman", "worm"),
)


@dataclass(frozen=True, kw_only=True)
class CifarSource(DatasetSource):
    """CIFAR's binary version."""

    archive: str
    md5: str
    train_files: Files
    test_files: Files
    label_sizes: tuple[int, ...]
    """For each label in front of the pixels how many values it has."""
    label_index: int = 0
    """Which of these labels counts."""

    @property
    def record_size(self) -> int:
        """Bytes of a record."""
        return len(self.label_sizes) + PIXELS

    def file_sizes(self) -> dict[str, int]:
        """The bytes of every file."""
        return {name: count * self.record_size for name, (count, _) in {**self.train_files, **self.test_files}.items()}

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train_files, *self.test_files)

    @property
    def expected_files(self) -> ExpectedFiles:
        return ExpectedFiles({name: [[name]] for name in self.files})

    def read(self, folder: Path) -> Dataset:
        return Dataset(
            self.read_part(folder, self.train_files), self.read_part(folder, self.test_files), self.class_names
        )

    def read_part(self, folder: Path, files: Files) -> Samples:
        """The images of `files`, one file after the other."""
        parts = [self.decode(self.read_file(folder / name, *known), folder / name) for name, known in files.items()]
        return Samples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))

    def read_file(self, path: Path, count: int, digest: str) -> NDArray[np.uint8]:
        """The bytes of a published file. It has no header, so only its exact length shows that it is whole."""
        expected = count * self.record_size
        try:
            found = path.stat().st_size
            if found != expected:
                state = "truncated" if found < expected else "too long"
                raise InputError(f"{path} is {state}: {found} bytes found, {expected} expected.")
            content = np.fromfile(path, dtype=np.uint8)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}.") from None
        if sha256(content.data).hexdigest() != digest:
            raise InputError(f"{path} is not the published file: its SHA-256 differs.")
        return content

    def decode(self, content: NDArray[np.uint8], path: Path) -> Samples:
        """The labels and images of whole records; `path` is named where a label is impossible."""
        records = torch.from_numpy(content).view(-1, self.record_size)
        for column, count in enumerate(self.label_sizes):
            largest = int(records[:, column].max()) if len(records) else 0
            if largest >= count:
                raise InputError(f"{path} holds the label {largest}; expected labels from 0 to {count - 1}.")
        planes = records[:, len(self.label_sizes) :].reshape(-1, 3, 32, 32)
        return Samples(planes.permute(0, 2, 3, 1).contiguous(), records[:, self.label_index].long())

    def input_files(self, folder: Path) -> list[Path]:
        return [folder / name for name in self.files]

    def download(self, folder: Path, progress: Progress | None) -> None:
        archive = folder / self.archive
        download_to_cache(f"{self.base_url}/{self.archive}", archive, self.md5, progress)
        sizes = self.file_sizes()
        for size in set(sizes.values()):
            extract_to_cache(archive, folder, [name for name in sizes if sizes[name] == size], size)
        archive.unlink()


CIFAR10 = CifarSource(
    name="cifar10",
    summary="photographs of ten kinds of things, color, 32 x 32",
    shape=(3, 32, 32),
    num_train_examples=50_000,
    num_test_examples=10_000,
    transform=InputTransform((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    class_names=(
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    ),
    folder_names=("cifar-10-batches-bin", "cifar10"),
    base_url="https://www.cs.toronto.edu/~kriz",
    archive="cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    train_files={
        "data_batch_1.bin": (10_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        "data_batch_2.bin": (10_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        "data_batch_3.bin": (10_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        "data_batch_4.bin": (10_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        "data_batch_5.bin": (10_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    },
    test_files={"test_batch.bin": (10_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b")},
    label_sizes=(10,),
)

CIFAR100 = CifarSource(
    name="cifar100",
    summary="photographs of a hundred kinds of things, color, 32 x 32",
    shape=(3, 32, 32),
    num_train_examples=50_000,
    num_test_examples=10_000,
    transform=InputTransform((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    class_names=FINE,
    folder_names=("cifar-100-binary", "cifar100"),
    base_url="https://www.cs.toronto.edu/~kriz",
    archive="cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    train_files={"train.bin": (50_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29")},
    test_files={"test.bin": (10_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a")},
    label_sizes=(20, 100),
    label_index=1,
)

CIFAR100_COARSE = replace(
    CIFAR100,
    name="cifar100-coarse",
    summary="the photographs of cifar100 with its 20 coarse labels",
    class_names=COARSE,
    label_index=0,
)
