"""Residual networks: He's ResNet-20 for CIFAR, ResNet-18 and -50, and the one that FedMR's code calls ResNet-20.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. A stage after the first halves the sides. Where a
block changes the shape, its shortcut is a strided 1 x 1 convolution with a norm (B), or takes every other pixel and
fills up with channels of zeros (A, ResNet-20 only).
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
    colour: bool = False
    """three channels whatever the data have; grey images are repeated"""


class _ImageNetResNetOptions(_ResNetOptions):
    stem: Literal["cifar", "imagenet"] = "imagenet"
    """first layers: cifar keeps the size of images; imagenet (7 x 7 convolution and a pool) quarters their sides"""


class _ResNet20Options(NormOptions):
    shortcut: Literal["A", "B"] = "A"
    """where the shape changes: A pads with zeros, B is a 1 x 1 convolution with a norm"""
    width: int = Field(16, ge=1)
    """channels of the first stage"""


class _PreActResNetOptions(NormOptions):
    width: int = Field(16, ge=1)
    """channels of the first stage, within its blocks"""


class _ResNetPlan:
    """How the blocks of one network are made."""

    def __init__(self, wanted: ModelRequest, options: NormOptions, shortcut: Literal["A", "B"] = "B") -> None:
        self.wanted, self.options, self.shortcut_kind = wanted, options, shortcut

    def convolution(self, before: int, after: int, kernel: int, stride: int = 1) -> nn.Conv2d:
        return nn.Conv2d(before, after, kernel, stride=stride, padding=kernel // 2, bias=self.options.biased)

    def norm(self, channels: int, size: Size) -> nn.Module:
        return self.options.make(self.wanted, channels, size)

    def shortcut(self, before: int, after: int, stride: int, size: Size) -> nn.Module:
        """From the input of a block to its output."""
        if stride == 1 and before == after:
            return nn.Identity()
        if self.shortcut_kind == "A":
            return PaddedShortcut(after - before, stride)
        convolution, norm = self.convolution(before, after, 1, stride), self.norm(after, size)
        return nn.Sequential(OrderedDict(conv=convolution, norm=norm))


class PaddedShortcut(nn.Module):
    """Every `stride`-th pixel, and as many channels of zeros behind the others as there are to be more."""

    def __init__(self, more: int, stride: int) -> None:
        super().__init__()
        self.more, self.stride = more, stride

    def forward(self, x: Tensor) -> Tensor:
        # Means of single pixels are those pixels, but for the sign of zeros. Of a slice the gradient would not be in
        # channels-last order.
        return F.pad(F.avg_pool2d(x, 1, self.stride), (0, 0, 0, 0, 0, self.more))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, plan: _ResNetPlan, before: int, width: int, stride: int, sizes: tuple[Size, Size]) -> None:
        super().__init__()
        self.conv1 = plan.convolution(before, width, 3, stride)
        self.norm1 = plan.norm(width, sizes[1])
        self.conv2 = plan.convolution(width, width, 3)
        self.norm2 = plan.norm(width, sizes[1])
        self.shortcut = plan.shortcut(before, width, stride, sizes[1])

    def forward(self, x: Tensor) -> Tensor:
        inner = normalize_and_activate(self.norm1, self.conv1(x))
        return normalize_and_activate(self.norm2, self.conv2(inner), self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two of 1 x 1, the last of which widens, beside a shortcut."""

    expansion = 4

    def __init__(self, plan: _ResNetPlan, before: int, width: int, stride: int, sizes: tuple[Size, Size]) -> None:
        super().__init__()
        after = width * self.expansion
        self.conv1 = plan.convolution(before, width, 1)
        self.norm1 = plan.norm(width, sizes[0])
        self.conv2 = plan.convolution(width, width, 3, stride)
        self.norm2 = plan.norm(width, sizes[1])
        self.conv3 = plan.convolution(width, after, 1)
        self.norm3 = plan.norm(after, sizes[1])
        self.shortcut = plan.shortcut(before, after, stride, sizes[1])

    def forward(self, x: Tensor) -> Tensor:
        inner = normalize_and_activate(self.norm1, self.conv1(x))
        inner = normalize_and_activate(self.norm2, self.conv2(inner))
        return normalize_and_activate(self.norm3, self.conv3(inner), self.shortcut(x))


class PreActBottleneck(nn.Module):
    """The same with norm and ReLU before each convolution, and a shortcut without a norm."""

    expansion = 4

    def __init__(self, plan: _ResNetPlan, before: int, width: int, stride: int, sizes: tuple[Size, Size]) -> None:
        super().__init__()
        after = width * self.expansion
        self.norm1 = plan.norm(before, sizes[0])
        self.conv1 = plan.convolution(before, width, 1)
        self.norm2 = plan.norm(width, sizes[0])
        self.conv2 = plan.convolution(width, width, 3, stride)
        self.norm3 = plan.norm(width, sizes[1])
        self.conv3 = plan.convolution(width, after, 1)
        changes = stride != 1 or before != after
        self.shortcut = plan.convolution(before, after, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(normalize_and_activate(self.norm1, x))
        inner = self.conv2(normalize_and_activate(self.norm2, inner))
        inner = self.conv3(normalize_and_activate(self.norm3, inner))
        out: Tensor = inner + self.shortcut(x)
        return out


AnyBlock = type[BasicBlock] | type[Bottleneck] | type[PreActBottleneck]


def _build_residual_stages(
    plan: _ResNetPlan, block: AnyBlock, counts: tuple[int, ...], width: int, before: int, size: Size
) -> tuple[nn.Sequential, int, Size]:
    """The blocks of all stages, and how many channels of which size leave them."""
    body: OrderedDict[str, nn.Module] = OrderedDict()
    for i, count in enumerate(counts):
        blocks: list[nn.Module] = []
        for j in range(count):
            stride = 2 if i and not j else 1
            smaller = (-(-size[0] // stride), -(-size[1] // stride))
            blocks.append(block(plan, before, width * 2**i, stride, (size, smaller)))
            before, size = width * 2**i * block.expansion, smaller
        body[f"layer{i + 1}"] = nn.Sequential(*blocks)
    return nn.Sequential(body), before, size


class ResNet(nn.Module):
    """A stem, stages of blocks, the mean over all pixels, and the linear `head`."""

    old_names = (
        (r"^body\.", ""),
        (r"(^|\.)bn(\d)\.", r"\1norm\2."),
        (r"\.downsample\.0\.", ".shortcut.conv."),
        (r"\.downsample\.1\.", ".shortcut.norm."),
        (r"^fc\.", "head."),
    )
    """Under which other names files of torchvision and timm know the tensors, see `fedloom.models.initial_weights`."""

    def __init__(
        self,
        plan: _ResNetPlan,
        block: AnyBlock,
        counts: tuple[int, ...],
        width: int,
        stem: str = "cifar",
        colour: bool = False,
    ) -> None:
        super().__init__()
        channels, *sides = plan.wanted.images(colour=colour)
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
        self.head = nn.Linear(after, plan.wanted.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(expand_model_input_channels(x, self.channels))
        if isinstance(self.pool, nn.Identity):
            x = normalize_and_activate(self.norm1, x)
        else:  # the pool before ReLU: the two commute exactly, and this way there is less to do
            x = F.relu(self.pool(self.norm1(x)))
        scores: Tensor = self.head(self.body(x).mean((2, 3)))
        return scores


class PreActResNet(nn.Module):
    """What FedCross's and FedMR's code calls ResNet-20: six bottlenecks with early norms, without a norm at the end.

    The norm for the end is made and never used there; it is kept, because it counts as parameters, it travels, and
    FedMR swaps it as a layer. Grey images pass a 3 x 3 maximum behind the stem. Weights start as in that code.
    """

    def __init__(self, wanted: ModelRequest, options: _PreActResNetOptions) -> None:
        super().__init__()
        plan, width = _ResNetPlan(wanted, options), options.width
        channels, *sides = wanted.images()
        self.conv1 = plan.convolution(channels, width, 3)
        self.pool = nn.MaxPool2d(3, stride=1, padding=1) if channels == 1 else nn.Identity()
        self.body, after, size = _build_residual_stages(
            plan, PreActBottleneck, (2, 2, 2), width, width, (sides[0], sides[1])
        )
        self.norm = plan.norm(after, size)
        self.head = nn.Linear(after, wanted.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels)))
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(self.pool(self.conv1(x))).mean((2, 3)))
        return scores


def _build_resnet(block: AnyBlock, counts: tuple[int, ...], wanted: ModelRequest, options: _ResNetOptions) -> nn.Module:
    """ResNet-18 and its larger relatives."""
    return ResNet(_ResNetPlan(wanted, options), block, counts, options.width, options.stem, options.colour)


def _build_resnet20(wanted: ModelRequest, options: _ResNet20Options) -> nn.Module:
    """He's network of 20 layers for CIFAR."""
    return ResNet(_ResNetPlan(wanted, options, options.shortcut), BasicBlock, (3, 3, 3), options.width)


NETWORKS: dict[str, ModelSpec[Any]] = {
    "resnet20": ModelSpec("He's ResNet-20 for CIFAR: 16, 32 and 64 channels", _build_resnet20, _ResNet20Options),
    "resnet20-bottleneck": ModelSpec(
        "what FedCross's and FedMR's code calls ResNet-20: six pre-activation bottlenecks",
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
