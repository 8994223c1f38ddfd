"""How exactly a GPU computes, and how it chooses its convolutions."""

import torch

_tunes = False
_to_the_bit = False


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
    tune(False)


def to_the_bit() -> bool:
    """Whether a GPU is asked for the bits that torch's own kernels give."""
    return _to_the_bit


def tunes() -> bool:
    """Whether convolutions that come again and again are tried out, to choose the fastest kernel for each."""
    return _tunes


def tune(worth_it: bool) -> None:
    """Whether the convolutions to come are worth trying out: it takes seconds for each size of batch."""
    if torch.backends.cudnn.benchmark is not (_tunes and worth_it):
        torch.backends.cudnn.benchmark = _tunes and worth_it
