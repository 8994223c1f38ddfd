"""Hard digits: 7,500 distorted images made from scikit-learn's digits.

The digits are split into 1,438 for training and 359 for testing before any image is made, so no test image shows a
digit of a training image. The images are always the same: a test compares their SHA-256. All numbers are float64 until
the last step, where a difference in the last bit between machines vanishes. It takes less than half a second.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.data.samples import InputTransform, Samples
from fedloom.data.sources.mnist import read_sklearn_digits

Floats = NDArray[np.float64]

SIDE = 16
NUM_TRAIN, NUM_TEST = 6000, 1500
SEED = 16
TRANSFORM = InputTransform((0.3494,), (0.1964,))


@cache
def make_hard_digits() -> tuple[Samples, Samples]:
    """Make the training and the test samples, once in a process. Nothing writes to samples."""
    train, test = read_sklearn_digits()
    return _distort(train, NUM_TRAIN, SEED), _distort(test, NUM_TEST, SEED + 1)


def _distort(digits: Samples, count: int, seed: int) -> Samples:
    """Make `count` images; the digits take turns in a random order."""
    draw = np.random.default_rng(seed)
    gray = digits.x.numpy()[..., 0] / 255
    shown = np.resize(draw.permutation(len(digits)), count)
    images = _resample(
        gray[shown],
        angle=np.deg2rad(draw.uniform(-20, 20, count)),
        shear=draw.uniform(-0.15, 0.15, count),
        scale=draw.uniform(0.85, 1.1, count),
        shift=draw.uniform(-1.5, 1.5, (count, 2)),
    )
    images *= draw.uniform(0.7, 1, (count, 1, 1))
    # Parts of another digit at the border, in any direction.
    side = draw.uniform(0, 2 * np.pi, count)
    others = _resample(
        gray[draw.integers(len(digits), size=count)],
        angle=draw.uniform(0, 2 * np.pi, count),
        shear=np.zeros(count),
        scale=draw.uniform(0.5, 0.8, count),
        shift=7 * np.stack([np.sin(side), np.cos(side)], axis=1),
    )
    np.maximum(images, 0.25 * others, out=images)
    # Light from one side, then noise.
    rows, columns = _centred_pixels()
    direction = draw.uniform(0, 2 * np.pi, (count, 1, 1))
    light = (np.sin(direction) * rows + np.cos(direction) * columns) / (SIDE / 2)
    images += 0.3 * light
    images += 0.1 * draw.standard_normal(images.shape)
    stored = np.rint(255 * np.clip(0.6 * images + 0.2, 0, 1)).astype(np.uint8)
    return Samples(torch.from_numpy(stored).unsqueeze(-1), digits.y[torch.from_numpy(shown)])


def _centred_pixels() -> tuple[Floats, Floats]:
    """Return row and column of each pixel, counted from the center of an image."""
    rows, columns = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    return rows, columns


def _resample(gray: Floats, *, angle: Floats, shear: Floats, scale: Floats, shift: Floats) -> Floats:
    """Rotate, shear, scale and shift small images, and enlarge them to `SIDE`, in one bilinear resampling."""
    count, side, _ = gray.shape
    rows, columns = _centred_pixels()
    down, right = rows - shift[:, :1, None], columns - shift[:, 1:, None]
    # The inverse map: from a pixel of the large image to a position in the small one.
    sine, cosine, per_pixel = (
        values[:, None, None] for values in (np.sin(angle), np.cos(angle), side / (SIDE * scale))
    )
    y = (cosine * down + sine * right) * per_pixel
    x = (cosine * right - sine * down) * per_pixel - shear[:, None, None] * y
    # With a black frame of one pixel, positions outside are black.
    width = side + 2
    flat = np.pad(gray, ((0, 0), (1, 1), (1, 1))).ravel()
    y, x = (np.clip(at + (width - 1) / 2, 0, width - 1.000001) for at in (y, x))
    top, left = y.astype(np.int64), x.astype(np.int64)
    below, beside = y - top, x - left
    corner = np.arange(count)[:, None, None] * width**2 + top * width + left
    upper = flat[corner] * (1 - beside) + flat[corner + 1] * beside
    lower = flat[corner + width] * (1 - beside) + flat[corner + width + 1] * beside
    resampled: Floats = upper * (1 - below) + lower * below
    return resampled
