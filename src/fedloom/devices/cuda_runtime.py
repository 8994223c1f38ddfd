"""CUDA streams, out-of-memory errors, copies of many tensors, cached memory."""

import gc
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedloom.core.rng import GLOBAL_RNG_LOCK

# CUDA reads these once, when it is first used. 32 queues to a GPU are the maximum: with the default of eight, streams
# wait for each other. Without a workspace of fixed size, matrix products of LSTMs are not deterministic.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

STREAMS_OF_A_PRIORITY = 32
"""torch hands out the same 32 streams of a priority in turn, and two slots must not share a stream."""

MOST_URGENT = 3
"""torch has priorities from 0 to this one."""

_lock = threading.Lock()
_spare: dict[tuple[int, int], list[torch.cuda.Stream]] = {}
_made: dict[tuple[int, int], int] = {}


class ExclusiveCudaStream:
    """A stream that nobody else uses until it is closed or garbage collected, as long as there are enough.

    A GPU prefers the work of a more urgent stream. `urgency` is 0 to MOST_URGENT. If all streams of this urgency are in
    use, the stream has the nearest one.
    """

    def __init__(self, device: torch.device, urgency: int = 0) -> None:
        with _lock:
            self.stream, spare = _find(device.index or 0, min(urgency, MOST_URGENT))
        self._give_back = weakref.finalize(self, spare.append, self.stream)

    def close(self) -> None:
        """Return the stream for use by others."""
        self._give_back()


def _find(index: int, urgency: int) -> tuple[torch.cuda.Stream, list[torch.cuda.Stream]]:
    """Return a stream, and the list to put it into when it is no longer used."""
    for level in sorted(range(MOST_URGENT + 1), key=lambda level: abs(level - urgency)):
        spare = _spare.setdefault((index, level), [])
        if spare:
            return spare.pop(), spare
        if _made.get((index, level), 0) < STREAMS_OF_A_PRIORITY:
            return _make(index, level), spare
    return _make(index, urgency), _spare[index, urgency]


def _make(index: int, urgency: int) -> torch.cuda.Stream:
    _made[index, urgency] = _made.get((index, urgency), 0) + 1
    return torch.cuda.Stream(torch.device("cuda", index), priority=-urgency)  # type: ignore[no-untyped-call]  # torch's


@contextmanager
def use_exclusive_stream(device: torch.device) -> Iterator[None]:
    """Let this thread use a stream of its own, so that it does not wait for the work of other threads."""
    if device.type != "cuda":
        yield
        return
    spare = ExclusiveCudaStream(device)
    try:
        with torch.cuda.stream(spare.stream):
            yield
            spare.stream.synchronize()
    finally:
        spare.close()


DEVICE_ERROR: Any = getattr(torch, "AcceleratorError", ())
"""The error of newer torch versions for a failure of the GPU itself; empty in older ones."""

MEMORY_ERROR_TEXTS = ("STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory")
"""Parts of the messages of libraries that are out of memory."""


def is_cuda_memory_error(error: BaseException) -> bool:
    """Return whether this is an out-of-memory error of torch, its libraries, Triton or CUDA."""
    if isinstance(error, DEVICE_ERROR):
        return "out of memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_ERROR_TEXTS)
    )


LARGE = 1 << 18
"""A tensor with at least so many elements is copied by a kernel of its own. A kernel for many tensors gives each 65536
elements to one processor of the GPU, which would use few processors for a large tensor."""


def cuda_foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, which may have another dtype."""
    pairs = list(zip(targets, sources, strict=True))
    if small := [pair for pair in pairs if pair[0].numel() < LARGE]:
        torch._foreach_copy_([target for target, _ in small], [source for _, source in small])
    for target, source in pairs:
        if target.numel() >= LARGE:
            target.copy_(source)


def empty_cuda_cache() -> None:
    """Release the memory that torch caches on GPUs."""
    with GLOBAL_RNG_LOCK:  # no graph is captured meanwhile
        torch.cuda.empty_cache()


def free_cuda_memory() -> None:
    """Collect garbage, then release the memory that torch caches on GPUs."""
    with GLOBAL_RNG_LOCK:  # no graph is captured meanwhile
        gc.collect()
    empty_cuda_cache()
