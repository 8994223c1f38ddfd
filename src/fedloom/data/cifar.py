"""CIFAR's binary versions: records of one label, or a coarse and a fine one, and three planes of 32 x 32 bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.samples import Samples
from fedloom.errors import InputError

PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Records:
    """How a version is written: the published files (name: records in it and SHA-256) and the labels of a record."""

    train: Mapping[str, tuple[int, str]]
    test: Mapping[str, tuple[int, str]]
    labels: tuple[int, ...]
    """For each label in front of the pixels how many values it has."""
    used: int = 0
    """Which of these labels counts."""

    @property
    def length(self) -> int:
        """Bytes of a record."""
        return len(self.labels) + PIXELS

    def sizes(self) -> dict[str, int]:
        """The bytes of every file."""
        return {name: count * self.length for name, (count, _) in {**self.train, **self.test}.items()}

    def read(self, folder: Path, files: Mapping[str, tuple[int, str]]) -> Samples:
        """The images of `files`, one file after the other."""
        parts = [self.decode(self.content(folder / name, *known), folder / name) for name, known in files.items()]
        return Samples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))

    def content(self, path: Path, count: int, digest: str) -> NDArray[np.uint8]:
        """The bytes of a published file. It has no header, so only its exact length shows that it is whole."""
        expected = count * self.length
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
        records = torch.from_numpy(content).view(-1, self.length)
        for column, count in enumerate(self.labels):
            largest = int(records[:, column].max()) if len(records) else 0
            if largest >= count:
                raise InputError(f"{path} holds the label {largest}; expected labels from 0 to {count - 1}.")
        planes = records[:, len(self.labels) :].reshape(-1, 3, 32, 32)
        return Samples(planes.permute(0, 2, 3, 1).contiguous(), records[:, self.used].long())


TEN = Records(
    train={
        "data_batch_1.bin": (10_000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        "data_batch_2.bin": (10_000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        "data_batch_3.bin": (10_000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        "data_batch_4.bin": (10_000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        "data_batch_5.bin": (10_000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    },
    test={"test_batch.bin": (10_000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b")},
    labels=(10,),
)

_HUNDRED = (
    {"train.bin": (50_000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29")},
    {"test.bin": (10_000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a")},
)
HUNDRED = Records(*_HUNDRED, labels=(20, 100), used=1)
TWENTY = Records(*_HUNDRED, labels=(20, 100), used=0)

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
