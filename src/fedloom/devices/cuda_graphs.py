"""Capture steps as CUDA graphs, replay them, and check the first replays.

A step of a small network is some sixty short kernels, and Python takes longer to launch them than the GPU to run them.
A CUDA graph launches them all at once. It repeats the same addresses and host values, so a graph is replayed only if
these are the same, as its key says. A step that cannot be captured runs eagerly, with a note in the log. The first
replay of each kind of step is compared with the step run eagerly. With FEDLOOM_CHECK_REPLAYS=1 the first replay of
every graph is compared, and every bit counts.
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
from fedloom.devices.cuda_runtime import ExclusiveCudaStream, is_cuda_memory_error
from fedloom.devices.precision import allows_autotune, set_autotune

log = logging.getLogger("fedloom")

PATIENCE = 200
"""Graphs captured before the runner checks whether capturing a step pays off."""

MAX_GRAPHS = 512
"""Graphs that a slot keeps. A value that changes every round creates new ones forever, and each takes memory."""

CHECK_ALL = os.environ.get("FEDLOOM_CHECK_REPLAYS", "") not in ("", "0")
"""Whether to check the first replay of every graph, and report any different bit."""

TOLERANCE = 0.05
"""Largest relative difference between the change by a replay and by the eager step. Rounding is far below it. A wrong
learning rate or an old random number is far above."""


class _GraphOwner(Protocol):
    """The owner of captured steps: its random numbers, host values and tensors."""

    def rng_scope(self) -> AbstractContextManager[None]:
        """Return a scope in which global generators draw this client's random numbers."""

    def listen(self) -> AbstractContextManager[set[str]]:
        """Return a scope that collects the names of the host values read inside."""

    def values(self, names: frozenset[str]) -> Hashable:
        """Return the present values of these names."""

    def memory(self) -> Sequence[Tensor]:
        """Return all tensors that a step may change."""


class StaticGraphOwner:
    """The owner of a graph that draws no random numbers and reads no host value that changes."""

    @contextmanager
    def rng_scope(self) -> Iterator[None]:
        """Hold the lock of the global generators: capture reads their state, and other threads change it."""
        with GLOBAL_RNG_LOCK:
            yield

    @contextmanager
    def listen(self) -> Iterator[set[str]]:
        """Yield an empty set: no host value is read."""
        yield set()

    def values(self, names: frozenset[str]) -> Hashable:
        """Return no values: no host value is read."""
        return ()


class _CapturedGraph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Run the captured kernels again."""


def make_graph_runner(
    device: torch.device, generators: tuple[torch.Generator, ...] = (), urgency: int = 0
) -> "EagerRunner":
    """Return the runner for this device. Steps draw from `generators` and from the global ones."""
    return _CudaGraphRunner(device, generators, urgency) if device.type == "cuda" else EagerRunner()


class EagerRunner:
    """Run every step eagerly, on a CPU and in tests of the engine."""

    def __init__(self) -> None:
        self.captured = self.replayed = self.done = 0

    def stream(self) -> AbstractContextManager[object]:
        """Return a scope in which work is enqueued in this runner's stream."""
        return nullcontext()

    def run(
        self, kind: Hashable, key: Hashable, body: Callable[[], None], owner: _GraphOwner, *, whole: bool = True
    ) -> None:
        """Run `body`: replay the graph for `key`, or run eagerly.

        `kind` identifies the step, whatever its batch. `whole` is False if the body leaves out a part of what such a
        step does. Then it does not count as a warm-up, and no graph is captured right after it.
        """
        self.done += 1
        with owner.rng_scope():
            body()

    def refuse(self, kind: Hashable, reason: str) -> None:
        """Never capture this kind of step."""

    def can_capture(self, kind: Hashable) -> bool:
        """Return whether this kind of step was not refused."""
        return True

    def reset_warmup(self) -> None:
        """Run each kind of step eagerly once before the next capture: libraries may have to initialize again."""

    def wait(self) -> None:
        """Wait until all enqueued work is done."""

    def close(self) -> None:
        """Release the graphs and the stream."""


class GraphStepKinds(set[Hashable]):
    """A set of kinds of steps. Methods may create steps per client, so collected ones are removed now and then."""

    def add(self, kind: Hashable) -> None:
        if len(self) % MAX_GRAPHS == MAX_GRAPHS - 1:
            self.difference_update([one for one in self if getattr(one, "gone", False)])
        super().add(kind)


class GraphRunner(EagerRunner):
    """Capture steps and replay them. Subclasses define `capture`."""

    def __init__(self, generators: tuple[torch.Generator, ...] = ()) -> None:
        super().__init__()
        self._generators = generators
        self._warm, self._refused, self._checked = GraphStepKinds(), GraphStepKinds(), GraphStepKinds()
        self._short = GraphStepKinds()
        """Kinds of steps whose capture failed because a library was out of memory."""
        self._told: set[tuple[str, str]] = set()
        self._reads: dict[Hashable, frozenset[str]] = {}
        self._graphs: dict[Hashable, _CapturedGraph] = {}

    @abstractmethod
    def capture(self, body: Callable[[], None], owner: _GraphOwner) -> _CapturedGraph:
        """Capture `body` without running it."""

    def close(self) -> None:
        self._graphs.clear()
        self._reads.clear()

    def run(
        self, kind: Hashable, key: Hashable, body: Callable[[], None], owner: _GraphOwner, *, whole: bool = True
    ) -> None:
        names = self._reads.get(key)
        full = (key, owner.values(names)) if names is not None else None
        graph = self._graphs.get(full) if kind not in self._refused else None
        if graph is not None:
            self.replayed += 1
            which = full if CHECK_ALL else kind
            if which in self._checked:
                graph.replay()
            else:
                self._check(kind, graph, body, owner)
                self._checked.add(which)  # not before: the check may run out of memory
        elif kind in self._refused or not self._is_warm(key if allows_autotune() else kind, whole):
            super().run(kind, key, body, owner)
        elif self.captured >= PATIENCE and self.replayed + self.done < 4 * self.captured:
            self.refuse(kind, "it changes from client to client")
            super().run(kind, key, body, owner)
        else:
            self._capture_and_replay(kind, key, body, owner)

    def _is_warm(self, what: Hashable, whole: bool) -> bool:
        """Return whether libraries are initialized, and algorithms benchmarked: neither can be captured."""
        warm = what in self._warm
        if whole:
            self._warm.add(what)
        return warm

    def _capture_and_replay(self, kind: Hashable, key: Hashable, body: Callable[[], None], owner: _GraphOwner) -> None:
        states = [generator.get_state() for generator in self._generators]
        failure: BaseException | None = None
        try:
            with owner.rng_scope(), owner.listen() as reads, _HostDraws() as draws:
                graph = self.capture(body, owner)
        except Exception as error:  # a step that cannot be captured can still run eagerly
            self.mend(states)
            # The end of a capture may have failed only because memory ran out before.
            failure = error if isinstance(error, torch.OutOfMemoryError) else _first_cause(error)
            failure.with_traceback(None)  # it holds the captured tensors and their memory
        if isinstance(failure, torch.OutOfMemoryError):
            raise failure  # outside the except clause, where a later error would hold it as its context
        if failure is not None:
            if is_cuda_memory_error(failure) and kind not in self._short:
                self._short.add(kind)  # a library's own memory: the eager step shows whether it lasts
            else:
                self.refuse(kind, f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}")
            super().run(kind, key, body, owner)
            return
        changing = "it asks how many steps were taken, which every step changes" if "steps" in reads else None
        if draws.happened:
            changing = "it draws random numbers on the host"
        if changing is not None:
            self.refuse(kind, changing)
            super().run(kind, key, body, owner)
            return
        self.captured += 1
        # What a step reads may depend on what it read first, so later graphs under this key compare these names too.
        names = self._reads[key] = self._reads.get(key, frozenset()) | reads
        if len(self._graphs) >= MAX_GRAPHS:
            self.wait()  # it may be running
            del self._graphs[next(iter(self._graphs))]  # the oldest
        self._graphs[key, owner.values(names)] = graph
        graph.replay()

    def reset_warmup(self) -> None:
        self._warm.clear()

    def mend(self, states: Sequence[Tensor]) -> None:
        """Restore the generators after a failed capture."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _check(self, kind: Hashable, graph: _CapturedGraph, body: Callable[[], None], owner: _GraphOwner) -> None:
        """Replay a graph, undo it, run the step eagerly, and compare the results."""
        memory, states = owner.memory(), [generator.get_state() for generator in self._generators]
        before = [tensor.detach().clone() for tensor in memory]
        graph.replay()
        replayed = [tensor.detach().clone() for tensor in memory]
        with torch.no_grad():
            for tensor, old in zip(memory, before, strict=True):
                tensor.copy_(old)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        super().run(kind, None, body, owner)
        away = max((_distance(*three) for three in zip(before, replayed, memory, strict=True)), default=0.0)
        if away > TOLERANCE:
            self.refuse(kind, "its replay does something else")
        elif away and CHECK_ALL:
            log.warning("a replay of the step %s differs from it by %.1e of what it does", _name(kind), away)

    def can_capture(self, kind: Hashable) -> bool:
        return kind not in self._refused

    def refuse(self, kind: Hashable, reason: str) -> None:
        self._refused.add(kind)
        told = _name(kind), reason
        if told not in self._told:  # one note for a step that is created per client
            self._told.add(told)
            log.warning("the step %s is not captured and runs eagerly each time: %s", *told)


class _CudaGraphRunner(GraphRunner):
    """Capture steps as CUDA graphs, on a stream of its own."""

    def __init__(self, device: torch.device, generators: tuple[torch.Generator, ...], urgency: int) -> None:
        super().__init__(generators)
        self._device = device
        self._spare = ExclusiveCudaStream(device, urgency)
        self._context = torch.cuda.stream(self._spare.stream)  # created once, as every step enters it
        self._pool = torch.cuda.graph_pool_handle()  # graphs of a slot never run at the same time, so they share memory

    def stream(self) -> AbstractContextManager[object]:
        return self._context

    def wait(self) -> None:
        self._spare.stream.synchronize()

    def close(self) -> None:
        self.wait()  # running graphs must not lose their memory
        super().close()
        self._spare.close()

    def capture(self, body: Callable[[], None], owner: _GraphOwner) -> _CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        set_autotune(False)  # a benchmark cannot be captured; the eager step has done it
        with _without_collection():
            # Other threads may use CUDA meanwhile, and autograd runs the backward pass in a thread of its own.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        return graph

    def mend(self, states: Sequence[Tensor]) -> None:
        # A generator whose capture did not end stays in capture mode forever, and so does the pool. The other graphs
        # draw from the old state of the generators, so they are captured again.
        self._pool = torch.cuda.graph_pool_handle()
        self.wait()
        self._graphs.clear()
        self._reads.clear()
        for generator, state in zip(self._generators, states, strict=True):
            fresh = torch.Generator(self._device)
            fresh.set_state(state)
            generator.graphsafe_set_state(fresh)


class _HostDraws:
    """Detect draws from global generators of the host inside, and undo them."""

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
    """Disable garbage collection inside: freeing memory may wait for the GPU, which breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _distance(before: Tensor, ours: Tensor, theirs: Tensor) -> float:
    """Return the difference of two results relative to the change; 0 if every bit is the same."""
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
    """Return the first error: the end of a capture only says that there was one."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _name(kind: Hashable) -> str:
    step = kind[0] if isinstance(kind, tuple) else kind
    return str(getattr(step, "__qualname__", step))
