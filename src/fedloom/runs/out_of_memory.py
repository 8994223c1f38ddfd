"""Where memory ends: in a sentence, and on a GPU with fewer clients at once where that may help.

A client's training that finds no memory costs a slot and nothing else (engines/cuda.py). What the server does cannot be
done again, for it may have come half way; but a run that goes on from its last checkpoint has the same bits, whatever
the number of slots.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedloom.devices.cuda_runtime import free_unused_memory, is_out_of_memory_error
from fedloom.engines.base import Engine
from fedloom.errors import InsufficientMemoryError
from fedloom.runs.callback import Callback
from fedloom.utils.formatting import format_plural

SERVER = "for the work of the server; use a smaller network, or a method or options that keep fewer models"


@contextmanager
def explain_out_of_memory(device: str, engine: Engine | None = None, what: str = SERVER) -> Iterator[None]:
    """Say so in a sentence where `device` or this machine has no memory for `what` is done inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory_error(error):
            place, other = device, ", or --device cpu"
        elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            place, other = "this machine", ""
        else:
            raise
        raise InsufficientMemoryError(
            f"{place} has not enough memory {what}{other}.",
            at_once=engine.at_once if engine is not None and place == device else 1,
        ) from error


def retry_with_fewer_slots(attempt: Callable[[int | None], None], watcher: Callback) -> None:
    """Carry a run through. `attempt` plays it: at first with None, and from its last checkpoint with so many slots."""
    slots = None
    while True:
        try:
            attempt(slots)
        except InsufficientMemoryError as shortage:
            if shortage.at_once < 2:
                raise
            before, slots = shortage.at_once, shortage.at_once // 2
        else:
            return
        # Not within that clause: as long as the error is there, so is all that the run had on the GPU.
        watcher.note(
            f"the GPU has not enough memory for the work of the server beside {before} clients; going on from the last "
            f"checkpoint with {format_plural(slots, 'client')} at once, which changes nothing else."
        )
        free_unused_memory()
