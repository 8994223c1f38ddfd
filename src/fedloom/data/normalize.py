"""How images become network input: by the data set's own constants, or as one of the papers did it."""

from dataclasses import replace

import numpy as np
import torch

from fedloom.data.content import Dataset
from fedloom.data.samples import Prepare, Samples
from fedloom.errors import InputError, unknown

OWN, MEASURED = "default", "mean-std"
PRESETS: dict[str, tuple[str, tuple[float, ...], tuple[float, ...]]] = {
    "unit": ("values from 0 to 1", (0.0,), (1.0,)),
    "half": ("mean and deviation 0.5: values from -1 to 1", (0.5,), (0.5,)),
    "mnist": ("the constants of MNIST", (0.1307,), (0.3081,)),
    "cifar": ("constants that are often used for CIFAR", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "imagenet": ("the constants of ImageNet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""For each what it is, and the mean and deviation of every channel, or of all alike."""


def normalized(dataset: Dataset, spec: str) -> Dataset:
    """`dataset` with its inputs normalised as `spec` says.

    `default` leaves its own constants, `mean-std` measures them on the training images, the others are `PRESETS`.
    """
    if spec == OWN:
        return dataset
    if spec != MEASURED and spec not in PRESETS:
        raise unknown("normalisation", spec, [OWN, MEASURED, *PRESETS])
    if not dataset.train.are_images:
        raise InputError(f"normalize is {spec!r}, but {dataset.name!r} has no images; leave it out.")
    channels = dataset.shape[0]
    if spec == MEASURED:
        return replace(dataset, prepare=measure(dataset.train, dataset.name))
    _, mean, std = PRESETS[spec]
    if len(mean) not in (1, channels):
        raise InputError(f"the normalisation {spec!r} is for {len(mean)} channels; {dataset.name!r} has {channels}.")
    repeat = channels // len(mean)
    return replace(dataset, prepare=Prepare(mean * repeat, std * repeat))


def measure(samples: Samples, name: str) -> Prepare:
    """Mean and standard deviation of each channel of these images."""
    if not len(samples):
        raise InputError(f"{name!r} has no training images to measure a mean of.")
    grey = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(samples.shape[0]):
        counts = np.zeros(256, dtype=np.int64)
        for first in range(0, len(samples), 4096):  # the images may be larger than memory
            part = samples.x[first : first + 4096, ..., channel]
            counts += torch.bincount(part.flatten(), minlength=256).numpy()
        mean = float(np.average(grey, weights=counts))
        deviation = float(np.average((grey - mean) ** 2, weights=counts)) ** 0.5
        if deviation == 0:
            raise InputError(f"{name!r} has a channel that is the same in all images; there is nothing to scale.")
        means.append(mean)
        deviations.append(deviation)
    return Prepare(tuple(means), tuple(deviations))
