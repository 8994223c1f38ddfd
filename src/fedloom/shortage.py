"""Where memory ends: in a sentence, and on a GPU with fewer clients at once where that may help.

A client's training that finds no memory costs a slot and nothing else (engines/cuda.py). What the server does cannot be
done again, for it may have come half way; but a run that goes on from its last checkpoint has the same bits, whatever
the number of slots.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fedloom.engines.base import Engine
from fedloom.engines.gpu import give_back
from fedloom.errors import ShortOfMemory
from fedloom.gpu_errors import is_short_of_memory
from fedloom.report.words import plural
from fedloom.streams import GLOBAL_STATE
from fedloom.watching import Watcher

SERVER = "for the work of the server; use a smaller network, or a method or options that keep fewer models"


@contextmanager
def told_in_a_sentence(device: str, engine: Engine | None = None, what: str = SERVER) -> Iterator[None]:
    """Say so in a sentence where `device` or this machine has no memory for `what` is done inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_short_of_memory(error):
            place, other = device, ", or --device cpu"
        elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            place, other = "this machine", ""
        else:
            raise
        raise ShortOfMemory(
            f"{place} has not enough memory {what}{other}.",
            at_once=engine.at_once if engine is not None and place == device else 1,
        ) from error


def persevere(attempt: Callable[[int | None], None], watcher: Watcher) -> None:
    """Carry a run through. `attempt` plays it: at first with None, and from its last checkpoint with so many slots."""
    slots = None
    while True:
        try:
            attempt(slots)
        except ShortOfMemory as shortage:
            if shortage.at_once < 2:
                raise
            before, slots = shortage.at_once, shortage.at_once // 2
        else:
            return
        # Not within that clause: as long as the error is there, so is all that the run had on the GPU.
        watcher.note(
            f"the GPU has not enough memory for the work of the server beside {before} clients; going on from the last "
            f"checkpoint with {plural(slots, 'client')} at once, which changes nothing else."
        )
        release()


def release() -> None:
    """Let others have the memory of what is no longer used."""
    with GLOBAL_STATE:  # nobody records meanwhile
        gc.collect()
    give_back()
