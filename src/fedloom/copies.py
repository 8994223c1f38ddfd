"""Copies of many tensors at once on a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

LARGE = 1 << 18
"""Numbers from which on a tensor is copied by a kernel of its own. Kernels that copy many tensors give each 65536
numbers to one processor of the GPU: right for small tensors, while a large one would keep few busy for long."""


def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, which may have another type."""
    pairs = list(zip(targets, sources, strict=True))
    if small := [pair for pair in pairs if pair[0].numel() < LARGE]:
        torch._foreach_copy_([target for target, _ in small], [source for _, source in small])
    for target, source in pairs:
        if target.numel() >= LARGE:
            target.copy_(source)
