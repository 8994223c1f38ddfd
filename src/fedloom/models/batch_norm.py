"""Batch norm that a GPU computes together with what follows it.

In networks with batch norm most kernels are not convolutions: norms, ReLUs and sums of two branches read and write all
activations again and again. Where Triton is installed (it comes with torch for GPUs), a norm, the sum and the ReLU are
two kernels forward and two backward.

Results differ from torch's by rounding. So in fp32, where a training is to agree with any other to the last bit, and
wherever something is not as usual, torch's own kernels are used.
"""

import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

log = logging.getLogger("fedloom")


class BatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d`, faster on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return self._fused(x, None, relu=False) if self._may_fuse(x) else super().forward(x)

    def relu(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        """relu(norm(x) + beside)"""
        alike = beside is None or (beside.shape == x.shape and beside.dtype is x.dtype)
        if alike and self._may_fuse(x) and not _has_hooks(self):
            return self._fused(x, beside, relu=True)
        y: Tensor = self(x)
        return F.relu(y if beside is None else y + beside)

    def _may_fuse(self, x: Tensor) -> bool:
        if not x.is_cuda or x.ndim != 4 or x.dtype not in (torch.float32, torch.bfloat16):
            return False
        by_batch = self.training or self.running_mean is None
        usual = self.affine and self.momentum is not None and self.weight.dtype is torch.float32
        several = x.shape[1] < x.numel() < 2**31  # of a single number torch says what is wrong with it
        return (
            torch.backends.cudnn.allow_tf32
            and by_batch
            and usual
            and several
            and (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last))
            and not torch._C._are_functorch_transforms_active()
            and not torch.compiler.is_compiling()
            and kernels(x.device) is not None
        )

    def _fused(self, x: Tensor, beside: Tensor | None, *, relu: bool) -> Tensor:
        running = None
        if self.training and self.running_mean is not None and self.running_var is not None:
            running = self.running_mean, self.running_var
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        y: Tensor = NormReLU.apply(x, beside, self.weight, self.bias, running, self.momentum, self.eps, relu)  # type: ignore[no-untyped-call]  # torch's
        return y


class Chain(nn.Sequential):
    """Layers one after the other; a batch norm goes together with the ReLU behind it."""

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        for layer, before, after in zip(layers, [None, *layers], [*layers[1:], None], strict=False):
            if isinstance(layer, BatchNorm2d) and _is_plain_relu(after):
                x = layer.relu(x)
            elif not (isinstance(before, BatchNorm2d) and _is_plain_relu(layer)):
                x = layer(x)
        return x


def _is_plain_relu(layer: nn.Module | None) -> bool:
    return type(layer) is nn.ReLU and not _has_hooks(layer)


def norm_relu(norm: nn.Module, x: Tensor, beside: Tensor | None = None) -> Tensor:
    """relu(norm(x) + beside), whatever norm it is."""
    if isinstance(norm, BatchNorm2d):
        return norm.relu(x, beside)
    y: Tensor = norm(x)
    return F.relu(y if beside is None else y + beside)


def _has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to see what goes in and out."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


class NormReLU(Function):
    """Batch norm by the batch at hand, plus another tensor, through a ReLU or not."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        beside: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor, Tensor] | None,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Tensor:
        found = kernels(x.device)
        assert found is not None, "who calls this has asked for them"
        y, saved = found.forward(x, beside, weight, bias, running, momentum, eps, relu)
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
            found = kernels(x.device)
            assert found is not None, "they were there for the way forward"
            d_x, d_beside, d_weight, d_bias = found.backward(
                g, x, x if y is None else y, weight, saved, ctx.relu, ctx.beside
            )
        return d_x, d_beside, d_weight, d_bias, None, None, None, None


def _differentiable(
    g: Tensor, inputs: tuple[Tensor, Tensor | None, Tensor, Tensor], eps: float, relu: bool
) -> list[Tensor | None]:
    """The gradients by torch's own operations, which have gradients themselves."""
    x, beside, weight, bias = inputs
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    y = F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    y = y if beside is None else y + beside
    found = iter(torch.autograd.grad(F.relu(y) if relu else y, wanted, g, create_graph=True))
    return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs]


@cache
def kernels(device: torch.device) -> ModuleType | None:
    """The kernels, if they work on this device."""
    try:
        from fedloom.models import batch_norm_kernels as found
    except ImportError:
        return None
    x, one = torch.ones(2, 3, 2, 2, device=device), torch.ones(3, device=device)
    try:
        y, saved = found.forward(x, x, one, one, None, 0.1, 1e-5, True)
        found.backward(y, x, y, one, saved, True, True)
    except Exception as error:  # no compiler, for example, or a GPU that Triton does not know
        log.warning("batch norm is computed by torch's own kernels: %s", str(error).partition("\n")[0])
        return None
    return found
