"""Folders of images: one folder a class, or one a domain with one folder a class in each.

    folder:PATH    PATH/CLASS/*.png, or PATH/train/CLASS/ and PATH/test/CLASS/
    domains:PATH   PATH/DOMAIN/CLASS/*.jpg, or PATH/DOMAIN/train/CLASS/ and PATH/DOMAIN/test/CLASS/

Where there is no folder for testing, every fifth image of each class and domain is, in the order of their names.

PNG, JPEG and other image files as arrays of one size, decoded by Pillow.
"""

import io
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.cache import cache_folder, load_through_cache
from fedloom.data.dataset import Dataset, DatasetSpec
from fedloom.data.samples import Samples
from fedloom.errors import InputError, shorten_error_message
from fedloom.utils.storage import list_files_recursively

LARGE = 1 << 28
"""Bytes above which an array that is being decoded lies in a file."""


def _allocate_images(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Room for images that are being decoded: in a file without a name where they may be larger than memory."""
    if int(np.prod(shape, dtype=np.int64)) > LARGE:
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                return np.memmap(file, dtype=np.uint8, mode="w+", shape=shape)
        except OSError:
            pass
    return np.empty(shape, dtype=np.uint8)


SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".gif", ".tif", ".tiff"}
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM", "GIF", "TIFF")
"""Pillow knows more, among them some that start other programs."""
MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
"""Eight bits a channel; what has more would be cut off where it is made RGB."""
MOST_PIXELS = 1 << 26
LARGEST = 1024
"""Pixels a side to which pictures may be resized."""
CHUNK = 256

Bytes = Callable[[int], bytes]
"""The content of picture number i."""


def _is_image_file(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES  # noqa: PTH122  # far cheaper than a Path


def read_size(spec: DatasetSpec) -> int | None:
    """The option `size`: to how many pixels a side pictures are resized."""
    if "size" not in spec.options:
        spec.asked.append("size")
        return None
    size = spec.whole("size", 1, 1)
    if size > LARGEST:
        raise InputError(f"size of {spec.name!r} is {size}; expected at most {LARGEST} pixels.")
    return size


def decode_image_files(paths: Sequence[Path], size: int | None) -> NDArray[np.uint8]:
    """The pictures of these files as n x H x W x 3, resized to `size` x `size`; without it they must be alike."""
    return decode_images(len(paths), lambda i: _read(paths[i]), lambda i: str(paths[i]), size)


def decode_images(count: int, content: Bytes, name: Callable[[int], str], size: int | None) -> NDArray[np.uint8]:
    """Pictures 0 to `count` as n x H x W x 3; `name(i)` is what an error calls a picture. All cores work on it."""
    if count == 0:
        side = size or 1
        return np.empty((0, side, side, 3), dtype=np.uint8)
    if size is None:
        height, width = _decode_image(content(0), name(0), None).shape[:2]
    else:
        height = width = size
    images = _allocate_images((count, height, width, 3))

    def work(first: int) -> None:
        for i in range(first, min(first + CHUNK, count)):
            image = _decode_image(content(i), name(i), size)
            if image.shape != images.shape[1:]:
                raise InputError(
                    f"{name(i)} has {image.shape[1]} x {image.shape[0]} pixels where {name(0)} has {width} x {height}; "
                    "say to which size all are resized, as in size=64."
                )
            images[i] = image

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for _ in pool.map(work, range(0, count, CHUNK)):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return images


def _decode_image(content: bytes, name: str, size: int | None) -> NDArray[np.uint8]:
    """One picture as H x W x 3."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError("image files are decoded by Pillow; install it with pip install 'fedloom[images]'.") from None
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise InputError(f"{name} says it has {image.width} x {image.height} pixels; that is too large.")
            if image.mode not in MODES:
                raise InputError(f"{name} has pixels of the kind {image.mode!r}; expected 8 bits a channel.")
            picture = image.convert("RGB")
            if size is not None and picture.size != (size, size):
                picture = picture.resize((size, size), Image.Resampling.BILINEAR)
            return np.asarray(picture, dtype=np.uint8)
    except InputError:
        raise
    except MemoryError:
        raise InputError(f"{name} does not fit into memory.") from None
    except Exception as error:  # Pillow's decoders raise whatever broken bytes lead them to
        reason = shorten_error_message(error)
        reason = "no image" if reason.startswith("cannot identify") else reason
        raise InputError(f"cannot decode {name}: {reason}.") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except ValueError:  # a null byte, where the name stands in a damaged list
        raise InputError(f"cannot read {str(path)!r}: this is no name of a file.") from None


TRAIN, TESTS = "train", ("test", "val", "valid", "validation")
"""What a folder of training images is called, and the one for testing: the first that is there."""


class Picture(NamedTuple):
    """An image, its class and its domain as positions in names, and whether it is for testing."""

    path: Path
    label: int
    domain: int
    test: bool


def read_own_images(spec: DatasetSpec) -> Dataset:
    """The images below the path of `spec`; its option `size` says to how many pixels a side they are resized."""
    size = read_size(spec)
    spec.done()
    assert spec.path is not None
    folder = spec.path
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; {spec.name}:PATH wants one.")

    def make() -> Dataset:
        return read_folders(folder, [path.name for path in _subfolders(folder)] if spec.name == "domains" else (), size)

    return load_through_cache(
        f"{spec.name}-{folder.resolve().name}", folder, f"{spec.name} 1 {size}", _pictures(folder), make
    )


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
    return decode_labeled_images(pictures, names, domains, size)


def decode_labeled_images(
    pictures: Iterable[Picture], names: tuple[str, ...], domains: Sequence[str], size: int | None
) -> Dataset:
    """These images, of classes called `names`, and from `domains` if there are any."""
    ordered = sorted(pictures, key=lambda picture: picture.test)
    cut = sum(not picture.test for picture in ordered)
    images = decode_image_files([picture.path for picture in ordered], size)  # at once: all must have one size
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
    return [path for path in list_files_recursively(folder) if _is_image_file(path.name)] if folder.is_dir() else []
