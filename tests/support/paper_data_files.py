"""Small files in the exact formats of the papers' data sets."""

import io
import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedloom.data.sources.base import DatasetSource
from fedloom.data.sources.cifar import CIFAR10, CIFAR100, CIFAR100_COARSE, CifarSource
from fedloom.data.sources.image_folders import CINIC10, DOMAINNET

TRAIN, TEST = 200, 10
"""Images for training and for testing, of those sets that are divided by a partition."""


def write_all(root: Path) -> dict[str, DatasetSource]:
    """Write all data sets below `root`; returns the sources that know how many samples of what these files hold."""
    for kind, count in (("train", TRAIN), ("t10k", TEST)):
        _idx(root / "fashion-mnist" / f"{kind}-images-idx3-ubyte", _pixels(count, 28, 28))
        _idx(root / "fashion-mnist" / f"{kind}-labels-idx1-ubyte", _labels(count, 10))
    _femnist(root / "femnist")
    _shakespeare(root / "shakespeare")
    _sent140(root / "sent140")
    _digit5(root / "digit5")
    _domainnet(root / "domainnet")
    _cinic(root / "cinic-10")
    changed: list[DatasetSource] = [
        _cifar(root, CIFAR10),
        _cifar(root, CIFAR100),
        _cifar(root, CIFAR100_COARSE),
        replace(DOMAINNET, classes=2),
        replace(CINIC10, num_train_examples=40, num_test_examples=10),
    ]
    return {source.name: source for source in changed}


def _pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).integers(0, 256, shape, dtype=np.uint8)


def _labels(count: int, classes: int) -> np.ndarray:
    return (np.arange(count) % classes).astype(np.uint8)


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _idx(path: Path, values: np.ndarray) -> None:
    _put(path, struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape) + values.tobytes())


def _cifar(root: Path, source: CifarSource) -> CifarSource:
    """Records of labels and pixels. The published counts and checksums are those of other files."""
    known: list[dict[str, tuple[int, str]]] = []
    for names, count in ((source.train_files, TRAIN), (source.test_files, TEST)):
        found = {}
        for name in names:
            size = count // len(names)
            labels = np.stack([_labels(size, most) for most in source.label_sizes], axis=1)
            content = np.concatenate([labels, _pixels(size, 3072)], axis=1).tobytes()
            _put(root / source.folder_names[0] / name, content)
            found[name] = size, sha256(content).hexdigest()
        known.append(found)
    return replace(source, train_files=known[0], test_files=known[1])


def _leaf(folder: Path, users: Mapping[str, Mapping[str, list[Any]]], test: int) -> None:
    """LEAF's train/ and test/, of each user the last `test` samples for testing."""
    for part, cut in (("train", slice(None, -test)), ("test", slice(-test, None))):
        data = {user: {key: values[cut] for key, values in held.items()} for user, held in users.items()}
        sizes = [len(held["y"]) for held in data.values()]
        content = {"users": list(users), "num_samples": sizes, "hierarchies": [], "user_data": data}
        _put(folder / part / f"all_data_niid_0_keep_0_{part}_9.json", json.dumps(content).encode())


def _femnist(folder: Path) -> None:
    """Three writers with more than a hundred samples each, as the papers ask for."""
    images = (_pixels(110, 784) > 127).astype(float).tolist()
    users = {f"f{k:04d}_{k:02d}": {"x": images, "y": [(i + k) % 62 for i in range(110)]} for k in range(3)}
    _leaf(folder / "data", users, test=5)


def _shakespeare(folder: Path) -> None:
    """Three roles of more than 5,700 characters."""
    said = {f"ROLE_{k}": [f"To be, or not to be, that is the question {k}: " * 130] for k in range(3)}
    _put(folder / "by_role.json", json.dumps({"users": list(said), "speeches": said}).encode())


def _sent140(folder: Path) -> None:
    """Three users of more than 40 tweets: id, date, query, name and text."""
    users = {}
    for k in range(3):
        texts = [f"{'good' if i % 2 else 'bad'} morning number {i}" for i in range(46)]
        tweets = [[str(i), "Mon Apr 06", "NO_QUERY", f"user{k}", text] for i, text in enumerate(texts)]
        users[f"user{k}"] = {"x": tweets, "y": [i % 2 for i in range(46)]}
    _leaf(folder / "data", users, test=4)


def _digit5(folder: Path) -> None:
    """Numpy arrays for all domains but MNIST, which comes as its own files."""
    for kind, count in (("train", 40), ("t10k", 10)):
        _idx(folder / "mnist" / f"{kind}-images-idx3-ubyte", _pixels(count, 28, 28))
        _idx(folder / "mnist" / f"{kind}-labels-idx1-ubyte", _labels(count, 10))
    for domain in ("mnist-m", "svhn", "synth-digits"):
        for part, count in (("train", 40), ("test", 10)):
            _npz(folder / domain / f"{part}.npz", x=_pixels(count, 32, 32, 3), y=_labels(count, 10))
    parts = {"train": 40, "test": 10}
    values = {f"x_{part}": (_pixels(n, 16, 16).astype(np.int16) - 128) * 7 for part, n in parts.items()}
    _npz(folder / "usps" / "usps.npz", **values, **{f"y_{part}": _labels(n, 10) for part, n in parts.items()})


def _npz(path: Path, **arrays: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    _put(path, buffer.getvalue())


def _picture(path: Path, side: int, seed: int, form: str) -> None:
    buffer = io.BytesIO()
    Image.fromarray(_pixels(side, side, 3, 1 + seed)[..., 0]).save(buffer, form)
    _put(path, buffer.getvalue())


def _domainnet(folder: Path) -> None:
    """Six domains with two classes, and the lists that say which images are for what."""
    for domain in DOMAINNET.domain_names:
        for part, count in (("train", 4), ("test", 1)):
            lines = []
            for label, name in enumerate(("aircraft_carrier", "zebra")):
                for i in range(count):
                    image = f"{domain}/{name}/{domain}_{label:03d}_{part}_{i:06d}.jpg"
                    _picture(folder / image, 70, i, "JPEG")
                    lines.append(f"{image} {label}")
            _put(folder / f"{domain}_{part}.txt", ("\n".join(lines) + "\n").encode())


def _cinic(folder: Path) -> None:
    """Four training images of every class, one for validation and one for testing."""
    for part, count in (("train", 4), ("valid", 1), ("test", 1)):
        for name in CINIC10.class_names:
            for i in range(count):
                _picture(folder / part / name / f"cifar10-{part}-{i}.png", 32, i, "PNG")
