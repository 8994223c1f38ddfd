"""Convolutional networks: McMahan's CNNs, LeNets and DynaFed's ConvNet."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from pydantic import Field
from torch import nn

from fedloom.models.base import ModelRequest, ModelSpec
from fedloom.models.layers.fused_relu import FusedReLUSequential
from fedloom.models.layers.norms import NormName, NormOptions
from fedloom.models.layers.pooling import AvgPool2x2, MaxPool2x2, PooledConv2d
from fedloom.models.mlp import make_mlp_layers


class _PaddedCnnOptions(NormOptions):
    norm: NormName = "none"
    """norm layers: batch, group, instance, none, or batch-stateless (batch statistics in evaluation too)"""
    padding: int = Field(2, ge=0, le=2)
    """padding of each 5 x 5 convolution in pixels; 2 keeps the size of the images"""


class _ValidCnnOptions(_PaddedCnnOptions):
    padding: int = Field(0, ge=0, le=2)
    """padding of each 5 x 5 convolution in pixels; 2 keeps the size of the images"""


class _ConvNetOptions(NormOptions):
    norm: NormName = "instance"
    """norm layers: batch, group, instance, none, or batch-stateless (batch statistics in evaluation too)"""


def _make_two_conv_builder(
    *channels: int, hidden: tuple[int, ...]
) -> Callable[[ModelRequest, _PaddedCnnOptions], nn.Module]:
    """Return a function that builds 5 x 5 convolutions with 2 x 2 max pools and ReLUs, then dense layers."""

    def make(wanted: ModelRequest, options: _PaddedCnnOptions) -> nn.Module:
        shrink = 4 - 2 * options.padding
        smallest = 1
        for _ in channels:
            smallest = 2 * smallest + shrink
        planes, height, width = wanted.image_shape(smallest)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, wider in enumerate(channels, 1):
            height, width = height - shrink, width - shrink
            if options.norm == "none":
                layers[f"conv{i}"] = PooledConv2d(planes, wider, 5, padding=options.padding)
            else:
                layers[f"conv{i}"] = nn.Conv2d(planes, wider, 5, padding=options.padding)
                layers[f"conv{i}_norm"] = options.make(wanted, wider, (height, width))
                layers[f"conv{i}_pool"] = MaxPool2x2()
            # The papers put ReLU before the pool. Both only keep the larger value, so they commute exactly, and
            # after the pool ReLU has a quarter of the work.
            layers[f"conv{i}_relu"] = nn.ReLU()
            planes, height, width = wider, height // 2, width // 2
        return FusedReLUSequential(layers | make_mlp_layers([planes * height * width, *hidden], wanted.classes))

    return make


def _build_convnet(request: ModelRequest, options: _ConvNetOptions) -> nn.Module:
    """Return three blocks of a padded 3 x 3 convolution, a norm, ReLU and a 2 x 2 average pool.

    The first convolution pads images of 28 x 28 to 32 x 32.
    """
    channels, blocks = 128, 3
    planes, height, width = request.image_shape(2**blocks)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i in range(1, blocks + 1):
        padding = 3 if i == 1 and (height, width) == (28, 28) else 1
        height, width = height + 2 * padding - 2, width + 2 * padding - 2
        layers[f"conv{i}"] = nn.Conv2d(planes, channels, 3, padding=padding)
        if options.norm != "none":
            layers[f"conv{i}_norm"] = options.make(request, channels, (height, width))
        layers[f"conv{i}_relu"] = nn.ReLU()
        layers[f"conv{i}_pool"] = AvgPool2x2()
        planes, height, width = channels, height // 2, width // 2
    return FusedReLUSequential(layers | make_mlp_layers([planes * height * width], request.classes))


NETWORKS: dict[str, ModelSpec[Any]] = {
    "lenet": ModelSpec(
        "two convolutions, 6 and 16 channels, three dense layers: the CNN of FedMR's code on CIFAR",
        _make_two_conv_builder(6, 16, hidden=(120, 84)),
        _ValidCnnOptions,
    ),
    "lenet-femnist": ModelSpec(
        "two convolutions, 16 and 32 channels, dense layer of 256: the CNN of FedMR's code on FEMNIST",
        _make_two_conv_builder(16, 32, hidden=(256,)),
        _ValidCnnOptions,
    ),
    "cnn": ModelSpec(
        "McMahan's CNN: two padded convolutions, 32 and 64 channels, dense layer of 512",
        _make_two_conv_builder(32, 64, hidden=(512,)),
        _PaddedCnnOptions,
    ),
    "cnn-valid": ModelSpec(
        "McMahan's CNN without the padding", _make_two_conv_builder(32, 64, hidden=(512,)), _ValidCnnOptions
    ),
    "cnn-leaf": ModelSpec(
        "LEAF's CNN for FEMNIST: McMahan's with a dense layer of 2048",
        _make_two_conv_builder(32, 64, hidden=(2048,)),
        _PaddedCnnOptions,
    ),
    "cnn-cifar": ModelSpec(
        "McMahan's CNN for CIFAR: two padded convolutions of 64 channels, dense layers of 384 and 192",
        _make_two_conv_builder(64, 64, hidden=(384, 192)),
        _PaddedCnnOptions,
    ),
    "convnet": ModelSpec(
        "DynaFed's ConvNet: three convolutions of 128 channels with instance norm", _build_convnet, _ConvNetOptions
    ),
}
