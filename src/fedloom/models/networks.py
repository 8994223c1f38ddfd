"""The small networks of the papers, as plain modules whose tensors keep their names and order.

Each ends in a linear layer called `head`; what comes before it is the body.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import nn

from fedloom.errors import InputError, unknown
from fedloom.models import vit

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModelInfo:
    """A network, and how many trainable parameters it has for ten classes."""

    name: str
    summary: str
    parameters_1x28x28: int
    parameters_3x32x32: int


def build(name: str, shape: Shape, classes: int) -> nn.Module:
    """The network `name` for inputs of `shape`, such as (3, 32, 32), and as many outputs as `classes`.

    Its weights are PyTorch's usual ones, drawn from the global generator. Options may follow the name of some, as in
    `vit-tiny-lora:rank=4`.
    """
    base, colon, _ = name.partition(":")
    if base not in NETWORKS:
        raise unknown("model", base, NETWORKS)
    if colon and base not in vit.NETWORKS:
        raise InputError(f"model {base!r} has no options, so {name!r} makes no sense.")
    if not shape or min(shape) < 1:
        raise InputError(f"a model cannot take inputs of shape {shape}; expected sizes of at least 1.")
    if classes < 1:
        raise InputError(f"a model cannot have {classes} classes; expected at least 1.")
    return NETWORKS[base][1](name, shape, classes)


def catalogue() -> list[ModelInfo]:
    """All networks by name."""
    return [ModelInfo(name, summary, *_sizes(name)) for name, (summary, _) in NETWORKS.items()]


def _sizes(name: str) -> tuple[int, int]:
    if name in vit.NETWORKS:  # counted without loading the libraries that make them
        return vit.count(name, (1, 28, 28), 10), vit.count(name, (3, 32, 32), 10)
    with torch.device("meta"):  # no memory, and no draw from the global generator
        small, large = (build(name, shape, 10) for shape in ((1, 28, 28), (3, 32, 32)))
    return sum(p.numel() for p in small.parameters()), sum(p.numel() for p in large.parameters())


def _dense(sizes: list[int], classes: int) -> "OrderedDict[str, nn.Module]":
    """Flatten, then hidden layers: `sizes` are the number of inputs and the widths."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for i, (before, after) in enumerate(pairwise(sizes), 1):
        layers[f"fc{i}"] = nn.Linear(before, after)
        layers[f"fc{i}_relu"] = nn.ReLU()
    layers["head"] = nn.Linear(sizes[-1], classes)
    return layers


def _perceptron(*hidden: int) -> "Maker":
    def make(_name: str, shape: Shape, classes: int) -> nn.Module:
        return nn.Sequential(_dense([prod(shape), *hidden], classes))

    return make


def _convolutional(channels: tuple[int, int], hidden: tuple[int, ...], padding: int) -> "Maker":
    """Two times a 5 x 5 convolution, a halving of the sides and ReLU; then the hidden layers."""
    shrink = 4 - 2 * padding
    smallest = 2 * (2 + shrink) + shrink

    def make(name: str, shape: Shape, classes: int) -> nn.Module:
        _want_images(name, shape, smallest)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        planes, height, width = shape
        for i, wider in enumerate(channels, 1):
            layers[f"conv{i}"] = nn.Conv2d(planes, wider, 5, padding=padding)
            # The papers put ReLU before the pool. Both only ever pick or keep the larger value, so they
            # commute exactly, and after the pool there is a quarter of the work left.
            layers[f"conv{i}_pool"] = nn.MaxPool2d(2)
            layers[f"conv{i}_relu"] = nn.ReLU()
            planes, height, width = wider, (height - shrink) // 2, (width - shrink) // 2
        return nn.Sequential(layers | _dense([planes * height * width, *hidden], classes))

    return make


def _normed(channels: int, blocks: int) -> "Maker":
    """`blocks` times a padded 3 x 3 convolution, instance norm, ReLU and a halving of the sides by their mean.

    Group norm with one channel a group is instance norm without running statistics. Images of 28 x 28 are padded to
    32 x 32 by the first convolution.
    """
    smallest = 2**blocks

    def make(name: str, shape: Shape, classes: int) -> nn.Module:
        _want_images(name, shape, smallest)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        planes, height, width = shape
        for i in range(1, blocks + 1):
            padding = 3 if i == 1 and (height, width) == (28, 28) else 1
            layers[f"conv{i}"] = nn.Conv2d(planes, channels, 3, padding=padding)
            layers[f"conv{i}_norm"] = nn.GroupNorm(channels, channels)
            layers[f"conv{i}_relu"] = nn.ReLU()
            layers[f"conv{i}_pool"] = nn.AvgPool2d(2)
            planes = channels
            height, width = (height + 2 * padding - 2) // 2, (width + 2 * padding - 2) // 2
        return nn.Sequential(layers | _dense([planes * height * width], classes))

    return make


def _want_images(name: str, shape: Shape, smallest: int) -> None:
    if len(shape) != 3:
        raise InputError(f"model {name!r} cannot take inputs of shape {shape}; it wants images, (C, H, W).")
    if min(shape[1:]) < smallest:
        raise InputError(
            f"model {name!r} cannot take images of {shape[1]} x {shape[2]} pixels; the smallest it takes "
            f"have {smallest} x {smallest}."
        )


Maker = Callable[[str, Shape, int], nn.Module]

NETWORKS: dict[str, tuple[str, Maker]] = {
    "logreg": ("multinomial logistic regression", _perceptron()),
    "mlp": ("two hidden layers of 200 (McMahan's 2NN)", _perceptron(200, 200)),
    "mlp-128": ("two hidden layers of 128 (DynaFed's MLP)", _perceptron(128, 128)),
    "lenet": (
        "two convolutions, 6 and 16 channels, and three dense layers",
        _convolutional((6, 16), (120, 84), 0),
    ),
    "cnn": (
        "McMahan's CNN: two padded convolutions, 32 and 64 channels",
        _convolutional((32, 64), (512,), 2),
    ),
    "cnn-valid": ("McMahan's CNN without the padding", _convolutional((32, 64), (512,), 0)),
    "convnet": ("DynaFed's ConvNet: three convolutions of 128 channels with instance norm", _normed(128, 3)),
    **vit.NETWORKS,
}
