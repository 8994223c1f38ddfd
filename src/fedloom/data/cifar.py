"""CIFAR-10 in its binary version: records of one label and three colour planes of 32 x 32 bytes."""

from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.samples import Samples
from fedloom.errors import InputError

RECORD = 1 + 3 * 32 * 32
RECORDS = 10_000

TRAIN = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
}
TEST = {"test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"}


def read_cifar10(folder: Path, files: dict[str, str]) -> Samples:
    """The images of the published `files` (name: SHA-256) of `folder`, one file after the other."""
    parts = [decode(read_batch(folder / name, digest), folder / name) for name, digest in files.items()]
    return Samples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))


def read_batch(path: Path, digest: str) -> NDArray[np.uint8]:
    """The bytes of a published file. It has no header, so only its exact length shows that it is whole."""
    try:
        found = path.stat().st_size
        if found != RECORD * RECORDS:
            state = "truncated" if found < RECORD * RECORDS else "too long"
            raise InputError(f"{path} is {state}: {found} bytes found, {RECORD * RECORDS} expected.")
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    if sha256(content.data).hexdigest() != digest:
        raise InputError(f"{path} is not the published file: its SHA-256 differs.")
    return content


def decode(content: NDArray[np.uint8], path: Path) -> Samples:
    """The labels and images of whole records; `path` is named where a label is impossible."""
    records = torch.from_numpy(content).view(-1, RECORD)
    labels = records[:, 0].long()
    if len(labels) and int(labels.max()) > 9:
        raise InputError(f"{path} holds the label {int(labels.max())}; expected labels from 0 to 9.")
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return Samples(planes.permute(0, 2, 3, 1).contiguous(), labels)
