"""Writing beside the training: what is to be written is copied first, and a thread of its own takes it from there."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from fedloom.cuda_streams import own_stream

SHARE_OF_MEMORY = 4
"""Copies take one part in so many of what is free on a GPU at most: training may want more of it meanwhile."""
MOST_ON_HOST = 1 << 30
"""Bytes that are copied on the host at most."""


class Abandoned(Exception):
    """Nobody wants the work any more."""


class Beside:
    """One piece of work at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._work: Future[None] | None = None
        self._unwanted = threading.Event()

    @property
    def busy(self) -> bool:
        return self._work is not None and not self._work.done()

    def begin(self, work: Callable[[], None], device: torch.device) -> None:
        """Do it from now on, in a stream of its own where `device` has streams."""

        def in_own_stream() -> None:
            with own_stream(device):
                work()

        self.settle()
        self._unwanted.clear()
        thread = ThreadPoolExecutor(1)
        self._work = thread.submit(in_own_stream)
        thread.shutdown(wait=False)

    def settle(self) -> None:
        """Wait for what was begun; raises what went wrong with it, once."""
        work = self._work
        if work is None:
            return
        try:
            work.result()
        finally:
            if work.done():  # else whoever waited was interrupted
                self._work = None

    def check(self) -> None:
        """For the work to call now and then: ends it if it was abandoned."""
        if self._unwanted.is_set():
            raise Abandoned

    def abandon(self) -> None:
        """Have what was begun end as soon as it can; `settle` then waits for that."""
        self._unwanted.set()


def copied(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Copies where the originals lie, done when this returns; None where there is not memory enough to spare."""
    wanted = Counter[torch.device]()
    for tensor in tensors:
        wanted[tensor.device] += tensor.numel() * tensor.itemsize
    if any(size > _to_spare(device) for device, size in wanted.items()):
        return None
    try:
        copies = [tensor.detach().clone() for tensor in tensors]
    except torch.OutOfMemoryError:
        return None
    for device in wanted:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return copies


def _to_spare(device: torch.device) -> int:
    """Bytes that copies may take."""
    if device.type != "cuda":
        return MOST_ON_HOST
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # such as the last copies' place
    return (free + idle) // SHARE_OF_MEMORY
