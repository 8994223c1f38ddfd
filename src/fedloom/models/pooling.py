"""Halving the sides of images by the mean of four pixels, with a gradient that a GPU computes fast."""

from typing import Any

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
