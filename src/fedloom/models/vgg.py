"""VGG-16: thirteen 3 x 3 convolutions in five stages, and one of four classifiers.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015. Some code or
other calls each of the classifiers VGG-16: `4096` with batch norm is that of FedCross's and FedMR's code, `7x7` that of
ImageNet (the only one with over 130 million parameters), `512` and `linear` are usual for CIFAR.

Each stage ends with a 2 x 2 max pool. It is left out if a side is already 1, as in the fifth stage at 28 x 28 pixels.
The result is averaged to one number per channel, or resized to 7 x 7 for `7x7`.
"""

from collections import OrderedDict
from typing import Any, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedloom.models.base import ModelRequest, ModelSpec
from fedloom.models.layers.fused_relu import FusedReLUSequential
from fedloom.models.layers.norms import NormOptions
from fedloom.models.layers.pooling import MaxPool2x2
from fedloom.models.mlp import make_mlp_layers

STAGES = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
"""Channels, as a multiple of the width, and number of convolutions of each stage."""

HIDDEN = {"linear": (), "512": (512, 512), "4096": (4096, 4096), "7x7": (4096, 4096)}
"""Widths of the hidden layers of each classifier."""


class _VggOptions(NormOptions):
    classifier: Literal["linear", "512", "4096", "7x7"] = "4096"
    """dense layers: linear is one, 512 and 4096 put two of that width before it, 7x7 is 4096 on maps of 7 x 7"""
    dropout: float = Field(0.5, ge=0, lt=1)
    """dropout after the hidden dense layers"""
    width: int = Field(64, ge=1)
    """channels of the first stage; the last has eight times as many"""


class _AdaptivePool7x7(nn.Module):
    """Resize maps of any size to 7 x 7."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] == (1, 1):  # same result; the general gradient is not deterministic on a GPU
            return x.expand(-1, -1, 7, 7)
        return F.adaptive_avg_pool2d(x, 7)


def _build_vgg16(request: ModelRequest, options: _VggOptions) -> nn.Module:
    """Return VGG-16 for images of any size."""
    planes, height, width = request.image_shape()
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    i = 0
    for factor, count in STAGES:
        for _ in range(count):
            i += 1
            convolution = nn.Conv2d(planes, factor * options.width, 3, padding=1)
            layers[f"conv{i}"], planes = convolution, factor * options.width
            if options.norm != "none":
                layers[f"conv{i}_norm"] = options.make(request, planes, (height, width))
            else:  # with torch's default weights, the signal vanishes in so many layers
                nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            layers[f"conv{i}_relu"] = nn.ReLU()
        if min(height, width) > 1:
            # The pool comes before ReLU: the two commute exactly, and ReLU has less to do.
            relu = layers.pop(f"conv{i}_relu")
            layers[f"conv{i}_pool"], layers[f"conv{i}_relu"] = MaxPool2x2(), relu
            height, width = height // 2, width // 2
    large = options.classifier == "7x7"
    layers["mean"] = _AdaptivePool7x7() if large else nn.AdaptiveAvgPool2d(1)
    sizes = [planes * 49 if large else planes, *HIDDEN[options.classifier]]
    return FusedReLUSequential(layers | make_mlp_layers(sizes, request.classes, options.dropout))


NETWORKS: dict[str, ModelSpec[Any]] = {
    "vgg16": ModelSpec(
        "VGG-16 with batch norm and two dense layers of 4096, as in FedMR's code", _build_vgg16, _VggOptions
    ),
}
