"""Recorded steps: what a GPU does over and over is recorded once and replayed.

A step of a small network is some sixty short kernels, and Python takes ten times as long to launch them as the GPU to
run them. A CUDA graph launches them all at once. It repeats them with the same addresses and the same host values, so
a recording is only replayed where these are the same: the key says so. Whatever cannot be recorded is done step by
step, with a note in the log; nothing is ever replayed wrongly. To be sure of that, the first replay of each kind of
step is held against the step done as it is written; with FEDLOOM_CHECK_REPLAYS=1 the first replay of every recording
is, to the last bit.
"""

import gc
import logging
import os
import random
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedloom.core.rng import GLOBAL_RNG_LOCK
from fedloom.devices.cuda_runtime import ExclusiveCudaStream, is_out_of_memory_error
from fedloom.devices.precision import allows_autotune, set_autotune

log = logging.getLogger("fedloom")

PATIENCE = 200
"""Recordings that may be made before it is asked whether they are worth it."""

MAX_GRAPHS = 512
"""Those a slot keeps. A number that changes from round to round makes new ones for ever, and each takes memory."""

CHECK_ALL = os.environ.get("FEDLOOM_CHECK_REPLAYS", "") not in ("", "0")
"""Whether the first replay of every recording is checked, and every bit of it."""

TOLERANCE = 0.05
"""How far the change that a replay makes may be from the one that the step makes, as a share of it. Rounding is far
below this, and another learning rate or an older random number far above."""


class _GraphOwner(Protocol):
    """Whose steps are recorded."""

    def randomness(self) -> AbstractContextManager[None]:
        """The scope in which code draws this client's random numbers."""

    def listen(self) -> AbstractContextManager[set[str]]:
        """The names of the host values that are read inside."""

    def values(self, names: frozenset[str]) -> Hashable:
        """These host values now."""

    def memory(self) -> Sequence[Tensor]:
        """Everything that a step may change."""


class StaticGraphOwner:
    """A player that draws nothing from global generators and reads no host value that changes."""

    @contextmanager
    def randomness(self) -> Iterator[None]:
        """Nothing is drawn; but a recording takes note of the global generators, which are others' meanwhile."""
        with GLOBAL_RNG_LOCK:
            yield

    @contextmanager
    def listen(self) -> Iterator[set[str]]:
        """Nothing is read."""
        yield set()

    def values(self, names: frozenset[str]) -> Hashable:
        """Nothing is read."""
        return ()


class _CapturedGraph(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Do it again."""


def make_graph_runner(
    device: torch.device, generators: tuple[torch.Generator, ...] = (), urgency: int = 0
) -> "EagerRunner":
    """What records on this device; `generators` are those that steps draw from, beside the global ones."""
    return _CudaGraphRunner(device, generators, urgency) if device.type == "cuda" else EagerRunner()


class EagerRunner:
    """Does every step as it is written. This is what a CPU gets, and tests of the engine."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.done = 0

    def stream(self) -> AbstractContextManager[object]:
        """Where the work goes."""
        return nullcontext()

    def play(
        self, kind: Hashable, key: Hashable, body: Callable[[], None], player: _GraphOwner, *, whole: bool = True
    ) -> None:
        """Do `body`: from the recording under `key`, or step by step. `kind` is the step, whatever its batch.

        `whole` says that it does all that such a step can do: if not, others are not recorded right after it.
        """
        self.done += 1
        with player.randomness():
            body()

    def refuse(self, kind: Hashable, reason: str) -> None:
        """Never record this step."""

    def may_record(self, kind: Hashable) -> bool:
        """Whether this step was not refused."""
        return True

    def cool_down(self) -> None:
        """Libraries may have to set themselves up again, so do each kind of step once before more are recorded."""

    def wait(self) -> None:
        """Wait for all that was played."""

    def close(self) -> None:
        """Give back recordings and stream."""


class StepKinds(set[Hashable]):
    """Kinds of steps. A step may be made for each client: from time to time those that are gone are forgotten."""

    def add(self, kind: Hashable) -> None:
        if len(self) % MAX_GRAPHS == MAX_GRAPHS - 1:
            self.difference_update([one for one in self if getattr(one, "gone", False)])
        super().add(kind)


class GraphRunner(EagerRunner):
    """Records steps and replays them; how a recording is made is said by `capture`."""

    def __init__(self, generators: tuple[torch.Generator, ...] = ()) -> None:
        super().__init__()
        self._generators = generators
        self._warm, self._refused, self._checked = StepKinds(), StepKinds(), StepKinds()
        self._short = StepKinds()
        """Kinds in whose recording a library found no memory."""
        self._told: set[tuple[str, str]] = set()
        self._reads: dict[Hashable, frozenset[str]] = {}
        self._recordings: dict[Hashable, _CapturedGraph] = {}

    @abstractmethod
    def capture(self, body: Callable[[], None], player: _GraphOwner) -> _CapturedGraph:
        """A recording of `body`, which is not carried out meanwhile."""

    def close(self) -> None:
        self._recordings.clear()
        self._reads.clear()

    def play(
        self, kind: Hashable, key: Hashable, body: Callable[[], None], player: _GraphOwner, *, whole: bool = True
    ) -> None:
        names = self._reads.get(key)
        full = (key, player.values(names)) if names is not None else None
        recording = self._recordings.get(full) if kind not in self._refused else None
        if recording is not None:
            self.replayed += 1
            which = full if CHECK_ALL else kind
            if which in self._checked:
                recording.replay()
            else:
                self._check(kind, recording, body, player)
                self._checked.add(which)  # not before: it may have found no memory
        elif kind in self._refused or not self._is_warm(key if allows_autotune() else kind, whole):
            super().play(kind, key, body, player)
        elif self.recorded >= PATIENCE and self.replayed + self.done < 4 * self.recorded:
            self.refuse(kind, "it changes from client to client")
            super().play(kind, key, body, player)
        else:
            self._record(kind, key, body, player)

    def _is_warm(self, what: Hashable, whole: bool) -> bool:
        """Libraries set themselves up in the first step, or try out algorithms, which must not be recorded."""
        warm = what in self._warm
        if whole:
            self._warm.add(what)
        return warm

    def _record(self, kind: Hashable, key: Hashable, body: Callable[[], None], player: _GraphOwner) -> None:
        states = [generator.get_state() for generator in self._generators]
        failure: BaseException | None = None
        try:
            with player.randomness(), player.listen() as reads, _HostDraws() as draws:
                recording = self.capture(body, player)
        except Exception as error:  # whatever a step does that cannot be recorded can still be done
            self.mend(states)
            # The end of a recording may have failed only because there was no memory before.
            failure = error if isinstance(error, torch.OutOfMemoryError) else _first_cause(error)
            failure.with_traceback(None)  # which holds what was recorded, and its memory
        if isinstance(failure, torch.OutOfMemoryError):
            raise failure  # not within that clause: the error at the end holds it too
        if failure is not None:
            if is_out_of_memory_error(failure) and kind not in self._short:
                self._short.add(kind)  # a library's: if it was not setting itself up, the step as it is written says so
            else:
                self.refuse(kind, f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}")
            super().play(kind, key, body, player)
            return
        changing = "it asks how many steps were taken, which every step changes" if "steps" in reads else None
        if draws.happened:
            changing = "it draws random numbers on the host"
        if changing is not None:
            self.refuse(kind, changing)
            super().play(kind, key, body, player)
            return
        self.recorded += 1
        # What a step reads may depend on what it read first, so later recordings under this key read these too.
        names = self._reads[key] = self._reads.get(key, frozenset()) | reads
        if len(self._recordings) >= MAX_GRAPHS:
            self.wait()  # it may be being played
            del self._recordings[next(iter(self._recordings))]  # the oldest
        self._recordings[key, player.values(names)] = recording
        recording.replay()

    def cool_down(self) -> None:
        self._warm.clear()

    def mend(self, states: Sequence[Tensor]) -> None:
        """After a recording that failed: let the generators be as they were before it."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _check(self, kind: Hashable, recording: _CapturedGraph, body: Callable[[], None], player: _GraphOwner) -> None:
        """Replay a step, take it back, do it as it is written, and hold the two against each other."""
        memory, states = player.memory(), [generator.get_state() for generator in self._generators]
        before = [tensor.detach().clone() for tensor in memory]
        recording.replay()
        replayed = [tensor.detach().clone() for tensor in memory]
        with torch.no_grad():
            for tensor, old in zip(memory, before, strict=True):
                tensor.copy_(old)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        super().play(kind, None, body, player)
        away = max((_distance(*three) for three in zip(before, replayed, memory, strict=True)), default=0.0)
        if away > TOLERANCE:
            self.refuse(kind, "its replay does something else")
        elif away and CHECK_ALL:
            log.warning("a replay of the step %s differs from it by %.1e of what it does", _name(kind), away)

    def may_record(self, kind: Hashable) -> bool:
        return kind not in self._refused

    def refuse(self, kind: Hashable, reason: str) -> None:
        self._refused.add(kind)
        told = _name(kind), reason
        if told not in self._told:  # a step that is made for each client would be told for each
            self._told.add(told)
            log.warning("the step %s is not recorded but done anew each time: %s", *told)


class _CudaGraphRunner(GraphRunner):
    """Records steps as CUDA graphs, on a stream of its own."""

    def __init__(self, device: torch.device, generators: tuple[torch.Generator, ...], urgency: int) -> None:
        super().__init__(generators)
        self._device = device
        self._spare = ExclusiveCudaStream(device, urgency)
        self._context = torch.cuda.stream(self._spare.stream)  # made once: it is entered at every step
        self._pool = torch.cuda.graph_pool_handle()  # graphs of one slot never run at the same time: they share memory

    def stream(self) -> AbstractContextManager[object]:
        return self._context

    def wait(self) -> None:
        self._spare.stream.synchronize()

    def close(self) -> None:
        self.wait()  # graphs that are being played must not lose their memory
        super().close()
        self._spare.close()

    def capture(self, body: Callable[[], None], player: _GraphOwner) -> _CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        set_autotune(False)  # trying out cannot be recorded; a step that was tried out before says so
        with _without_collection():
            # Other threads may do as they like meanwhile; and going backward, autograd works in a thread of its own.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        return graph

    def mend(self, states: Sequence[Tensor]) -> None:
        # A generator whose capture did not end believes for ever that it is being recorded, and so does the pool. Other
        # recordings draw from the generators' old states, so they are made anew.
        self._pool = torch.cuda.graph_pool_handle()
        self.wait()
        self._recordings.clear()
        self._reads.clear()
        for generator, state in zip(self._generators, states, strict=True):
            fresh = torch.Generator(self._device)
            fresh.set_state(state)
            generator.graphsafe_set_state(fresh)


class _HostDraws:
    """Whether somebody inside draws from a global generator of the host; it is as if nobody had."""

    def __enter__(self) -> "_HostDraws":
        self._before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - others' draws
        return self

    def __exit__(self, *_: object) -> None:
        python, legacy, ours = self._before
        now = np.random.get_state()  # noqa: NPY002
        same = [np.array_equal(a, b) for a, b in zip(now, legacy, strict=True)]
        self.happened = random.getstate() != python or not all(same) or not torch.equal(torch.get_rng_state(), ours)
        if self.happened:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
            torch.set_rng_state(ours)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Nothing is collected inside: what is freed then may wait for the GPU, which no recording survives."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _distance(before: Tensor, ours: Tensor, theirs: Tensor) -> float:
    """How far two outcomes are apart, as a share of what changed; 0 where every bit is the same."""
    ours, theirs = ours.detach(), theirs.detach()
    if torch.equal(ours, theirs):
        return 0.0
    if not ours.is_floating_point():
        return float("inf")
    a, b, start = (tensor.double().nan_to_num() for tensor in (ours, theirs, before))
    if not torch.equal(ours.isnan(), theirs.isnan()):
        return float("inf")
    apart, change, size = (float(torch.linalg.vector_norm(v)) for v in (a - b, b - start, b))
    return apart / max(change, 1e-5 * size, 1e-30)


def _first_cause(error: BaseException) -> BaseException:
    """What went wrong first: the end of a recording only says that something did."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _name(kind: Hashable) -> str:
    step = kind[0] if isinstance(kind, tuple) else kind
    return str(getattr(step, "__qualname__", step))
