"""Random changes of training images, drawn anew for every image of every batch."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedloom.data.samples import is_integer
from fedloom.errors import InputError, unknown

PAD = 4


@dataclass(frozen=True)
class Augment:
    """A random crop after zero-padding by 4 pixels, a random horizontal flip, or both."""

    crop: bool = False
    flip: bool = False

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """A changed copy of a batch of images (uint8 N x H x W x C, or float N x C x H x W).

        Every draw comes from `generator`, one for each image and choice, whatever device `x` is on.
        """
        if is_integer(x) and x.dtype != torch.uint8:
            raise InputError(f"cannot augment tokens of shape {tuple(x.shape)}; only images can be augmented.")
        if x.ndim != 4 or not (x.dtype == torch.uint8 or x.is_floating_point()):
            raise InputError(f"cannot augment a batch of shape {tuple(x.shape)}; only images can be augmented.")
        if x.dtype == torch.uint8:
            return self._change(x, generator)
        changed = self._change(x.permute(0, 2, 3, 1).contiguous(), generator).permute(0, 3, 1, 2)
        return changed.contiguous() if x.is_contiguous() else changed

    def _change(self, x: Tensor, generator: Generator) -> Tensor:
        n, height, width, channels = x.shape

        def draw(high: int) -> Tensor:
            values = torch.randint(high, (n, 1), generator=generator, device=generator.device)
            return values.to(x.device)

        rows = torch.arange(height, device=x.device).expand(n, height)
        columns = torch.arange(width, device=x.device).expand(n, width)
        if self.crop:
            rows, columns = rows + draw(2 * PAD + 1), columns + draw(2 * PAD + 1)
            x = F.pad(x, (0, 0, PAD, PAD, PAD, PAD))
        if self.flip:
            columns = torch.where(draw(2).bool(), columns.flip(1), columns)
        # Crop and flip together are one choice of source pixels: one gather from the list of all pixels,
        # which is three times faster than indexing by image, row and column.
        image = torch.arange(n, device=x.device).view(n, 1, 1)
        source = (image * x.shape[1] + rows.unsqueeze(2)) * x.shape[2] + columns.unsqueeze(1)
        return x.reshape(-1, channels).index_select(0, source.flatten()).view(n, height, width, channels)


AUGMENTS = {
    "none": None,
    "flip": Augment(flip=True),
    "crop": Augment(crop=True),
    "crop+flip": Augment(crop=True, flip=True),
}


def make_augment(spec: str) -> Augment | None:
    """The augmentation called `none` (which is None), `flip`, `crop` or `crop+flip`."""
    if spec not in AUGMENTS:
        raise unknown("augmentation", spec, AUGMENTS)
    return AUGMENTS[spec]
