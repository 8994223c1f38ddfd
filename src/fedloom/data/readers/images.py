"""Read folders of images, one folder per class, or per domain and class.

    folder:PATH    PATH/CLASS/*.png, or PATH/train/CLASS/ and PATH/test/CLASS/
    domains:PATH   PATH/DOMAIN/CLASS/*.jpg, or PATH/DOMAIN/train/CLASS/ and PATH/DOMAIN/test/CLASS/

Without a test folder, every fifth image of each class and domain is for testing, in the order of the file names.
Pillow decodes PNG, JPEG and other image files to arrays of one size.
"""

import io
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.cache import load_through_cache
from fedloom.data.dataset import Dataset, DatasetSpec
from fedloom.data.samples import Samples
from fedloom.errors import InputError, shorten_error_message
from fedloom.utils.data_folders import cache_folder
from fedloom.utils.storage import list_files_recursively

LARGE = 1 << 28
"""Bytes above which decoded images are stored in a temporary file."""


def _allocate_images(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Allocate an array for decoded images; a large one is in a temporary file, because memory may not hold it."""
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
"""Allowed formats; some other formats of Pillow start external programs."""
MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
"""Modes with 8 bits per channel; the conversion to RGB would cut off larger values."""
MOST_PIXELS = 1 << 26
LARGEST = 1024
"""Largest side in pixels to which images may be resized."""
CHUNK = 256

Bytes = Callable[[int], bytes]
"""Returns the file content of image i."""


def parse_image_size(spec: DatasetSpec) -> int | None:
    """Return the option `size`, the side in pixels to which images are resized."""
    if "size" not in spec.options:
        spec.known_options.append("size")
        return None
    size = spec.integer_option("size", 1, 1)
    if size > LARGEST:
        raise InputError(f"size of {spec.name!r} is {size}; expected at most {LARGEST} pixels.")
    return size


def decode_image_files(paths: Sequence[Path], size: int | None) -> NDArray[np.uint8]:
    """Decode image files to n x H x W x 3, resized to `size` x `size`; without it all must have one size."""
    return decode_images(len(paths), lambda i: _read(paths[i]), lambda i: str(paths[i]), size)


def decode_images(count: int, read_bytes: Bytes, describe: Callable[[int], str], size: int | None) -> NDArray[np.uint8]:
    """Decode `count` images to n x H x W x 3 on all cores; `describe(i)` names image i in an error."""
    if count == 0:
        side = size or 1
        return np.empty((0, side, side, 3), dtype=np.uint8)
    if size is None:
        height, width = _decode_image(read_bytes(0), describe(0), None).shape[:2]
    else:
        height = width = size
    images = _allocate_images((count, height, width, 3))

    def work(first: int) -> None:
        for i in range(first, min(first + CHUNK, count)):
            image = _decode_image(read_bytes(i), describe(i), size)
            if image.shape != images.shape[1:]:
                raise InputError(
                    f"{describe(i)} has {image.shape[1]} x {image.shape[0]} pixels where {describe(0)} has {width} x "
                    f"{height}; say to which size all are resized, as in size=64."
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
    """Decode one image to H x W x 3."""
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
    except Exception as error:  # Pillow's decoders raise any type of error for damaged bytes
        reason = shorten_error_message(error)
        reason = "no image" if reason.startswith("cannot identify") else reason
        raise InputError(f"cannot decode {name}: {reason}.") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except ValueError:  # a null byte in a name from a damaged list
        raise InputError(f"cannot read {str(path)!r}: this is no name of a file.") from None


TRAIN, TESTS = "train", ("test", "val", "valid", "validation")
"""Name of the folder of training images, and names of the test folder: the first one that exists is used."""


class ImageFile(NamedTuple):
    """An image file, its class and domain as positions in lists of names, and whether it is for testing."""

    path: Path
    label: int
    domain: int
    is_test: bool


def read_image_folder_dataset(spec: DatasetSpec) -> Dataset:
    """Read the images in the folder of `spec`, resized if it has the option `size`."""
    size = parse_image_size(spec)
    spec.refuse_unused_options()
    assert spec.path is not None
    folder = spec.path
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; expected one with a folder of images for each class.")

    def make() -> Dataset:
        return read_images_in_folders(
            folder, [path.name for path in _subfolders(folder)] if spec.name == "domains" else (), size
        )

    pictures = _pictures(folder)
    content = load_through_cache(
        f"{spec.name}-{folder.resolve().name}", folder, f"{spec.name} 1 {size}", pictures, make
    )
    depth = 3 if (folder / TRAIN).is_dir() else 2  # of CLASS/image.png
    if spec.name == "folder" and all(len(path.relative_to(folder).parts) > depth for path in pictures):
        note = f"{folder}: all images lie deeper than in one folder for each class; domains are named domains:{folder}."
        content = replace(content, notes=(*content.notes, note))
    return content


def read_images_in_folders(
    folder: Path, domain_names: Sequence[str], size: int | None, extra_train_folders: Sequence[str] = ()
) -> Dataset:
    """Read a folder with one folder per class, or one with such a folder for each of `domain_names`.

    The images in `extra_train_folders` are training images too.
    """
    parts = [_parts(place, extra_train_folders) for place in ([folder / domain for domain in domain_names] or [folder])]
    names = _class_names([source for sources in parts for source, test in sources if not test])
    pictures: list[ImageFile] = []
    for domain, sources in enumerate(parts):
        for source, test in sources:
            for path in _subfolders(source):
                if path.name not in names:
                    raise InputError(f"{path} is a class that the training images do not have.")
                label = names.index(path.name)
                for i, picture in enumerate(_pictures(path)):
                    pictures.append(ImageFile(picture, label, domain, i % 5 == 2 if test is None else test))
    held_out = sum(picture.is_test for picture in pictures)
    if not 0 < held_out < len(pictures):
        raise InputError(
            f"{folder} has {len(pictures) - held_out} images for training and {held_out} for testing; without a folder "
            "'test' a class must have three images or more, of which every fifth is for testing."
        )
    return decode_labeled_images(pictures, names, domain_names, size)


def decode_labeled_images(
    pictures: Iterable[ImageFile], class_names: tuple[str, ...], domain_names: Sequence[str], size: int | None
) -> Dataset:
    """Decode these images into a data set with classes, and with domains if `domain_names` is not empty."""
    ordered = sorted(pictures, key=lambda picture: picture.is_test)
    cut = sum(not picture.is_test for picture in ordered)
    images = decode_image_files([picture.path for picture in ordered], size)  # one call: all must have one size
    labels = torch.tensor([picture.label for picture in ordered], dtype=torch.int64)
    samples = Samples(torch.from_numpy(images), labels)
    marks = np.array([picture.domain for picture in ordered], dtype=np.int64)
    return Dataset(
        samples[:cut],
        samples[cut:],
        class_names,
        domains=marks[:cut] if domain_names else None,
        domain_names=tuple(domain_names),
        test_domains=marks[cut:] if domain_names else None,
    )


def _parts(folder: Path, extra_train_folders: Sequence[str]) -> list[tuple[Path, bool | None]]:
    """Return folders, each with True for test and False for training images, or one folder with None for both."""
    if not (folder / TRAIN).is_dir():
        return [(folder, None)]
    test = next((folder / name for name in TESTS if (folder / name).is_dir()), None)
    if test is None:
        raise InputError(f"{folder} has a folder 'train' but none called {' or '.join(map(repr, TESTS))}.")
    return [*((folder / name, False) for name in (TRAIN, *extra_train_folders)), (test, True)]


def _class_names(folders: Sequence[Path]) -> tuple[str, ...]:
    """Return the sorted classes of all folders; folders without a common class are an error."""
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
    paths = list_files_recursively(folder) if folder.is_dir() else []
    return [path for path in paths if path.suffix.lower() in SUFFIXES]
