"""Norm layers, and batch norm fused with a residual sum and ReLU on a GPU.

See `fused_relu.py` for when layers are fused.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.autograd import Function

from fedloom.errors import InputError
from fedloom.models.base import ModelRequest
from fedloom.models.layers import fused_relu
from fedloom.models.layers.fused_relu import FusedReLULayer, fused_relu_device, hooks_prevent_fusion
from fedloom.utils.settings import Settings


class BatchNorm2d(nn.BatchNorm2d, FusedReLULayer):
    """`nn.BatchNorm2d`, faster on a GPU for maps in channels-last order."""

    def forward(self, x: Tensor) -> Tensor:
        return self._fused(x, None, relu=False) if self._may_fuse(x) else super().forward(x)

    def relu(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """Return relu(norm(x) + beside)."""
        if self._may_fuse(x) and _alike(x, beside) and not hooks_prevent_fusion(self):
            return self._fused(x, beside, relu=True)
        y: Tensor = self(x)
        return F.relu(y if beside is None else y + beside)

    def _may_fuse(self, x: Tensor) -> bool:
        if not (
            fused_relu.can_use_fused_relu(x)
            and x.is_contiguous(memory_format=torch.channels_last)
            and x.numel() <= 2**30
        ):
            return False
        by_batch = self.training or self.running_mean is None
        several = x.numel() > x.shape[1] == self.num_features  # otherwise torch raises an error
        statistics, counter = (self.running_mean, self.running_var), self.num_batches_tracked
        whole = len({one is None for one in (*statistics, counter)}) == 1
        tensors = (self.weight, self.bias, *statistics)
        usual = all(one is None or (one.dtype is torch.float32 and one.is_contiguous()) for one in tensors)
        counts = counter is None or counter.dtype is torch.long
        return by_batch and several and whole and usual and counts and self.affine and self.momentum is not None

    def _fused(self, x: Tensor, beside: Tensor | None, *, relu: bool) -> Tensor:
        tracked = self.training and self.track_running_stats and self.running_mean is not None
        running = (self.running_mean, self.running_var, self.num_batches_tracked) if tracked else None
        y: Tensor = _BatchNormReLUFunction.apply(
            x, beside, self.weight, self.bias, running, self.momentum, self.eps, relu
        )  # type: ignore[no-untyped-call]  # torch's
        return y


def _alike(x: Tensor, beside: Tensor | None) -> bool:
    return beside is None or (beside.shape == x.shape and beside.dtype is x.dtype)


def normalize_and_activate(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return relu(norm(x) + residual) for any norm."""
    if isinstance(norm, BatchNorm2d):
        return norm.relu(x, residual)
    y: Tensor = norm(x)
    return F.relu(y if residual is None else y + residual)


class _BatchNormReLUFunction(Function):
    """Batch norm with the statistics of the batch, plus another tensor, with or without ReLU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_stats: tuple[Tensor, Tensor, Tensor] | None,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        with fused_relu_device(x):
            y, saved = _load_norm_kernels().triton_batch_norm_forward(
                x, residual, weight, bias, running_stats, momentum, eps, relu
            )
        ctx.save_for_backward(x, residual if relu else None, weight, bias, y if relu else None, saved)
        ctx.beside, ctx.relu, ctx.eps = residual is not None, relu, eps
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, beside, weight, bias, y, saved) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # for the gradient of the gradient
            d_x, d_beside, d_weight, d_bias = _differentiable(g, (x, beside, weight, bias), ctx.eps, ctx.relu)
            if ctx.beside and not ctx.relu:
                d_beside = g
        else:
            d_x, d_beside, d_weight, d_bias = _load_norm_kernels().triton_batch_norm_backward(
                g, x, x if y is None else y, weight, saved, ctx.relu, ctx.beside
            )
        return d_x, d_beside, d_weight, d_bias, None, None, None, None


def _differentiable(
    g: Tensor, inputs: tuple[Tensor, Tensor | None, Tensor, Tensor], eps: float, relu: bool
) -> list[Tensor | None]:
    """Return the gradients from torch's own operations, which can be differentiated again."""
    # Views, because x may have been computed from `beside`: that path is not part of this layer.
    views = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    x, beside, weight, bias = views
    assert x is not None, "only what is beside it may be missing"
    y = F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    y = y if beside is None else y + beside
    wanted = [view for view in views if view is not None and view.requires_grad]
    found = iter(torch.autograd.grad(F.relu(y) if relu else y, wanted, g, create_graph=True))
    return [next(found) if view is not None and view.requires_grad else None for view in views]


def _load_norm_kernels() -> Any:
    """Return the module of Triton kernels. Triton may not be installed."""
    from fedloom.models.layers import triton_batch_norm

    return triton_batch_norm


NormName = Literal["batch", "batch-stateless", "group", "instance", "none"]


class NormOptions(Settings):
    """Options of networks with a choice of norm layers."""

    norm: NormName = "batch"
    """norm layers: batch, group, instance, none, or batch-stateless (batch statistics in evaluation too)"""
    groups: int = Field(2, ge=1)
    """number of groups of channels, for norm=group"""

    @model_validator(mode="after")
    def _groups_are_used(self) -> "NormOptions":
        if "groups" in self.model_fields_set and self.norm != "group":
            raise ValueError(f"groups is for norm=group, and norm is {self.norm!r}.")
        return self

    @property
    def biased(self) -> bool:
        """Return whether convolutions need a bias, because no norm after them has one."""
        return self.norm == "none"

    def make(self, wanted: ModelRequest, channels: int, size: tuple[int, int]) -> nn.Module:
        """Return a norm for maps of this size and number of channels; the identity if norm is none."""
        if self.norm == "none":
            return nn.Identity()
        if self.norm == "batch":
            return BatchNorm2d(channels)
        if self.norm == "batch-stateless":
            return StatelessBatchNorm2d(channels)
        # With one channel per group this is instance norm without running statistics.
        groups = channels if self.norm == "instance" else self.groups
        if channels % groups:
            raise InputError(f"model {wanted.name!r} cannot share {channels} channels among {groups} groups.")
        if channels // groups * size[0] * size[1] == 1:
            pixels = f"{wanted.shape[1]} x {wanted.shape[2]} pixels"
            raise InputError(
                f"model {wanted.name!r} would normalize single numbers, for {pixels} shrink to one, and a number less "
                "its own mean is nothing; take larger images or another norm."
            )
        return nn.GroupNorm(groups, channels)


class StatelessBatchNorm2d(BatchNorm2d):
    """Batch norm without running statistics: it uses the batch's mean and variance, in evaluation too.

    So a prediction depends on the other samples in its batch, and there are no buffers to average. torch refuses a
    channel with a single value in the whole batch (one sample, 1 x 1 pixel). Here the value minus its mean is 0, so the
    output is the bias, just as for a batch of copies of that sample.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == self.num_features:
            return (x - x) * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)
        return super().forward(x)
