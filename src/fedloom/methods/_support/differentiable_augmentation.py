"""Differentiable augmentation: random changes of images that pass gradients.

Zhao and Bilen, "Dataset Condensation with Differentiable Siamese Augmentation", ICML 2021, with the constants of its
published code. Each call makes one kind of change, chosen at random; its strength is drawn per image. Applying a draw
again gives the same change: the "Siamese" of the name needs that, and so does recomputing a gradient. A draw stores a
few numbers per image.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

Change = Callable[[Tensor], Tensor]
"""Maps images to changed images, both N x C x H x W."""

BRIGHTNESS, SATURATION, CONTRAST = 1.0, 2.0, 0.5
CROP, CUTOUT, FLIP, SCALE, ROTATE = 0.125, 0.5, 0.5, 1.2, 15.0


@dataclass(frozen=True)
class DifferentiableAugmentation:
    """A change that is drawn from its own seed at each call: always the same change, without storing the draw."""

    kind: str
    seed: int
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    generator: Generator

    def __call__(self, x: Tensor) -> Tensor:
        self.generator.manual_seed(self.seed)
        return self.drawn(x)

    def drawn(self, x: Tensor) -> Tensor:
        """Apply the change with the next draws of the generator."""
        return KINDS[self.kind](AugmentationDraw(self.count, self.shape, self.dtype, self.generator))(x)


class AugmentationDraw:
    """The random numbers of one change, one for each of `count` images, on the device of `generator`."""

    def __init__(self, count: int, shape: Sequence[int], dtype: torch.dtype, generator: Generator) -> None:
        self.count, self.dtype, self.generator = count, dtype, generator
        self.height, self.width = shape[1:]

    def uniform(self) -> Tensor:
        """Draw from [0, 1), in a shape that broadcasts over images."""
        size = (self.count, 1, 1, 1)
        return torch.rand(size, generator=self.generator, dtype=self.dtype, device=self.generator.device)

    def whole(self, low: int, high: int) -> Tensor:
        """Draw integers from `low` to `high`, both included."""
        size = (self.count, 1, 1, 1)
        return torch.randint(low, high + 1, size, generator=self.generator, device=self.generator.device)

    def pixels(self, length: int) -> Tensor:
        return torch.arange(length, device=self.generator.device)


def _random_color(draw: AugmentationDraw) -> Change:
    """Change brightness, saturation and contrast, in this order."""
    shift = (draw.uniform() - 0.5) * BRIGHTNESS
    saturation = draw.uniform() * SATURATION
    contrast = draw.uniform() + CONTRAST

    def change(x: Tensor) -> Tensor:
        x = x + shift
        gray = x.mean(1, keepdim=True)
        x = torch.lerp(gray, x, saturation)
        mean = x.mean((1, 2, 3), keepdim=True)
        return torch.lerp(mean, x, contrast)

    return change


def _random_crop(draw: AugmentationDraw) -> Change:
    """Cut a window of the same size, after padding with zeros by an eighth of the sides."""
    down, right = (int(side * CROP + 0.5) for side in (draw.height, draw.width))
    rows = draw.pixels(draw.height).view(1, 1, -1, 1) + draw.whole(0, 2 * down)
    columns = draw.pixels(draw.width) + draw.whole(0, 2 * right)

    def change(x: Tensor) -> Tensor:
        channels = x.shape[1]
        padded = F.pad(x, (right, right, down, down))
        taken = padded.gather(2, rows.expand(-1, channels, -1, padded.shape[3]))
        return taken.gather(3, columns.expand(-1, channels, draw.height, -1))

    return change


def _random_cutout(draw: AugmentationDraw) -> Change:
    """Set a rectangle of half the side lengths to zero; it may extend beyond the image."""
    outside = []
    for side, shape in ((draw.height, (1, 1, -1, 1)), (draw.width, (1, 1, 1, -1))):
        size = int(side * CUTOUT + 0.5)
        start = draw.whole(0, side - size % 2) - size // 2
        place = draw.pixels(side).view(shape) - start
        outside.append((place < 0) | (place >= size))
    above_or_below, beside = outside
    return lambda x: x * (above_or_below | beside)


def _random_flip(draw: AugmentationDraw) -> Change:
    """Flip half of the images left to right."""
    flipped = draw.uniform() < FLIP
    return lambda x: torch.where(flipped, x.flip(3), x)


def _random_scale(draw: AugmentationDraw) -> Change:
    """Scale height and width by separate factors."""
    low = 1 / SCALE
    across, down = (draw.uniform().flatten() * (SCALE - low) + low for _ in range(2))
    nothing = torch.zeros_like(across)
    return _affine(torch.stack([across, nothing, nothing, nothing, down, nothing], 1).view(-1, 2, 3), draw)


def _random_rotation(draw: AugmentationDraw) -> Change:
    """Rotate by up to 15 degrees in either direction."""
    angle = (draw.uniform().flatten() - 0.5) * 2 * ROTATE / 180 * pi
    cos, sin, nothing = angle.cos(), angle.sin(), torch.zeros_like(angle)
    return _affine(torch.stack([cos, -sin, nothing, sin, cos, nothing], 1).view(-1, 2, 3), draw)


def _affine(theta: Tensor, draw: AugmentationDraw) -> Change:
    """Apply an affine map by bilinear interpolation, with zeros outside.

    It equals `F.grid_sample`, but the gradient of that sums in varying order on a GPU; that of indexing does not.
    """
    count, height, width = draw.count, draw.height, draw.width

    def change(x: Tensor) -> Tensor:
        grid = F.affine_grid(theta, [count, 1, height, width], align_corners=False)
        across, down = ((grid[..., i] + 1) * side / 2 - 0.5 for i, side in enumerate((width, height)))
        image = torch.arange(count, device=theta.device).view(-1, 1, 1)
        pixels = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
        read = torch.zeros_like(pixels)
        for row in (down.floor(), down.floor() + 1):
            for column in (across.floor(), across.floor() + 1):
                weight = (1 - (down - row).abs()) * (1 - (across - column).abs())
                inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
                place = (image * height + row.long().clamp(0, height - 1)) * width + column.long().clamp(0, width - 1)
                read = read + pixels[place.flatten()] * (weight * inside).view(-1, 1)
        return read.view(count, height, width, -1).permute(0, 3, 1, 2)

    return change


KINDS: dict[str, Callable[[AugmentationDraw], Change]] = {
    "color": _random_color,
    "crop": _random_crop,
    "cutout": _random_cutout,
    "flip": _random_flip,
    "scale": _random_scale,
    "rotate": _random_rotation,
}


def parse_differentiable_augmentation(spec: str) -> tuple[str, ...]:
    """Return the kinds of change of `none`, `dsa` (all) or a list such as `crop+flip`, or raise a ValueError."""
    if spec == "none":
        return ()
    kinds = tuple(KINDS) if spec == "dsa" else tuple(spec.split("+"))
    if not set(kinds) <= set(KINDS) or len(set(kinds)) < len(kinds):
        raise ValueError(f"none, dsa, or some of {', '.join(KINDS)} joined by '+'")
    return kinds
