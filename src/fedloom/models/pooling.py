"""Halving the sides of images, by the mean or the largest of four pixels, with gradients that a GPU computes fast."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class MeanPool2d(nn.AvgPool2d):
    """`nn.AvgPool2d(2)`, to the last bit.

    On a GPU torch's kernel for its gradient takes several times as long as writing its result does. The gradient
    spreads each number over four pixels, and the gradient of that is the mean again, so each is the other's.
    """

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.is_contiguous() and x.requires_grad:
            pooled: Tensor = _Mean.apply(x)  # type: ignore[no-untyped-call]  # torch's
            return pooled
        return super().forward(x)


class _Mean(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = x.shape[2:]
        return F.avg_pool2d(x, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        spread: Tensor = _Spread.apply(gradients[0], *ctx.size)  # type: ignore[no-untyped-call]  # torch's
        return spread


class _Spread(Function):
    """The gradient of the mean: a quarter for each of the four; an odd last row or column has no part in it."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, height: int, width: int) -> Tensor:
        count, channels, down, across = g.shape
        quarters = (g * 0.25)[:, :, :, None, :, None].expand(count, channels, down, 2, across, 2)
        spread = quarters.reshape(count, channels, 2 * down, 2 * across)
        return F.pad(spread, (0, width - 2 * across, 0, height - 2 * down)) if height % 2 or width % 2 else spread

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        mean: Tensor = _Mean.apply(gradients[0].contiguous())  # type: ignore[no-untyped-call]  # torch's
        return mean, None, None


class LargestPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d(2)`, to the last bit; its gradient takes less than half the time on a GPU."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        return _largest(x, None) if x.is_cuda and x.requires_grad else super().forward(x)


class PooledConv2d(nn.Conv2d):
    """`nn.Conv2d` and then `nn.MaxPool2d(2)`.

    The gradient of the bias is the sum over all pixels, of which only the largest of four have any: on a GPU only these
    are added up, so it is the same to rounding.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and self.bias is not None and torch.is_grad_enabled():
            return _largest(self._conv_forward(x, self.weight, None), self.bias)
        return F.max_pool2d(super().forward(x), 2)


def _largest(x: Tensor, bias: Tensor | None) -> Tensor:
    largest: Tensor = _Largest.apply(x, bias)  # type: ignore[no-untyped-call]  # torch's
    return largest


class _Largest(Function):
    """The largest of four pixels of x + bias.

    Its gradient belongs to one pixel of the four, so all others are set to zero and then these are put in their places.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        biased = x if bias is None else x + bias.view(-1, 1, 1)
        largest, places = F.max_pool2d_with_indices(biased, (2, 2))
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        ctx.channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        return largest

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (g,), (places,), (count, channels, height, width) = gradients, ctx.saved_tensors, ctx.shape
        for_x, for_bias = ctx.needs_input_grad
        spread = None
        if for_x and ctx.channels_last:
            pixels = g.new_zeros(count, height * width, channels).scatter_(1, _in_rows(places), _in_rows(g))
            spread = pixels.view(count, height, width, channels).permute(0, 3, 1, 2)
        elif for_x:
            pixels = g.new_zeros(count, channels, height * width).scatter_(2, places.flatten(2), g.flatten(2))
            spread = pixels.view(ctx.shape)
        return spread, g.sum((0, 2, 3)) if for_bias else None


def _in_rows(x: Tensor) -> Tensor:
    """Images as (image, pixel, channel)."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)
