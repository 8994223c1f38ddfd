"""Augmentation of training images, and normalization of inputs."""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedloom.data.dataset import Dataset
from fedloom.data.samples import InputTransform, Samples, samples_are_integer
from fedloom.errors import InputError, unknown_name_error

PAD = 4


@dataclass(frozen=True)
class Augment:
    """Random augmentation of images, drawn again for each image of each batch.

    Args:
        crop: Whether to crop at random after zero-padding by 4 pixels.
        flip: Whether to flip half of the images horizontally.
    """

    crop: bool = False
    flip: bool = False

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """Return an augmented copy of a batch of images.

        Args:
            x: Images, uint8 N x H x W x C or float N x C x H x W.
            generator: Source of all draws. It may be on another device than `x`.

        Raises:
            InputError: If `x` does not hold images.
        """
        if samples_are_integer(x) and x.dtype != torch.uint8:
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
        # One gather from the list of all pixels does crop and flip together. It is three times faster than indexing
        # by image, row and column.
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
    """Return an augmentation by name.

    Args:
        spec: "none", "flip", "crop" or "crop+flip".

    Returns:
        The augmentation, or None for "none".

    Raises:
        InputError: If the name is unknown.
    """
    if spec not in AUGMENTS:
        raise unknown_name_error("augmentation", spec, AUGMENTS)
    return AUGMENTS[spec]


OWN, MEASURED = "default", "mean-std"
PRESETS: dict[str, tuple[str, tuple[float, ...], tuple[float, ...]]] = {
    "unit": ("values from 0 to 1", (0.0,), (1.0,)),
    "half": ("mean and deviation 0.5: values from -1 to 1", (0.5,), (0.5,)),
    "mnist": ("the constants of MNIST", (0.1307,), (0.3081,)),
    "cifar": ("constants that are often used for CIFAR", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "imagenet": ("the constants of ImageNet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""For each preset a summary, and the mean and standard deviation of each channel (one value for all channels)."""


def with_normalization(dataset: Dataset, spec: str) -> Dataset:
    """Change how the images of a data set are normalized.

    Args:
        dataset: The data set; it is not changed.
        spec: "default" keeps the constants of the data set, "mean-std" measures them on the training images, and
            "unit", "half", "mnist", "cifar" and "imagenet" are fixed constants.

    Returns:
        The data set with another `transform`.

    Raises:
        InputError: If `spec` is unknown, or does not suit the images.
    """
    if spec == OWN:
        return dataset
    if spec != MEASURED and spec not in PRESETS:
        raise unknown_name_error("normalization", spec, [OWN, MEASURED, *PRESETS])
    if not dataset.train.are_images:
        raise InputError(f"normalize is {spec!r}, but {dataset.name!r} has no images; leave it out.")
    channels = dataset.shape[0]
    if spec == MEASURED:
        return replace(dataset, transform=_measure_mean_std(dataset.train, dataset.name))
    _, mean, std = PRESETS[spec]
    if len(mean) not in (1, channels):
        raise InputError(f"the normalization {spec!r} is for {len(mean)} channels; {dataset.name!r} has {channels}.")
    repeat = channels // len(mean)
    return replace(dataset, transform=InputTransform(mean * repeat, std * repeat))


def _measure_mean_std(samples: Samples, name: str) -> InputTransform:
    """Measure mean and standard deviation of each channel."""
    if not len(samples):
        raise InputError(f"{name!r} has no training images to measure a mean of.")
    gray = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(samples.shape[0]):
        counts = np.zeros(256, dtype=np.int64)
        for first in range(0, len(samples), 4096):  # the images may be larger than memory
            part = samples.x[first : first + 4096, ..., channel]
            counts += torch.bincount(part.flatten(), minlength=256).numpy()
        mean = float(np.average(gray, weights=counts))
        deviation = float(np.average((gray - mean) ** 2, weights=counts)) ** 0.5
        if deviation == 0:
            raise InputError(f"{name!r} has a channel that is the same in all images; there is nothing to scale.")
        means.append(mean)
        deviations.append(deviation)
    return InputTransform(tuple(means), tuple(deviations))
