"""2 x 2 pooling of images by mean or maximum, with fast gradients on a GPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedloom.models.layers import fused_relu
from fedloom.models.layers.fused_relu import FusedReLULayer, fused_relu_device


class AvgPool2x2(nn.AvgPool2d):
    """`nn.AvgPool2d(2)`, equal to the last bit.

    On a GPU torch's gradient kernel takes several times as long as writing its result. The gradient spreads each number
    over four pixels. The gradient of that is the mean again, so each is the other's.
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
    """The gradient of the mean: a quarter for each of the four pixels. An odd last row or column gets none."""

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


class MaxPool2x2(nn.MaxPool2d):
    """`nn.MaxPool2d(2)`, equal to the last bit; its gradient takes less than half the time on a GPU."""

    def __init__(self) -> None:
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        return _largest(x) if x.is_cuda and x.requires_grad and x.ndim == 4 else super().forward(x)


class PooledConv2d(nn.Conv2d, FusedReLULayer):
    """`nn.Conv2d`, then `nn.MaxPool2d(2)`.

    On a GPU the bias is added after the pool, to a quarter of the pixels. Adding the same number to all four before
    rounding does not change which is the largest, so the output is equal to the last bit. Pixels that only rounding
    makes equal may get each other's gradient, and the gradient of the bias is equal up to rounding.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.ndim == 4 and self.bias is not None and torch.is_grad_enabled():
            return self._biased(_largest(self._conv_forward(x, self.weight, None)))
        return F.max_pool2d(super().forward(x), 2)

    def relu(self, x: Tensor) -> Tensor:
        """Return relu(self(x))."""
        if self.bias is None or not fused_relu.can_use_fused_relu(x):
            return F.relu(self(x))
        maps = self._conv_forward(x, self.weight, None)
        if maps.shape[2] % 2 or maps.shape[3] % 2 or not fused_relu.can_use_fused_relu(maps):
            return F.relu(self._biased(_largest(maps)))
        y: Tensor = _MaxPoolReLUFunction.apply(maps, self.bias.to(maps.dtype))  # type: ignore[no-untyped-call]  # torch's
        return y

    def _biased(self, pooled: Tensor) -> Tensor:
        assert self.bias is not None, "who calls this has asked for it"
        return pooled + self.bias.to(pooled.dtype).view(-1, 1, 1)  # autocast only casts inputs of matrix products


class _MaxPoolReLUFunction(Function):
    """The largest of four pixels, plus a bias, through a ReLU: one kernel, see `fused_relu.py`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.shape, ctx.bias_type = x.shape, bias.dtype
        ctx.channels_last = x.is_contiguous(memory_format=torch.channels_last)
        with fused_relu_device(x):
            y, which = _load_pooling_kernels().triton_pooling_forward(x, bias, ctx.channels_last)
        ctx.save_for_backward(y, which)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,), (y, which) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient of the gradient needs torch's operations
            g = torch.where(y <= 0, 0, g)
            four = torch.stack([torch.where(which == place, g, 0) for place in range(4)], -1)
            d_x = four.view(*g.shape, 2, 2).transpose(3, 4).reshape(ctx.shape)
            d_bias = g.sum((0, 2, 3))
        else:
            d_x, d_bias = _load_pooling_kernels().triton_pooling_backward(g, y, which, ctx.shape, ctx.channels_last)
        return d_x, d_bias.to(ctx.bias_type)


def _load_pooling_kernels() -> Any:
    """Return the module of Triton kernels. Triton may not be installed."""
    from fedloom.models.layers import triton_pooling

    return triton_pooling


def _largest(x: Tensor) -> Tensor:
    largest: Tensor = _Largest.apply(x)[0]  # type: ignore[no-untyped-call]  # torch's
    return largest


class _Largest(Function):
    """The largest of four pixels, and its index.

    Only one pixel of the four gets the gradient: all are set to zero, then the gradients are scattered into place.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.max_pool2d_with_indices(x, (2, 2))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        (x,), (_, places) = inputs, output
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        ctx.channels_last = x.shape[1] > 1 and x.stride(1) == 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        g, (places,), (count, channels, height, width) = gradients[0], ctx.saved_tensors, ctx.shape
        if ctx.channels_last:
            pixels = g.new_zeros(count, height * width, channels).scatter_(1, _in_rows(places), _in_rows(g))
            return pixels.view(count, height, width, channels).permute(0, 3, 1, 2)
        pixels = g.new_zeros(count, channels, height * width).scatter_(2, places.flatten(2), g.flatten(2))
        return pixels.view(ctx.shape)


def _in_rows(x: Tensor) -> Tensor:
    """Return images as (image, pixel, channel)."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)
