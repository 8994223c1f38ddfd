"""Streams of a GPU that nobody else uses.

What goes wrong on a GPU, and how it is said.
"""

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

# CUDA reads these once, when it is first used. As many queues to a GPU as there can be: with the usual eight, streams
# wait for each other. And a workspace of fixed size, without which products of LSTMs may differ from time to time.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

STREAMS_OF_A_PRIORITY = 32
"""torch hands out the same 32 streams of a priority in turn; two slots in one stream would disturb each other."""

MOST_URGENT = 3
"""torch knows these priorities, from 0 on."""

_lock = threading.Lock()
_spare: dict[tuple[int, int], list[torch.cuda.Stream]] = {}
_made: dict[tuple[int, int], int] = {}


class ExclusiveCudaStream:
    """A stream that nobody else uses, as long as there are any, until it is closed or forgotten.

    Where the GPU has to choose, it takes the work of a more urgent stream first, from 0 to MOST_URGENT. Where all
    streams of that urgency are in use it is one of the next.
    """

    def __init__(self, device: torch.device, urgency: int = 0) -> None:
        with _lock:
            self.stream, spare = _find(device.index or 0, min(urgency, MOST_URGENT))
        self._give_back = weakref.finalize(self, spare.append, self.stream)

    def close(self) -> None:
        """Leave the stream to others."""
        self._give_back()


def _find(index: int, urgency: int) -> tuple[torch.cuda.Stream, list[torch.cuda.Stream]]:
    """A stream, and where to put it when it is no longer used."""
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
    """Let this thread work in a stream of its own, so that it does not wait for what other threads asked for."""
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
"""What newer versions of torch raise when a GPU itself fails; none in older ones."""

SHORT_OF_MEMORY = ("STATUS_ALLOC_FAILED", "Triton Error [CUDA]: out of memory")
"""What libraries say when there is no memory."""


def is_out_of_memory_error(error: BaseException) -> bool:
    """Whether there was no memory: torch, its libraries, Triton and CUDA itself each have their own way to say so."""
    if isinstance(error, DEVICE_ERROR):
        return "out of memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in SHORT_OF_MEMORY)
    )


LARGE = 1 << 18
"""Numbers from which on a tensor is copied by a kernel of its own. Kernels that copy many tensors give each 65536
numbers to one processor of the GPU: right for small tensors, while a large one would keep few busy for long."""


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, which may have another type."""
    pairs = list(zip(targets, sources, strict=True))
    if small := [pair for pair in pairs if pair[0].numel() < LARGE]:
        torch._foreach_copy_([target for target, _ in small], [source for _, source in small])
    for target, source in pairs:
        if target.numel() >= LARGE:
            target.copy_(source)


def empty_cuda_cache() -> None:
    """Let others have memory that is kept for later."""
    with GLOBAL_RNG_LOCK:  # nobody records meanwhile
        torch.cuda.empty_cache()


def free_unused_memory() -> None:
    """Let others have the memory of what is no longer used."""
    with GLOBAL_RNG_LOCK:  # nobody records meanwhile
        gc.collect()
    empty_cuda_cache()
