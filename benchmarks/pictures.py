"""Draw the image of `hard-digits` in the documentation.

    python -m benchmarks hard-digits --out docs/images/hard-digits.png

The first row shows training images, the second test images. Pillow writes the file.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks._common import make_parser
from fedloom.data import Samples, load_dataset

COLUMNS, ENLARGED = 20, 3


def tile_images(parts: Sequence[Samples]) -> NDArray[np.uint8]:
    """Return one row of images for each part, class by class, without gaps."""
    rows = []
    for samples in parts:
        per_class = COLUMNS // 10
        chosen = [at for label in range(10) for at in np.flatnonzero(samples.y.numpy() == label)[:per_class]]
        rows.append(np.concatenate([samples.x[at, ..., 0].numpy() for at in chosen], axis=1))
    return np.concatenate(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the image."""
    parser = make_parser("hard-digits", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="the PNG file to write")
    given = parser.parse_args(arguments)
    digits = load_dataset("hard-digits")
    tiles = tile_images([digits.train, digits.test])
    Image.fromarray(tiles.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)).save(given.out, optimize=True)
