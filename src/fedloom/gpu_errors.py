"""What goes wrong on a GPU, and how it is said."""

from typing import Any

import torch

CHIP_ERROR: Any = getattr(torch, "AcceleratorError", ())
"""What newer versions of torch raise when a GPU itself fails; none in older ones."""

SHORT_OF_MEMORY = ("STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory")
"""What libraries say when there is no memory."""


def is_short_of_memory(error: BaseException) -> bool:
    """Whether there was no memory: torch, its libraries, Triton and CUDA itself each have their own way to say so."""
    if isinstance(error, CHIP_ERROR):
        return "out of memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in SHORT_OF_MEMORY)
    )
