"""PNG, JPEG and other image files as arrays of one size, decoded by Pillow."""

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.data.cache import scratch
from fedloom.data.spec import Spec
from fedloom.errors import InputError, brief

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


def is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES  # noqa: PTH122  # far cheaper than a Path


def read_size(spec: Spec) -> int | None:
    """The option `size`: to how many pixels a side pictures are resized."""
    if "size" not in spec.options:
        spec.asked.append("size")
        return None
    size = spec.whole("size", 1, 1)
    if size > LARGEST:
        raise InputError(f"size of {spec.name!r} is {size}; expected at most {LARGEST} pixels.")
    return size


def decode_files(paths: Sequence[Path], size: int | None) -> NDArray[np.uint8]:
    """The pictures of these files as n x H x W x 3, resized to `size` x `size`; without it they must be alike."""
    return decode(len(paths), lambda i: _read(paths[i]), lambda i: str(paths[i]), size)


def decode(count: int, content: Bytes, name: Callable[[int], str], size: int | None) -> NDArray[np.uint8]:
    """Pictures 0 to `count` as n x H x W x 3; `name(i)` is what an error calls a picture. All cores work on it."""
    if count == 0:
        side = size or 1
        return np.empty((0, side, side, 3), dtype=np.uint8)
    if size is None:
        height, width = decode_one(content(0), name(0), None).shape[:2]
    else:
        height = width = size
    images = scratch((count, height, width, 3))

    def work(first: int) -> None:
        for i in range(first, min(first + CHUNK, count)):
            image = decode_one(content(i), name(i), size)
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


def decode_one(content: bytes, name: str, size: int | None) -> NDArray[np.uint8]:
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
        reason = brief(error)
        reason = "no image" if reason.startswith("cannot identify") else reason
        raise InputError(f"cannot decode {name}: {reason}.") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except ValueError:  # a null byte, where the name stands in a damaged list
        raise InputError(f"cannot read {str(path)!r}: this is no name of a file.") from None
