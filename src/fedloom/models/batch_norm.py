"""Batch norm that a GPU computes together with the sum and the ReLU behind it, see `fedloom.models.fusing`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from fedloom.models import fusing
from fedloom.models.fusing import WithReLU, on_its_device, watched


class BatchNorm2d(nn.BatchNorm2d, WithReLU):
    """`nn.BatchNorm2d`, faster on a GPU where maps are in channels-last order."""

    def forward(self, x: Tensor) -> Tensor:
        return self._fused(x, None, relu=False) if self._may_fuse(x) else super().forward(x)

    def relu(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """relu(norm(x) + beside)"""
        if self._may_fuse(x) and _alike(x, beside) and not watched(self):
            return self._fused(x, beside, relu=True)
        y: Tensor = self(x)
        return F.relu(y if beside is None else y + beside)

    def _may_fuse(self, x: Tensor) -> bool:
        if not (fusing.may_fuse(x) and x.is_contiguous(memory_format=torch.channels_last) and x.numel() <= 2**30):
            return False
        by_batch = self.training or self.running_mean is None
        several = x.numel() > x.shape[1] == self.num_features  # if not, torch says what is wrong
        statistics, counter = (self.running_mean, self.running_var), self.num_batches_tracked
        whole = len({one is None for one in (*statistics, counter)}) == 1
        tensors = (self.weight, self.bias, *statistics)
        usual = all(one is None or (one.dtype is torch.float32 and one.is_contiguous()) for one in tensors)
        counts = counter is None or counter.dtype is torch.long
        return by_batch and several and whole and usual and counts and self.affine and self.momentum is not None

    def _fused(self, x: Tensor, beside: Tensor | None, *, relu: bool) -> Tensor:
        tracked = self.training and self.track_running_stats and self.running_mean is not None
        running = (self.running_mean, self.running_var, self.num_batches_tracked) if tracked else None
        y: Tensor = NormReLU.apply(x, beside, self.weight, self.bias, running, self.momentum, self.eps, relu)  # type: ignore[no-untyped-call]  # torch's
        return y


def _alike(x: Tensor, beside: Tensor | None) -> bool:
    return beside is None or (beside.shape == x.shape and beside.dtype is x.dtype)


def norm_relu(norm: nn.Module, x: Tensor, beside: Tensor | None = None) -> Tensor:
    """relu(norm(x) + beside), whatever norm it is."""
    if isinstance(norm, BatchNorm2d):
        return norm.relu(x, beside)
    y: Tensor = norm(x)
    return F.relu(y if beside is None else y + beside)


class NormReLU(Function):
    """Batch norm by the batch at hand, plus another tensor, through a ReLU or not."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        beside: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor, Tensor, Tensor] | None,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        with on_its_device(x):
            y, saved = kernels().forward(x, beside, weight, bias, running, momentum, eps, relu)
        ctx.save_for_backward(x, beside if relu else None, weight, bias, y if relu else None, saved)
        ctx.beside, ctx.relu, ctx.eps = beside is not None, relu, eps
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, beside, weight, bias, y, saved) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants the gradient of the gradient
            d_x, d_beside, d_weight, d_bias = _differentiable(g, (x, beside, weight, bias), ctx.eps, ctx.relu)
            if ctx.beside and not ctx.relu:
                d_beside = g
        else:
            d_x, d_beside, d_weight, d_bias = kernels().backward(
                g, x, x if y is None else y, weight, saved, ctx.relu, ctx.beside
            )
        return d_x, d_beside, d_weight, d_bias, None, None, None, None


def _differentiable(
    g: Tensor, inputs: tuple[Tensor, Tensor | None, Tensor, Tensor], eps: float, relu: bool
) -> list[Tensor | None]:
    """The gradients by torch's own operations, which have gradients themselves."""
    # Views, because x may have been computed from what is beside it: that way is not this layer's.
    views = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    x, beside, weight, bias = views
    assert x is not None, "only what is beside it may be missing"
    y = F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    y = y if beside is None else y + beside
    wanted = [view for view in views if view is not None and view.requires_grad]
    found = iter(torch.autograd.grad(F.relu(y) if relu else y, wanted, g, create_graph=True))
    return [next(found) if view is not None and view.requires_grad else None for view in views]


def kernels() -> Any:
    """Those written with Triton, which may not be there."""
    from fedloom.models import batch_norm_kernels

    return batch_norm_kernels
