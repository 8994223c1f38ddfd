"""Explain out-of-memory errors, and on a GPU retry with fewer clients at once.

If the training of a client is out of memory, the CUDA engine continues with one slot fewer (engines/cuda/). Work of the
server cannot be repeated, because it may be half done. But a run that resumes from its last checkpoint gives the same
bits with any number of slots.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedloom.devices.cuda_runtime import free_cuda_memory, is_cuda_memory_error
from fedloom.engines.base import Engine
from fedloom.errors import InsufficientMemoryError
from fedloom.runs.callback import Callback
from fedloom.utils.formatting import format_plural

SERVER = "for the work of the server; use a smaller network, or a method or options that keep fewer models"


@contextmanager
def explain_out_of_memory(device: str, engine: Engine | None = None) -> Iterator[None]:
    """Raise an InsufficientMemoryError if `device` or this machine runs out of memory for the server in the block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_cuda_memory_error(error):
            place, other = device, ", or --device cpu"
        elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            place, other = "this machine", ""
        else:
            raise
        raise InsufficientMemoryError(
            f"{place} has not enough memory {SERVER}{other}.",
            concurrency=engine.concurrency if engine is not None and place == device else 1,
        ) from error


def retry_with_fewer_slots(attempt: Callable[[int | None], None], callbacks: Callback) -> None:
    """Call `attempt(None)` to start a run, and `attempt(slots)` to resume it with fewer slots if out of memory."""
    slots = None
    while True:
        try:
            attempt(slots)
        except InsufficientMemoryError as shortage:
            if shortage.concurrency < 2:
                raise
            before, slots = shortage.concurrency, shortage.concurrency // 2
        else:
            return
        # Outside the except clause, because the error keeps the GPU memory of the run alive.
        callbacks.on_message(
            f"the GPU has not enough memory for the work of the server beside {before} clients; the run continues from "
            f"the last checkpoint with {format_plural(slots, 'client')} at once, with the same result."
        )
        free_cuda_memory()
