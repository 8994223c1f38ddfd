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

_lock = threading.Lock()
_spare: dict[int, list[torch.cuda.Stream]] = {}
_made: dict[int, int] = {}


class SpareStream:
    """A stream that nobody else uses, as long as there are any, until it is closed or forgotten."""

    def __init__(self, device: torch.device) -> None:
        index = device.index or 0
        with _lock:
            spare = _spare.setdefault(index, [])
            self.stream = spare.pop() if spare else _make(index)
        self._give_back = weakref.finalize(self, spare.append, self.stream)

    def close(self) -> None:
        """Leave the stream to others."""
        self._give_back()


def _make(index: int) -> torch.cuda.Stream:
    number = _made[index] = _made.get(index, 0) + 1
    priority = -((number - 1) // STREAMS_OF_A_PRIORITY)
    return torch.cuda.Stream(torch.device("cuda", index), priority=priority)  # type: ignore[no-untyped-call]  # torch's


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
