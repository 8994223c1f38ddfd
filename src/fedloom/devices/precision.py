"""How exactly a GPU computes, and how it chooses its convolutions."""

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
"""Whether it is the second rule, once a run has decided."""
_choosing = Lock()

SECOND_RULE = "TORCH_CUDNN_USE_HEURISTIC_MODE_B"
"""Where torch looks, at its first convolution on a GPU and never again, by which rule cuDNN is to choose kernels."""

NARROW = range(16, 64 + 1)
"""Channels of a narrow network's convolutions, in the middle. With fewer, as in LeNet, the second rule is no better."""


def set_precision(device: torch.device, precision: str, deterministic: bool) -> None:
    """Let torch compute on `device` with this precision, and repeatably or as fast as it can. For the whole process."""
    global _tunes, _to_the_bit
    if device.type != "cuda":
        return
    _to_the_bit = precision == "fp32"
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.deterministic = deterministic
    _tunes = not deterministic
    set_autotune(False)


def is_bit_exact() -> bool:
    """Whether a GPU is asked for the bits that torch's own kernels give."""
    return _to_the_bit


def allows_autotune() -> bool:
    """Whether convolutions that come again and again are tried out, to choose the fastest kernel for each."""
    return _tunes


def set_autotune(worth_it: bool) -> None:
    """Whether the convolutions to come are worth trying out: it takes seconds for each size of batch."""
    if torch.backends.cudnn.benchmark is not (_tunes and worth_it):
        torch.backends.cudnn.benchmark = _tunes and worth_it


def choose_cudnn_heuristic(module: nn.Module, device: torch.device, precision: str, deterministic: bool) -> None:
    """Let cuDNN choose its kernels by its second rule where that is the better one: for narrow networks in bf16.

    Neither rule tries anything out, so either chooses the same every time. The second takes longer to answer, tens of
    milliseconds for each convolution and size of batch, and chooses worse for wide networks. One is for the whole
    process: the first run on a GPU decides, unless the environment says which it is to be.
    """
    global _second
    if device.type != "cuda" or not any(isinstance(layer, _ConvNd) for layer in module.modules()):
        return
    with _choosing:  # or the environment of one run's choice would be taken for somebody's word
        if SECOND_RULE in os.environ:
            return
        wanted = precision == "bf16" and deterministic and _has_narrow_convolutions(module)
        if _second is None:
            if wanted:
                _make_torch_look(device)
            _second = wanted
        elif deterministic and wanted is not _second:
            log.warning(
                "convolutions have the kernels that cuDNN chooses for the first run of this process: "
                "this run's last bits are not those that it has in a process of its own"
            )


def _make_torch_look(device: torch.device) -> None:
    os.environ[SECOND_RULE] = "1"
    try:
        one = torch.ones(1, 1, 1, 1, device=device)
        F.conv2d(one, one)
    finally:
        os.environ.pop(SECOND_RULE, None)  # processes that are started from here are to decide for themselves


def _has_narrow_convolutions(module: nn.Module) -> bool:
    """Whether its convolutions have few channels, but not very few."""
    return _channels_in_the_middle(module) in NARROW


def prefers_channels_last(module: nn.Module, precision: str) -> bool:
    """Whether a GPU is faster with images in channels-last order: in bf16, and in tf32 with wide networks with batch
    norm. A round of ResNet-18 takes 0.64 of the time then. One of ResNet-20 takes 0.87 with kernels of our own for its
    norms, but more than before with torch's (docs/engines.md).
    """
    normed = any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    wide = _channels_in_the_middle(module) > max(NARROW)
    return precision == "bf16" or (precision == "tf32" and normed and wide)


def _channels_in_the_middle(module: nn.Module) -> int:
    """The lower median of the convolutions' output channels; 0 where there are none."""
    return median_low([layer.out_channels for layer in module.modules() if isinstance(layer, nn.Conv2d)] or [0])
