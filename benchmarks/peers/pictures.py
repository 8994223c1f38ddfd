"""The pictures of the job: Fashion-MNIST, or scikit-learn's digits."""

import numpy as np
from numpy.typing import NDArray

from fedloom.data import load_dataset
from fedloom.errors import InputError

TEST_PICTURES = 2000
DIGITS = "digits, enlarged to 28 x 28"


def load_pictures(count: int, seed: int) -> tuple[str, dict[str, NDArray[np.integer]], float, float]:
    """Return the name of the data, `count` training and some test pictures of 28 x 28 bytes, and mean and deviation."""
    rng = np.random.default_rng(seed)
    try:
        data = load_dataset("fashion-mnist", download=False)
    except InputError:
        name, arrays = DIGITS, _enlarge_digits(count, rng)
    else:
        name, taken = data.name, rng.permutation(len(data.train))[:count]
        assert data.test is not None
        arrays = {"x": data.train.x.numpy()[taken, ..., 0], "y": data.train.y.numpy()[taken]}
        arrays |= {"test_x": data.test.x.numpy()[:TEST_PICTURES, ..., 0], "test_y": data.test.y.numpy()[:TEST_PICTURES]}
    scaled = arrays["x"] / 255
    return name, arrays, round(float(scaled.mean()), 4), round(float(scaled.std()), 4)


def _enlarge_digits(count: int, rng: np.random.Generator) -> dict[str, NDArray[np.integer]]:
    """Enlarge the digits to 24 x 24, and put each drawn digit at a random place of a picture of 28 x 28."""
    data = load_dataset("digits")
    assert data.test is not None
    arrays = {}
    for prefix, part, wanted in (("", data.train, count), ("test_", data.test, TEST_PICTURES)):
        drawn = rng.integers(0, len(part), wanted)
        small = part.x.numpy()[drawn, ..., 0]
        pictures = np.zeros((wanted, 28, 28), np.uint8)
        for picture, digit, (top, left) in zip(pictures, small, rng.integers(0, 5, (wanted, 2)), strict=True):
            picture[top : top + 24, left : left + 24] = digit.repeat(3, 0).repeat(3, 1)
        arrays |= {f"{prefix}x": pictures, f"{prefix}y": part.y.numpy()[drawn]}
    return arrays
