"""Numerical precision on a GPU, and how cuDNN chooses the kernels of convolutions."""

import logging
import os
from statistics import median_low
from threading import Lock

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.conv import _ConvNd

log = logging.getLogger("fedloom")

_tunes = False
_to_the_bit = False
_second: bool | None = None
"""Whether cuDNN uses its second heuristic; None until a run has decided."""
_choosing = Lock()

SECOND_RULE = "TORCH_CUDNN_USE_HEURISTIC_MODE_B"
"""The variable that selects cuDNN's second heuristic. torch reads it once, at its first convolution on a GPU."""

NARROW = range(16, 64 + 1)
"""Median channels of a narrow network's convolutions. With fewer, as in LeNet, the second heuristic is no better."""


def set_precision(device: torch.device, precision: str, deterministic: bool) -> None:
    """Set the precision of a GPU, and deterministic or fastest kernels, for the whole process."""
    global _tunes, _to_the_bit
    if device.type != "cuda":
        return
    _to_the_bit = precision == "fp32"
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.deterministic = deterministic
    _tunes = not deterministic
    set_autotune(False)


def is_full_precision() -> bool:
    """Return whether results must have the same bits as with torch's own kernels."""
    return _to_the_bit


def allows_autotune() -> bool:
    """Return whether cuDNN may benchmark its algorithms for convolutions (`--fast`)."""
    return _tunes


def set_autotune(enabled: bool) -> None:
    """Benchmark the next convolutions, if allowed. It takes seconds for each batch size."""
    if torch.backends.cudnn.benchmark is not (_tunes and enabled):
        torch.backends.cudnn.benchmark = _tunes and enabled


def choose_cudnn_heuristic(module: nn.Module, device: torch.device, precision: str, deterministic: bool) -> None:
    """Use cuDNN's second heuristic if it is the better one: for narrow networks in bf16.

    Both heuristics run no benchmark, so each chooses the same kernels every time. The second takes tens of milliseconds
    for each convolution and batch size, and chooses worse for wide networks. The choice holds for the whole process:
    the first run on a GPU decides, unless the environment variable is set.
    """
    global _second
    if device.type != "cuda" or not any(isinstance(layer, _ConvNd) for layer in module.modules()):
        return
    with _choosing:  # or another run could take the variable for the user's
        if SECOND_RULE in os.environ:
            return
        wanted = precision == "bf16" and deterministic and _has_narrow_convolutions(module)
        if _second is None:
            if wanted:
                _make_torch_look(device)
            _second = wanted
        elif deterministic and wanted is not _second:
            log.warning(
                "cuDNN keeps the heuristic that the first run of this process chose for convolutions: "
                "this run differs in the last bits from the same run in a process of its own"
            )


def _make_torch_look(device: torch.device) -> None:
    os.environ[SECOND_RULE] = "1"
    try:
        one = torch.ones(1, 1, 1, 1, device=device)
        F.conv2d(one, one)
    finally:
        os.environ.pop(SECOND_RULE, None)  # child processes decide for themselves


def _has_narrow_convolutions(module: nn.Module) -> bool:
    """Return whether the median number of channels is in `NARROW`."""
    return _channels_in_the_middle(module) in NARROW


def prefers_channels_last(module: nn.Module, precision: str) -> bool:
    """Return whether a GPU is faster with images in channels-last order.

    It is in bf16, and in tf32 for wide networks with batch norm. A round of ResNet-18 in tf32 then takes 0.64 of the
    time. ResNet-20 gains only with the Triton kernels for batch norm (docs/engines.md).
    """
    normed = any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    wide = _channels_in_the_middle(module) > max(NARROW)
    return precision == "bf16" or (precision == "tf32" and normed and wide)


def _channels_in_the_middle(module: nn.Module) -> int:
    """Return the lower median of the output channels of 2-d convolutions; 0 without any."""
    return median_low([layer.out_channels for layer in module.modules() if isinstance(layer, nn.Conv2d)] or [0])
