"""Layers that a GPU computes together with the ReLU after them.

One Triton kernel computes both. This file also says when that is possible.

In small networks most kernels are neither convolutions nor matrix products: norms, pools, biases, ReLUs and residual
sums read and write all activations again and again. If Triton is installed (it comes with torch for GPUs), some of them
are fused into one kernel. FEDLOOM_FUSE=0 in the environment turns this off.

Results differ from torch's by rounding. Runs in fp32 must agree with any other engine to the last bit, so they use
torch's own kernels, and so does any unusual input.
"""

import logging
import os
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from threading import Lock
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from fedloom.devices.precision import is_full_precision

log = logging.getLogger("fedloom")

enabled = os.environ.get("FEDLOOM_FUSE") != "0"
"""Whether layers may use fedloom's own kernels."""

_answers: dict[torch.device, bool] = {}
_asking = Lock()


class FusedReLULayer(nn.Module):
    """A layer with a fast way to compute itself and a ReLU."""

    @abstractmethod
    def relu(self, x: Tensor) -> Tensor:
        """Return relu(self(x))."""


class FusedReLUSequential(nn.Sequential):
    """Sequential layers; a `FusedReLULayer` is fused with the ReLU after it."""

    def forward(self, x: Tensor) -> Tensor:
        layers = iter([*self, None])
        layer = next(layers)
        while layer is not None:
            after = next(layers)
            if (
                isinstance(layer, FusedReLULayer)
                and _is_relu(after)
                and not (hooks_prevent_fusion(layer) or hooks_prevent_fusion(after))
            ):
                x, after = layer.relu(x), next(layers)
            else:
                x = layer(x)
            layer = after
        return x


def _is_relu(layer: nn.Module | None) -> TypeGuard[nn.ReLU]:
    return type(layer) is nn.ReLU


def hooks_prevent_fusion(module: nn.Module) -> bool:
    """Return whether hooks, its own or global ones, need the module's inputs and outputs."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or bool(_has_any_global_hook())  # type: ignore[no-untyped-call]  # torch's


def prepare_fused_relu(module: nn.Module, device: torch.device) -> None:
    """Try out Triton now if the module can use it: that is impossible during a capture."""
    wanted = enabled and device.type == "cuda" and not is_full_precision()
    if wanted and any(isinstance(layer, FusedReLULayer) for layer in module.modules()):
        fused_relu_available(torch.empty(0, device=device).device)  # with an index, as devices of tensors have


def fused_relu_device(x: Tensor) -> AbstractContextManager[object]:
    """Return a scope for launches: Triton launches on the current GPU, wherever its tensors are."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def can_use_fused_relu(x: Tensor) -> bool:
    """Return whether fedloom's own kernels can process these maps."""
    return (
        enabled
        and torch._C._get_tracing_state() is None  # in a trace, sizes are not numbers
        and not torch._C._are_functorch_transforms_active()  # these tensors hide the memory order of the real ones
        and forward_ad._current_level < 0
        and x.is_cuda
        and x.ndim == 4
        and x.dtype in (torch.float32, torch.bfloat16)
        and 0 < x.numel() < 2**31
        and not is_full_precision()
        and (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last))
        and not torch.compiler.is_compiling()
        and fused_relu_available(x.device)
    )


def fused_relu_available(device: torch.device) -> bool:
    """Return whether Triton can compile for this GPU. Tested once: a run must not change its kernels."""
    with _asking:
        if device not in _answers:
            _answers[device] = _tried(device)
        return _answers[device]


def _tried(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    try:
        from fedloom.models.layers import triton_batch_norm, triton_pooling

        for dtype, channels_last in ((torch.float32, False), (torch.bfloat16, True)):
            x = torch.ones(1, 32, 2, 2, dtype=dtype, device=device)
            if channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            with fused_relu_device(x):
                y, which = triton_pooling.triton_pooling_forward(x, x[0, :, 0, 0].contiguous(), channels_last)
                triton_pooling.triton_pooling_backward(y, y, which, x.shape, channels_last)
                if channels_last:
                    one, running = torch.ones(32, device=device), torch.ones(2, 32, device=device)
                    statistics = (*running, torch.zeros((), dtype=torch.long, device=device))
                    y, saved = triton_batch_norm.triton_batch_norm_forward(x, x, one, one, statistics, 0.1, 1e-5, True)
                    triton_batch_norm.triton_batch_norm_backward(y, x, y, one, saved, True, True)
    except Exception as error:  # an old Triton, no C compiler, an unknown GPU
        log.warning("norms and pools are computed by torch's own kernels: %s", str(error).partition("\n")[0])
        return False
    return True
