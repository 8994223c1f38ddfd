"""Plain convolutional networks: McMahan's CNNs and their relatives, LeNets, and DynaFed's ConvNet."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from pydantic import Field
from torch import nn

from fedloom.models.base import Network, Wanted
from fedloom.models.dense import dense
from fedloom.models.fusing import Chain
from fedloom.models.norms import NormName, NormOptions
from fedloom.models.pooling import LargestPool2d, MeanPool2d, PooledConv2d


class Padded(NormOptions):
    norm: NormName = "none"
    """batch, group, instance, none, or batch-stateless: batch norm by the batch at hand, in tests too"""
    padding: int = Field(2, ge=0, le=2)
    """pixels around the images that each 5 x 5 convolution works on; 2 keeps their size"""


class Valid(Padded):
    padding: int = Field(0, ge=0, le=2)
    """pixels around the images that each 5 x 5 convolution works on; 2 keeps their size"""


class ConvNetOptions(NormOptions):
    norm: NormName = "instance"
    """batch, group, instance, none, or batch-stateless: batch norm by the batch at hand, in tests too"""


def two_convolutions(*channels: int, hidden: tuple[int, ...]) -> Callable[[Wanted, Padded], nn.Module]:
    """5 x 5 convolutions, each with a halving of the sides and ReLU; then the hidden layers."""

    def make(wanted: Wanted, options: Padded) -> nn.Module:
        shrink = 4 - 2 * options.padding
        smallest = 1
        for _ in channels:
            smallest = 2 * smallest + shrink
        planes, height, width = wanted.images(smallest)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, wider in enumerate(channels, 1):
            height, width = height - shrink, width - shrink
            if options.norm == "none":
                layers[f"conv{i}"] = PooledConv2d(planes, wider, 5, padding=options.padding)
            else:
                layers[f"conv{i}"] = nn.Conv2d(planes, wider, 5, padding=options.padding)
                layers[f"conv{i}_norm"] = options.make(wanted, wider, (height, width))
                layers[f"conv{i}_pool"] = LargestPool2d()
            # The papers put ReLU before the pool. Both only ever pick or keep the larger value, so they
            # commute exactly, and after the pool there is a quarter of the work left.
            layers[f"conv{i}_relu"] = nn.ReLU()
            planes, height, width = wider, height // 2, width // 2
        return Chain(layers | dense([planes * height * width, *hidden], wanted.classes))

    return make


def convnet(wanted: Wanted, options: ConvNetOptions) -> nn.Module:
    """Three times a padded 3 x 3 convolution, a norm, ReLU and a halving of the sides by their mean.

    Images of 28 x 28 are padded to 32 x 32 by the first convolution.
    """
    channels, blocks = 128, 3
    planes, height, width = wanted.images(2**blocks)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i in range(1, blocks + 1):
        padding = 3 if i == 1 and (height, width) == (28, 28) else 1
        height, width = height + 2 * padding - 2, width + 2 * padding - 2
        layers[f"conv{i}"] = nn.Conv2d(planes, channels, 3, padding=padding)
        if options.norm != "none":
            layers[f"conv{i}_norm"] = options.make(wanted, channels, (height, width))
        layers[f"conv{i}_relu"] = nn.ReLU()
        layers[f"conv{i}_pool"] = MeanPool2d()
        planes, height, width = channels, height // 2, width // 2
    return Chain(layers | dense([planes * height * width], wanted.classes))


NETWORKS: dict[str, Network[Any]] = {
    "lenet": Network(
        "two convolutions, 6 and 16 channels, three dense layers: the CNN of FedMR's code on CIFAR",
        two_convolutions(6, 16, hidden=(120, 84)),
        Valid,
    ),
    "lenet-femnist": Network(
        "two convolutions, 16 and 32 channels, dense layer of 256: the CNN of that code on FEMNIST",
        two_convolutions(16, 32, hidden=(256,)),
        Valid,
    ),
    "cnn": Network(
        "McMahan's CNN: two padded convolutions, 32 and 64 channels, dense layer of 512",
        two_convolutions(32, 64, hidden=(512,)),
        Padded,
    ),
    "cnn-valid": Network("McMahan's CNN without the padding", two_convolutions(32, 64, hidden=(512,)), Valid),
    "cnn-leaf": Network(
        "LEAF's CNN for FEMNIST: McMahan's with a dense layer of 2048", two_convolutions(32, 64, hidden=(2048,)), Padded
    ),
    "cnn-cifar": Network(
        "McMahan's CNN for CIFAR: two padded convolutions of 64 channels, dense layers of 384 and 192",
        two_convolutions(64, 64, hidden=(384, 192)),
        Padded,
    ),
    "convnet": Network(
        "DynaFed's ConvNet: three convolutions of 128 channels with instance norm", convnet, ConvNetOptions
    ),
}
