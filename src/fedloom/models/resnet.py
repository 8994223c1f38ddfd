"""Residual networks: ResNet-18, ResNet-20, ResNet-50.

ResNet-20 is He's for CIFAR, or the one that FedMR's code calls ResNet-20.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. Each stage after the first halves the sides. If a
block changes the shape, its shortcut is a strided 1 x 1 convolution with a norm (B), or takes every other pixel and
adds channels of zeros (A, ResNet-20 only).
"""

from collections import OrderedDict
from functools import partial
from math import sqrt
from typing import Any, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedloom.models.base import ModelRequest, ModelSpec, expand_model_input_channels
from fedloom.models.layers.norms import NormOptions, normalize_and_activate

Size = tuple[int, int]


class _ResNetOptions(NormOptions):
    stem: Literal["cifar", "imagenet"] = "cifar"
    """first layers: cifar keeps the size of images; imagenet (7 x 7 convolution and a pool) quarters their sides"""
    width: int = Field(64, ge=1)
    """channels of the first stage"""
    color: bool = False
    """use three channels for all data; gray images are repeated"""


class _ImageNetResNetOptions(_ResNetOptions):
    stem: Literal["cifar", "imagenet"] = "imagenet"
    """first layers: cifar keeps the size of images; imagenet (7 x 7 convolution and a pool) quarters their sides"""


class _ResNet20Options(NormOptions):
    shortcut: Literal["A", "B"] = "A"
    """shortcut if the shape changes: A pads with zeros, B is a 1 x 1 convolution with a norm"""
    width: int = Field(16, ge=1)
    """channels of the first stage"""


class _PreActResNetOptions(NormOptions):
    width: int = Field(16, ge=1)
    """channels of the first stage, within its blocks"""


class _ResNetPlan:
    """Builder of the layers of one network's blocks."""

    def __init__(self, request: ModelRequest, options: NormOptions, shortcut: Literal["A", "B"] = "B") -> None:
        self.request, self.options, self.shortcut_kind = request, options, shortcut

    def convolution(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        return nn.Conv2d(
            in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=self.options.biased
        )

    def norm(self, channels: int, size: Size) -> nn.Module:
        return self.options.make(self.request, channels, size)

    def shortcut(self, in_channels: int, out_channels: int, stride: int, size: Size) -> nn.Module:
        """Return the shortcut from the input of a block to its output."""
        if stride == 1 and in_channels == out_channels:
            return nn.Identity()
        if self.shortcut_kind == "A":
            return PaddedShortcut(out_channels - in_channels, stride)
        convolution, norm = self.convolution(in_channels, out_channels, 1, stride), self.norm(out_channels, size)
        return nn.Sequential(OrderedDict(conv=convolution, norm=norm))


class PaddedShortcut(nn.Module):
    """Every `stride`-th pixel, with `extra_channels` channels of zeros after the others."""

    def __init__(self, extra_channels: int, stride: int) -> None:
        super().__init__()
        self.extra_channels, self.stride = extra_channels, stride

    def forward(self, x: Tensor) -> Tensor:
        # The mean of one pixel is that pixel, up to the sign of zeros. The gradient of a slice would not be in
        # channels-last order.
        return F.pad(F.avg_pool2d(x, 1, self.stride), (0, 0, 0, 0, 0, self.extra_channels))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, plan: _ResNetPlan, in_channels: int, width: int, stride: int, sizes: tuple[Size, Size]) -> None:
        super().__init__()
        self.conv1 = plan.convolution(in_channels, width, 3, stride)
        self.norm1 = plan.norm(width, sizes[1])
        self.conv2 = plan.convolution(width, width, 3)
        self.norm2 = plan.norm(width, sizes[1])
        self.shortcut = plan.shortcut(in_channels, width, stride, sizes[1])

    def forward(self, x: Tensor) -> Tensor:
        inner = normalize_and_activate(self.norm1, self.conv1(x))
        return normalize_and_activate(self.norm2, self.conv2(inner), self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1, the last of which adds channels, and a shortcut."""

    expansion = 4

    def __init__(self, plan: _ResNetPlan, in_channels: int, width: int, stride: int, sizes: tuple[Size, Size]) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = plan.convolution(in_channels, width, 1)
        self.norm1 = plan.norm(width, sizes[0])
        self.conv2 = plan.convolution(width, width, 3, stride)
        self.norm2 = plan.norm(width, sizes[1])
        self.conv3 = plan.convolution(width, out_channels, 1)
        self.norm3 = plan.norm(out_channels, sizes[1])
        self.shortcut = plan.shortcut(in_channels, out_channels, stride, sizes[1])

    def forward(self, x: Tensor) -> Tensor:
        inner = normalize_and_activate(self.norm1, self.conv1(x))
        inner = normalize_and_activate(self.norm2, self.conv2(inner))
        return normalize_and_activate(self.norm3, self.conv3(inner), self.shortcut(x))


class PreActBottleneck(nn.Module):
    """A bottleneck with norm and ReLU before each convolution, and a shortcut without a norm."""

    expansion = 4

    def __init__(self, plan: _ResNetPlan, in_channels: int, width: int, stride: int, sizes: tuple[Size, Size]) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.norm1 = plan.norm(in_channels, sizes[0])
        self.conv1 = plan.convolution(in_channels, width, 1)
        self.norm2 = plan.norm(width, sizes[0])
        self.conv2 = plan.convolution(width, width, 3, stride)
        self.norm3 = plan.norm(width, sizes[1])
        self.conv3 = plan.convolution(width, out_channels, 1)
        changes = stride != 1 or in_channels != out_channels
        self.shortcut = plan.convolution(in_channels, out_channels, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(normalize_and_activate(self.norm1, x))
        inner = self.conv2(normalize_and_activate(self.norm2, inner))
        inner = self.conv3(normalize_and_activate(self.norm3, inner))
        out: Tensor = inner + self.shortcut(x)
        return out


AnyBlock = type[BasicBlock] | type[Bottleneck] | type[PreActBottleneck]


def _build_residual_stages(
    plan: _ResNetPlan, block: AnyBlock, counts: tuple[int, ...], width: int, in_channels: int, size: Size
) -> tuple[nn.Sequential, int, Size]:
    """Return the blocks of all stages, and the number of channels and the size of their output."""
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for i, count in enumerate(counts):
        blocks: list[nn.Module] = []
        for j in range(count):
            stride = 2 if i and not j else 1
            smaller = (-(-size[0] // stride), -(-size[1] // stride))
            blocks.append(block(plan, in_channels, width * 2**i, stride, (size, smaller)))
            in_channels, size = width * 2**i * block.expansion, smaller
        body[f"layer{i + 1}"] = nn.Sequential(*blocks)
    return nn.Sequential(body), in_channels, size


class ResNet(nn.Module):
    """A stem, stages of blocks, the mean over all pixels, and the linear `head`."""

    old_names = (
        (r"^body\.", ""),
        (r"(^|\.)bn(\d)\.", r"\1norm\2."),
        (r"\.downsample\.0\.", ".shortcut.conv."),
        (r"\.downsample\.1\.", ".shortcut.norm."),
        (r"^fc\.", "head."),
    )
    """Names of the tensors in files of torchvision and timm, see `fedloom.models.initial_weights`."""

    def __init__(
        self,
        plan: _ResNetPlan,
        block: AnyBlock,
        counts: tuple[int, ...],
        width: int,
        stem: str = "cifar",
        color: bool = False,
    ) -> None:
        super().__init__()
        channels, *sides = plan.request.image_shape(color=color)
        self.channels = channels
        if stem == "imagenet":
            sides = [-(-side // 2) for side in sides]
            self.conv1 = plan.convolution(channels, width, 7, 2)
            self.pool: nn.Module = nn.MaxPool2d(3, stride=2, padding=1)
        else:
            self.conv1 = plan.convolution(channels, width, 3)
            self.pool = nn.Identity()
        self.norm1 = plan.norm(width, (sides[0], sides[1]))
        if stem == "imagenet":
            sides = [-(-side // 2) for side in sides]
        self.body, after, _ = _build_residual_stages(plan, block, counts, width, width, (sides[0], sides[1]))
        self.head = nn.Linear(after, plan.request.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(expand_model_input_channels(x, self.channels))
        if isinstance(self.pool, nn.Identity):
            x = normalize_and_activate(self.norm1, x)
        else:  # the pool before ReLU: the two commute exactly, and ReLU has less to do
            x = F.relu(self.pool(self.norm1(x)))
        scores: Tensor = self.head(self.body(x).mean((2, 3)))
        return scores


class PreActResNet(nn.Module):
    """The ResNet-20 of FedCross's and FedMR's code: six bottlenecks with early norms, and no norm at the end.

    The last norm exists but is not used. It stays, because it counts as parameters, is sent, and FedMR swaps it as a
    layer. Gray images pass a 3 x 3 max pool after the stem. Initial weights are those of that code.
    """

    def __init__(self, request: ModelRequest, options: _PreActResNetOptions) -> None:
        super().__init__()
        plan, width = _ResNetPlan(request, options), options.width
        channels, *sides = request.image_shape()
        self.conv1 = plan.convolution(channels, width, 3)
        self.pool = nn.MaxPool2d(3, stride=1, padding=1) if channels == 1 else nn.Identity()
        self.body, after, size = _build_residual_stages(
            plan, PreActBottleneck, (2, 2, 2), width, width, (sides[0], sides[1])
        )
        self.norm = plan.norm(after, size)
        self.head = nn.Linear(after, request.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels)))
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(self.pool(self.conv1(x))).mean((2, 3)))
        return scores


def _build_resnet(
    block: AnyBlock, counts: tuple[int, ...], request: ModelRequest, options: _ResNetOptions
) -> nn.Module:
    """Return ResNet-18 or a larger ResNet."""
    return ResNet(_ResNetPlan(request, options), block, counts, options.width, options.stem, options.color)


def _build_resnet20(request: ModelRequest, options: _ResNet20Options) -> nn.Module:
    """Return He's network of 20 layers for CIFAR."""
    return ResNet(_ResNetPlan(request, options, options.shortcut), BasicBlock, (3, 3, 3), options.width)


NETWORKS: dict[str, ModelSpec[Any]] = {
    "resnet20": ModelSpec("He's ResNet-20 for CIFAR: 16, 32 and 64 channels", _build_resnet20, _ResNet20Options),
    "resnet20-bottleneck": ModelSpec(
        "the ResNet-20 of FedCross's and FedMR's code: six pre-activation bottlenecks",
        PreActResNet,
        _PreActResNetOptions,
    ),
    "resnet18": ModelSpec(
        "ResNet-18, for small images by default", partial(_build_resnet, BasicBlock, (2, 2, 2, 2)), _ResNetOptions
    ),
    "resnet50": ModelSpec(
        "ResNet-50, with the stem for ImageNet by default",
        partial(_build_resnet, Bottleneck, (3, 4, 6, 3)),
        _ImageNetResNetOptions,
    ),
}
