"""Mixed precision: networks that compute in a lower precision while they train.

Autocast casts every weight and its gradient with a kernel each, most of them small. Here one kernel casts the weights
of all dense and convolutional layers, and one their gradients. The result is the same, because each number is rounded
once, at the same point.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fedloom.devices.cuda_runtime import cuda_foreach_copy_

CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weights autocast always casts."""


def apply_mixed_precision(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Let the module compute in `dtype` in training mode, with float32 outputs. Return the module."""
    if dtype is not None:  # no closure: a deep copy must compute with its own weights
        module.forward = partial(_forward, module, module.forward, device.type, dtype)
    return module


def _forward(
    module: nn.Module, forward: Callable[..., Any], device: str, dtype: torch.dtype, *inputs: Any, **named: Any
) -> Any:
    if not module.training:
        return forward(*inputs, **named)
    with torch.autocast(device, dtype, cache_enabled=False), _cast_parameters(module, dtype):
        result = forward(*inputs, **named)
    if isinstance(result, Tensor):
        return result.float()
    # Losses use each of several outputs, such as features beside the logits.
    return tree_map_only(Tensor, lambda tensor: tensor.float() if tensor.dtype is dtype else tensor, result)


class _Cast(torch.autograd.Function):
    """Cast many tensors to another dtype, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        return _in_type(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_in_type(gradients, ctx.dtype)


def _in_type(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    cast = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in tensors)
    cuda_foreach_copy_(cast, tensors)
    return cast


@contextmanager
def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Replace the layers' trainable weights by casts inside. Gradients reach the original weights."""
    places = [
        (layer, name, weight)
        for layer in module.modules()
        if isinstance(layer, CAST)
        for name, weight in layer._parameters.items()
        if weight is not None and weight.requires_grad
    ]
    weights = {id(weight): weight for _, _, weight in places}
    if not weights:
        yield
        return
    cast = _Cast.apply(dtype, *weights.values())  # type: ignore[no-untyped-call]  # torch's
    low = dict(zip(weights, cast, strict=True))
    try:
        for layer, name, weight in places:
            layer._parameters[name] = low[id(weight)]
        yield
    finally:
        for layer, name, weight in places:
            layer._parameters[name] = weight
