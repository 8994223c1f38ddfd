"""Recorded steps: what a GPU does over and over is recorded once and replayed.

A step of a small network is some sixty short kernels, and Python takes ten times as long to launch them as the GPU to
run them. A CUDA graph launches them all at once. It repeats them with the same addresses and the same host values, so
a recording is only replayed where these are the same: the key says so. Whatever cannot be recorded is done step by
step, with a note in the log; nothing is ever replayed wrongly.
"""

import logging
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

log = logging.getLogger("fedloom")

# As many queues to a GPU as there can be: with the usual eight, streams wait for each other. CUDA reads it once.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

PATIENCE = 200
"""Recordings that may be made before it is asked whether they are worth it."""


_spare_streams: dict[torch.device, list[torch.cuda.Stream]] = {}
_made_streams: dict[torch.device, int] = {}
STREAMS_OF_A_PRIORITY = 32
"""torch hands out the same 32 streams of a priority in turn; two slots in one stream would disturb each other."""


def _take_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else uses, as long as there are any."""
    if spare := _spare_streams.get(torch.device("cuda", device.index or 0)):
        return spare.pop()
    number = _made_streams.get(device, 0)
    _made_streams[device] = number + 1
    return torch.cuda.Stream(device, priority=-(number // STREAMS_OF_A_PRIORITY))  # type: ignore[no-untyped-call]


class Player(Protocol):
    """Whose steps are recorded."""

    def randomness(self) -> AbstractContextManager[None]:
        """The scope in which code draws this client's random numbers."""

    def listen(self) -> AbstractContextManager[set[str]]:
        """The names of the host values that are read inside."""

    def values(self, names: frozenset[str]) -> Hashable:
        """These host values now."""


class Quiet:
    """A player that draws nothing from global generators and reads no host value that changes."""

    @contextmanager
    def randomness(self) -> Iterator[None]:
        """Nothing is drawn."""
        yield

    @contextmanager
    def listen(self) -> Iterator[set[str]]:
        """Nothing is read."""
        yield set()

    def values(self, names: frozenset[str]) -> Hashable:
        """Nothing is read."""
        return ()


def make_tape(device: torch.device, generators: tuple[torch.Generator, ...] = ()) -> "Tape":
    """What records on this device; `generators` are those that steps draw from, beside the global ones."""
    return GraphTape(device, generators) if device.type == "cuda" else Tape()


class Tape:
    """Does every step as it is written. This is what a CPU gets, and tests of the engine."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.done = 0

    def stream(self) -> AbstractContextManager[object]:
        """Where the work goes."""
        return nullcontext()

    def play(self, kind: Hashable, key: Hashable, body: Callable[[], None], player: Player) -> None:
        """Do `body`: from the recording under `key`, or step by step. `kind` is the step, whatever its batch."""
        self.done += 1
        with player.randomness():
            body()

    def refuse(self, kind: Hashable, reason: str) -> None:
        """Never record this step."""

    def close(self) -> None:
        """Give back recordings and stream."""


class GraphTape(Tape):
    """Records steps as CUDA graphs, on a stream of its own."""

    def __init__(self, device: torch.device, generators: tuple[torch.Generator, ...]) -> None:
        super().__init__()
        self._stream = _take_stream(device)
        self._context = torch.cuda.stream(self._stream)  # made once: it is entered at every step
        self._pool = torch.cuda.graph_pool_handle()  # graphs of one slot never run at the same time: they share memory
        self._generators = generators
        self._warm: set[Hashable] = set()
        self._refused: set[Hashable] = set()
        self._reads: dict[Hashable, frozenset[str]] = {}
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def stream(self) -> AbstractContextManager[object]:
        return self._context

    def close(self) -> None:
        self._graphs.clear()
        self._reads.clear()
        _spare_streams.setdefault(self._stream.device, []).append(self._stream)

    def play(self, kind: Hashable, key: Hashable, body: Callable[[], None], player: Player) -> None:
        names = self._reads.get(key)
        graph = self._graphs.get((key, player.values(names))) if names is not None else None
        if graph is not None:
            self.replayed += 1
            graph.replay()
        elif kind in self._refused or not self._is_warm(key if torch.backends.cudnn.benchmark else kind):
            super().play(kind, key, body, player)
        elif self.recorded >= PATIENCE and self.replayed + self.done < 4 * self.recorded:
            self.refuse(kind, "it changes from client to client")
            super().play(kind, key, body, player)
        else:
            self._record(kind, key, body, player)

    def _is_warm(self, what: Hashable) -> bool:
        """Libraries set themselves up in the first step, or try out algorithms, which must not be recorded."""
        warm = what in self._warm
        self._warm.add(what)
        return warm

    def _record(self, kind: Hashable, key: Hashable, body: Callable[[], None], player: Player) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with player.randomness(), player.listen() as reads:
                for generator in self._generators:
                    graph.register_generator_state(generator)
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    body()
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a step does that cannot be recorded can still be done
            self.refuse(kind, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            super().play(kind, key, body, player)
            return
        if "steps" in reads:
            self.refuse(kind, "it asks how many steps were taken, which every step changes")
            super().play(kind, key, body, player)
            return
        self.recorded += 1
        # What a step reads may depend on what it read first, so later recordings under this key read these too.
        names = self._reads[key] = self._reads.get(key, frozenset()) | reads
        self._graphs[key, player.values(names)] = graph
        graph.replay()

    def refuse(self, kind: Hashable, reason: str) -> None:
        self._refused.add(kind)
        step = kind[0] if isinstance(kind, tuple) else kind
        name = getattr(step, "__qualname__", step)
        log.warning("the step %s is not recorded but done anew each time: %s", name, reason)
