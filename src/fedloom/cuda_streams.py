"""Streams of a GPU that nobody else uses."""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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


class SpareStream:
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
def own_stream(device: torch.device) -> Iterator[None]:
    """Let this thread work in a stream of its own, so that it does not wait for what other threads asked for."""
    if device.type != "cuda":
        yield
        return
    spare = SpareStream(device)
    try:
        with torch.cuda.stream(spare.stream):
            yield
            spare.stream.synchronize()
    finally:
        spare.close()
