"""Folders of images: one folder a class, or one a domain with one folder a class in each.

    folder:PATH    PATH/CLASS/*.png, or PATH/train/CLASS/ and PATH/test/CLASS/
    domains:PATH   PATH/DOMAIN/CLASS/*.jpg, or PATH/DOMAIN/train/CLASS/ and PATH/DOMAIN/test/CLASS/

Where there is no folder for testing, every fifth image of each class and domain is, in the order of their names.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedloom.data.cache import cached
from fedloom.data.content import Dataset
from fedloom.data.pictures import decode_files, is_picture, read_size
from fedloom.data.samples import Samples
from fedloom.data.source import files_under
from fedloom.data.spec import Spec
from fedloom.errors import InputError

TRAIN, TESTS = "train", ("test", "val", "valid", "validation")
"""What a folder of training images is called, and the one for testing: the first that is there."""


class Picture(NamedTuple):
    """An image, its class and its domain as positions in names, and whether it is for testing."""

    path: Path
    label: int
    domain: int
    test: bool


def read_own_images(spec: Spec) -> Dataset:
    """The images below the path of `spec`; its option `size` says to how many pixels a side they are resized."""
    size = read_size(spec)
    spec.done()
    assert spec.path is not None
    folder = spec.path
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; {spec.name}:PATH wants one.")

    def make() -> Dataset:
        return read_folders(folder, [path.name for path in _subfolders(folder)] if spec.name == "domains" else (), size)

    return cached(f"{spec.name}-{folder.resolve().name}", folder, f"{spec.name} 1 {size}", _pictures(folder), make)


def read_folders(folder: Path, domains: Sequence[str], size: int | None, also: Sequence[str] = ()) -> Dataset:
    """The images of a folder with one folder a class, or of one with such a folder for each of these domains.

    Those of the folders `also` are for training, too.
    """
    parts = [_parts(place, also) for place in ([folder / domain for domain in domains] or [folder])]
    names = _class_names([source for sources in parts for source, test in sources if not test])
    pictures: list[Picture] = []
    for domain, sources in enumerate(parts):
        for source, test in sources:
            for path in _subfolders(source):
                if path.name not in names:
                    raise InputError(f"{path} is a class that the training images do not have.")
                label = names.index(path.name)
                for i, picture in enumerate(_pictures(path)):
                    pictures.append(Picture(picture, label, domain, i % 5 == 2 if test is None else test))
    held_out = sum(picture.test for picture in pictures)
    if not 0 < held_out < len(pictures):
        raise InputError(
            f"{folder} has {len(pictures) - held_out} images for training and {held_out} for testing; without a folder "
            "'test' a class must have three images or more, of which every fifth is for testing."
        )
    return decoded(pictures, names, domains, size)


def decoded(pictures: Iterable[Picture], names: tuple[str, ...], domains: Sequence[str], size: int | None) -> Dataset:
    """These images, of classes called `names`, and from `domains` if there are any."""
    ordered = sorted(pictures, key=lambda picture: picture.test)
    cut = sum(not picture.test for picture in ordered)
    images = decode_files([picture.path for picture in ordered], size)  # at once: all must have one size
    labels = torch.tensor([picture.label for picture in ordered], dtype=torch.int64)
    samples = Samples(torch.from_numpy(images), labels)
    marks = np.array([picture.domain for picture in ordered], dtype=np.int64)
    return Dataset(
        samples[:cut],
        samples[cut:],
        names,
        domains=marks[:cut] if domains else None,
        domain_names=tuple(domains),
        test_domains=marks[cut:] if domains else None,
    )


def _parts(folder: Path, also: Sequence[str]) -> list[tuple[Path, bool | None]]:
    """The folders of training images and, marked so, of test images; or one of both, which is marked None."""
    if not (folder / TRAIN).is_dir():
        return [(folder, None)]
    test = next((folder / name for name in TESTS if (folder / name).is_dir()), None)
    if test is None:
        raise InputError(f"{folder} has a folder 'train' but none called {' or '.join(map(repr, TESTS))}.")
    return [*((folder / name, False) for name in (TRAIN, *also)), (test, True)]


def _class_names(folders: Sequence[Path]) -> tuple[str, ...]:
    """The classes of all folders, in order; folders that share none are not what they are taken for."""
    found = [{path.name for path in _subfolders(folder)} for folder in folders]
    if not set.intersection(*found):
        raise InputError(f"{', '.join(map(str, folders[:6]))} have no class in common; expected some in all of them.")
    names = tuple(sorted(set.union(*found)))
    if len(names) < 2:
        raise InputError(f"{folders[0]} has one class, {names[0]!r}; there must be two folders to tell apart.")
    for folder, own in zip(folders, found, strict=True):
        if not any(_pictures(folder / name) for name in sorted(own)):
            raise InputError(f"{folder / min(own)} and the folders beside it hold no images.")
    return names


def _subfolders(folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise InputError(f"cannot read {folder}: {error.strerror}.") from None
    if not found:
        raise InputError(f"{folder} has no folders; expected one folder for each class.")
    return found


def _pictures(folder: Path) -> list[Path]:
    return [path for path in files_under(folder) if is_picture(path.name)] if folder.is_dir() else []
