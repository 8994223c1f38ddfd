"""How exactly a GPU computes."""

import torch


def set_precision(device: torch.device, precision: str, deterministic: bool) -> None:
    """Let torch compute on `device` with this precision, and repeatably or as fast as it can. For the whole process."""
    if device.type != "cuda":
        return
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
