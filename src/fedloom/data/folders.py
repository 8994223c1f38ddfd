"""Folders of images: one folder a class, or one a domain with one folder a class in each.

    folder:PATH    PATH/CLASS/*.png, or PATH/train/CLASS/ and PATH/test/CLASS/
    domains:PATH   PATH/DOMAIN/CLASS/*.jpg, or PATH/DOMAIN/train/CLASS/ and PATH/DOMAIN/test/CLASS/

Where there is no folder for testing, every fifth image of each class and domain is, in the order of their names.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fedloom.data.content import Dataset
from fedloom.data.pictures import decode_files, is_picture
from fedloom.data.samples import Samples
from fedloom.data.source import files_under
from fedloom.errors import InputError

TRAIN, TESTS = "train", ("test", "val", "valid", "validation")
"""What a folder of training images is called, and the one for testing: the first that is there."""


@dataclass
class Listing:
    """Which images there are, with the class and the domain of each, as positions in names."""

    paths: list[Path] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    domains: list[int] = field(default_factory=list)

    def add(self, paths: Iterable[Path], label: int, domain: int = 0) -> None:
        for path in paths:
            self.paths.append(path)
            self.labels.append(label)
            self.domains.append(domain)

    def samples(self, size: int | None) -> Samples:
        """The images decoded, n x `size` x `size` x 3."""
        images = decode_files(self.paths, size)
        return Samples(torch.from_numpy(images), torch.tensor(self.labels, dtype=torch.int64))


def read_folder(folder: Path, size: int | None = None, also: Sequence[str] = ()) -> Dataset:
    """The images of a folder with one folder a class; those of the folders `also` are for training, too."""
    parts = _parts(folder)
    if parts is None:
        names, train, test = _class_names([folder]), Listing(), Listing()
        _split(folder, names, 0, train, test)
    else:
        sources = [parts[0], *(folder / name for name in also)]
        names = _class_names(sources)
        train, test = Listing(), Listing()
        for source in sources:
            _add(source, names, 0, train)
        _add(parts[1], names, 0, test)
    return _content(folder, train, test, names, (), size)


def read_domains(folder: Path, domains: Sequence[str] | None = None, size: int | None = None) -> Dataset:
    """The images of a folder with one folder a domain, of these `domains` or of all that are there."""
    found = tuple(domains) if domains is not None else tuple(path.name for path in _subfolders(folder))
    parts = [(folder / domain, _parts(folder / domain)) for domain in found]
    names = _class_names([place if split is None else split[0] for place, split in parts])
    train, test = Listing(), Listing()
    for number, (place, split) in enumerate(parts):
        if split is None:
            _split(place, names, number, train, test)
        else:
            _add(split[0], names, number, train)
            _add(split[1], names, number, test)
    return _content(folder, train, test, names, found, size)


def decoded(
    train: Listing, test: Listing, names: tuple[str, ...], domains: tuple[str, ...], size: int | None
) -> Dataset:
    """The images of two listings with classes called `names`, and from `domains` if there are any."""
    together = Listing(train.paths + test.paths, train.labels + test.labels)
    samples = together.samples(size)  # at once: all must have one size
    cut = len(train.paths)
    marks = [np.array(part.domains, dtype=np.int64) if domains else None for part in (train, test)]
    return Dataset(samples[:cut], samples[cut:], names, domains=marks[0], domain_names=domains, test_domains=marks[1])


def _content(
    folder: Path, train: Listing, test: Listing, names: tuple[str, ...], domains: tuple[str, ...], size: int | None
) -> Dataset:
    if not train.paths or not test.paths:
        raise InputError(
            f"{folder} has {len(train.paths)} images for training and {len(test.paths)} for testing; without a folder "
            "'test' a class must have three images or more, of which every fifth is for testing."
        )
    return decoded(train, test, names, domains, size)


def _split(folder: Path, names: tuple[str, ...], domain: int, train: Listing, test: Listing) -> None:
    for label, name in enumerate(names):
        paths = _pictures(folder / name)
        held_out = set(range(2, len(paths), 5))
        train.add((path for i, path in enumerate(paths) if i not in held_out), label, domain)
        test.add((paths[i] for i in sorted(held_out)), label, domain)


def _add(folder: Path, names: tuple[str, ...], domain: int, listing: Listing) -> None:
    for path in _subfolders(folder):
        if path.name not in names:
            raise InputError(f"{path} is a class that the training images do not have.")
        listing.add(_pictures(path), names.index(path.name), domain)


def _parts(folder: Path) -> tuple[Path, Path] | None:
    """The folders of training and test images, where there are such."""
    if not (folder / TRAIN).is_dir():
        return None
    test = next((folder / name for name in TESTS if (folder / name).is_dir()), None)
    if test is None:
        raise InputError(f"{folder} has a folder 'train' but none called {' or '.join(map(repr, TESTS))}.")
    return folder / TRAIN, test


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
