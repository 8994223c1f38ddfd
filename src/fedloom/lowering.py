"""Networks that compute in a lower precision than that of their models while they train.

Autocast would cast every weight by itself, and its gradient back: two kernels for each, most of them on a few numbers.
Here the weights of all dense and convolutional layers are cast in one go, and so are their gradients. The numbers are
the same: each is rounded once, on the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weights autocast casts, always and all of them."""


def lower(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """The module; where a type is given it computes in it while it trains, and its output has the usual type."""
    if dtype is not None:  # no closure: a copy of the module must compute with its own weights
        module.forward = partial(_forward, module, module.forward, device.type, dtype)
    return module


def _forward(module: nn.Module, forward: Callable[..., Any], device: str, dtype: torch.dtype, *inputs: Any) -> Any:
    if not module.training:
        return forward(*inputs)
    with torch.autocast(device, dtype, cache_enabled=False), cast_at_once(module, dtype):
        result = forward(*inputs)
    return result.float() if isinstance(result, Tensor) else result


@contextmanager
def cast_at_once(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the layers' trainable weights have this type; gradients go through to those that they have outside."""
    places = [
        (layer, name, weight)
        for layer in module.modules()
        if isinstance(layer, CAST)
        for name, weight in layer._parameters.items()
        if weight is not None and weight.requires_grad
    ]
    weights = list({id(weight): weight for _, _, weight in places}.values())
    if not weights:
        yield
        return
    low = torch.cat([_laid_out(weight) for weight in weights]).to(dtype)
    parts = dict(zip(map(id, weights), torch.split(low, [weight.numel() for weight in weights]), strict=True))
    try:
        for layer, name, weight in places:
            layer._parameters[name] = _shaped(parts[id(weight)], weight)  # type: ignore[assignment]  # for a moment
        yield
    finally:
        for layer, name, weight in places:
            layer._parameters[name] = weight


def _laid_out(weight: Tensor) -> Tensor:
    """Its numbers as they lie in memory, without moving them."""
    return (weight.permute(0, 2, 3, 1) if _channels_last(weight) else weight).reshape(-1)


def _shaped(numbers: Tensor, weight: Tensor) -> Tensor:
    if _channels_last(weight):
        out, channels, height, width = weight.shape
        return numbers.view(out, height, width, channels).permute(0, 3, 1, 2)
    return numbers.view(weight.shape)


def _channels_last(weight: Tensor) -> bool:
    last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return last and not weight.is_contiguous()
