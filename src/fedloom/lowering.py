"""Networks that compute in a lower precision than that of their models while they train.

Autocast casts each weight by itself, two short kernels for every one of them. Casting all in one go was tried and is
slower on an H200: joining the weights, and their gradients, takes longer than the kernels that it saves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def lower(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """The module; where a type is given it computes in it while it trains, and its output has the usual type."""
    if dtype is not None:  # no closure: a copy of the module must compute with its own weights
        module.forward = partial(_forward, module, module.forward, device.type, dtype)
    return module


def _forward(module: nn.Module, forward: Callable[..., Any], device: str, dtype: torch.dtype, *inputs: Any) -> Any:
    if not module.training:
        return forward(*inputs)
    with torch.autocast(device, dtype, cache_enabled=False):
        result = forward(*inputs)
    return result.float() if isinstance(result, Tensor) else result
