"""Tests of captured graphs: when they are replayed, and how errors are detected."""

import gc
import logging
import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from fedloom.devices import cuda_graphs, cuda_runtime
from fedloom.devices.cuda_graphs import EagerRunner, StaticGraphOwner, _GraphOwner
from tests.support.fake_graphs import FakeGraphTape, Operations


class Counter(StaticGraphOwner):
    """A owner with one tensor, and a number on the host that nobody watches."""

    def __init__(self) -> None:
        self.total = torch.zeros(3)
        self.noise = torch.Generator()
        self.step = 1.0

    def memory(self) -> list[Tensor]:
        return [self.total]

    def add_one(self) -> None:
        self.total.add_(1.0)

    def add_step(self) -> None:
        self.total.add_(self.step)
        self.step += 1

    def add_noise(self) -> None:
        self.total.add_(torch.rand(3, generator=self.noise))


def run(tape: EagerRunner, body: Callable[[], None], owner: Counter, times: int, kind: Hashable = "k") -> None:
    for _ in range(times):
        tape.run(kind, "key", body, owner)


def test_a_step_is_done_then_recorded_then_replayed() -> None:
    owner, tape = Counter(), FakeGraphTape()
    run(tape, owner.add_one, owner, 5)
    assert owner.total.tolist() == [5.0, 5.0, 5.0]
    assert (tape.captured, tape.replayed) == (1, 3)
    assert tape.done == 2, "the first, and the one that the first replay was held against"


def test_nothing_is_recorded_before_a_whole_step_was_done() -> None:
    """Norms rest for a single sample: what they will need is not there yet."""
    owner, tape = Counter(), FakeGraphTape()
    for _ in range(3):
        tape.run("k", "one sample", owner.add_one, owner, whole=False)
    assert (tape.done, tape.captured) == (3, 0)
    run(tape, owner.add_one, owner, 2)
    assert (tape.done, tape.captured) == (4, 1)
    tape.run("k", "one sample", owner.add_one, owner, whole=False)
    assert (tape.done, tape.captured) == (4, 2)
    assert owner.total.tolist() == [6.0] * 3


def test_a_replay_that_does_something_else_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    owner, tape = Counter(), FakeGraphTape()
    with caplog.at_level(logging.WARNING, "fedloom"):
        run(tape, owner.add_step, owner, 2)
        owner.step = 2.0 + 1  # recording it has counted too, as it would on a GPU
        run(tape, owner.add_step, owner, 4)
    assert "its replay does something else" in caplog.text
    expected = 1.0 + 2 + 3 + 4 + 5 + 6
    assert owner.total.tolist() == [expected] * 3, "no replay ever counted"


def test_draws_go_on_as_if_nothing_had_been_recorded() -> None:
    owner, other = Counter(), Counter()
    for one in (owner, other):
        one.noise.manual_seed(7)
    tape = FakeGraphTape((owner.noise,))
    run(tape, owner.add_noise, owner, 6)
    for _ in range(6):
        other.add_noise()
    assert torch.equal(owner.total, other.total)
    assert tape.replayed == 4


def test_what_cannot_be_recorded_leaves_the_generators_as_they_were(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Counter()
    tape = FakeGraphTape((owner.noise,))

    def capture(body: Callable[[], None], _: object) -> None:
        try:
            body()
            raise RuntimeError("cannot be recorded")
        finally:
            raise ValueError("the recording could not be ended")

    monkeypatch.setattr(tape, "capture", capture)
    owner.noise.manual_seed(7)
    states = list[Tensor]()

    def watched() -> None:
        states.append(owner.noise.get_state())
        owner.add_noise()

    with caplog.at_level(logging.WARNING, "fedloom"):
        run(tape, watched, owner, 2)
    first, in_vain, again = states
    assert torch.equal(in_vain, again)
    assert not torch.equal(first, again)
    assert "not captured and runs eagerly each time: RuntimeError: cannot be recorded" in caplog.text


@pytest.mark.parametrize("everything", [False, True])
def test_one_check_for_each_kind_or_for_each_recording(everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "CHECK_ALL", everything)
    owner, tape = Counter(), FakeGraphTape()
    for key in ("a", "b", "a", "b", "a", "b", "a", "b"):
        tape.run("k", key, owner.add_one, owner)
    assert owner.total.tolist() == [8.0] * 3
    assert tape.captured == 2
    assert tape.done == 1 + (2 if everything else 1)


def test_a_check_that_found_no_memory_is_made_later(caplog: pytest.LogCaptureFixture) -> None:
    class Short(Counter):
        asked = 0

        def memory(self) -> list[Tensor]:
            self.asked += 1
            if self.asked == 2:  # the first time it is recorded
                raise torch.OutOfMemoryError("out of memory")
            return super().memory()

    owner, tape = Short(), FakeGraphTape()
    run(tape, owner.add_step, owner, 2)
    with pytest.raises(torch.OutOfMemoryError):
        run(tape, owner.add_step, owner, 1)
    with caplog.at_level(logging.WARNING, "fedloom"):
        run(tape, owner.add_step, owner, 1)
    assert "its replay does something else" in caplog.text


def test_a_slot_keeps_no_more_graphs_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 3)
    owner, tape = Counter(), FakeGraphTape()
    keys = [number // 4 for number in range(40)] + [0, 0]
    for key in keys:
        tape.run("k", key, owner.add_one, owner)
        assert len(tape._graphs) <= 3
    assert owner.total.tolist() == [float(len(keys))] * 3
    assert tape.captured == 11, "the first was gone when it was wanted again"


def test_a_last_bit_is_told_where_every_recording_is_checked(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "CHECK_ALL", True)
    owner, tape = Counter(), FakeGraphTape()
    small = [1.0, 1.0, 1.0 + 2**-20]

    def body() -> None:
        owner.total.add_(small.pop(0) if small else 1.0)

    with caplog.at_level(logging.WARNING, "fedloom"):
        run(tape, body, owner, 3)
    assert "a replay of the step k differs from it by 9.5e-07 of what it does" in caplog.text


def test_not_a_number_is_no_difference_where_both_have_it() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0])
    assert cuda_graphs._distance(one, nan, nan.clone()) == 0.0
    assert cuda_graphs._distance(one, nan, one) == float("inf")
    assert cuda_graphs._distance(torch.tensor([1]), torch.tensor([1]), torch.tensor([2])) == float("inf")


# The tape of a GPU, with everything of CUDA replaced by something that notes its name


class Noting:
    """Stands for torch's CUDA graphs, streams and generators; what is asked of them is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        noted = self.noted = list[str]()

        class Graph:
            def register_generator_state(self, generator: object) -> None:
                noted.append("register")

            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                noted.append(f"begin in pool {pool}, {capture_error_mode}")

            def capture_end(self) -> None:
                noted.append("end")

            def replay(self) -> None:
                noted.append("replay")

        class Stream:
            def __init__(self, device: torch.device, priority: int) -> None:
                self.name = f"{device} {priority}"

            def synchronize(self) -> None:
                noted.append("synchronize")

        class Generator:
            def __init__(self, device: object = None) -> None:
                self.state = torch.zeros(1)

            def get_state(self) -> Tensor:
                return self.state.clone()

            def set_state(self, state: Tensor) -> None:
                self.state = state

            def graphsafe_set_state(self, other: object) -> None:
                noted.append("a new state")

        pools = iter(range(100))
        for name, stand_in in (
            ("CUDAGraph", Graph),
            ("Stream", Stream),
            ("stream", lambda stream: nullcontext()),
            ("graph_pool_handle", lambda: next(pools)),
        ):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch, "Generator", Generator)
        monkeypatch.setattr(cuda_runtime, "_spare", {})
        monkeypatch.setattr(cuda_runtime, "_made", {})
        self.generator = Generator()


def test_a_graph_is_recorded_in_the_right_order(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Counter()
    cuda = Noting(monkeypatch)
    tape = cuda_graphs._CudaGraphRunner(torch.device("cuda"), (cuda.generator,), urgency=0)  # type: ignore[arg-type]
    run(tape, owner.add_one, owner, 2)
    assert cuda.noted == ["register", "begin in pool 0, thread_local", "end", "replay"]
    tape.close()
    assert cuda.noted[-1] == "synchronize"


def test_after_a_graph_that_failed_nothing_believes_to_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Counter()
    cuda = Noting(monkeypatch)
    tape = cuda_graphs._CudaGraphRunner(torch.device("cuda"), (cuda.generator,), urgency=0)  # type: ignore[arg-type]
    calls = list[int]()

    def second_fails() -> None:
        calls.append(1)
        if len(calls) == 2:
            assert not gc.isenabled(), "nothing is collected while a graph is recorded"
            raise RuntimeError("it asks the device for a number")

    begun, ended = ["register", "begin in pool 0, thread_local"], ["end", "replay"]
    tape.run("earlier", "its key", owner.add_one, owner)
    tape.run("earlier", "its key", owner.add_one, owner)
    run(tape, second_fails, owner, 3)
    assert len(calls) == 4
    assert gc.isenabled()
    assert cuda.noted == [*begun, *ended, *begun, "end", "synchronize", "a new state"]
    tape.run("earlier", "its key", owner.add_one, owner)
    assert cuda.noted[-4:] == ["register", "begin in pool 1, thread_local", *ended], "it draws from the new state"


def test_streams_are_used_by_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    Noting(monkeypatch)
    device = torch.device("cuda")
    held = [cuda_runtime.ExclusiveCudaStream(device) for _ in range(40)]
    names = [spare.stream.name for spare in held]  # type: ignore[attr-defined]
    assert names == ["cuda:0 0"] * 32 + ["cuda:0 -1"] * 8
    stream = held[3].stream
    held[3].close()
    taken = cuda_runtime.ExclusiveCudaStream(torch.device("cuda", 0))
    assert taken.stream is stream
    forgotten = held.pop().stream
    gc.collect()
    assert cuda_runtime.ExclusiveCudaStream(device).stream is forgotten


def test_urgent_work_has_streams_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Noting(monkeypatch)
    device = torch.device("cuda")
    held = [cuda_runtime.ExclusiveCudaStream(device, urgency) for urgency in (3, 2, 1, 0, 9)]
    names = [spare.stream.name for spare in held]  # type: ignore[attr-defined]
    assert names == ["cuda:0 -3", "cuda:0 -2", "cuda:0 -1", "cuda:0 0", "cuda:0 -3"]
    urgent = held[0].stream
    held[0].close()
    assert cuda_runtime.ExclusiveCudaStream(device).stream is not urgent
    assert cuda_runtime.ExclusiveCudaStream(device, 3).stream is urgent


def test_draws_of_torch_on_the_host_are_not_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU would repeat what followed from the number that was drawn then."""
    owner = Counter()
    cuda = Noting(monkeypatch)
    tape = cuda_graphs._CudaGraphRunner(torch.device("cuda"), (cuda.generator,), urgency=0)  # type: ignore[arg-type]
    before, drawn = torch.get_rng_state(), list[float]()
    with caplog.at_level(logging.WARNING, "fedloom"):
        run(tape, lambda: drawn.append(float(torch.rand(()))), owner, 4)
    torch.set_rng_state(before)
    assert [drawn[0], *drawn[2:]] == torch.stack([torch.rand(()) for _ in range(4)]).tolist()
    assert drawn[1] == drawn[2], "the recording took nothing away"
    assert "replay" not in cuda.noted
    assert "it draws random numbers on the host" in caplog.text


class Graph:
    """What a recording that fails has begun with."""


class FailingTape(FakeGraphTape):
    """Recordings fail so many times, and then cannot be ended."""

    def __init__(self, error: Exception, times: int) -> None:
        super().__init__()
        self.error, self.left = error, times
        self.begun: weakref.ref[Graph] | None = None

    def capture(self, body: Callable[[], None], owner: _GraphOwner) -> Operations:
        if not self.left:
            return super().capture(body, owner)
        self.left -= 1
        graph = Graph()
        self.begun = weakref.ref(graph)
        try:
            raise self.error
        finally:
            raise RuntimeError("the recording could not be ended")


def test_a_recording_without_memory_is_not_taken_for_a_step_that_cannot_be_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine then goes on with fewer slots. That the recording could not be ended is no reason of its own."""
    owner, tape = Counter(), FailingTape(torch.OutOfMemoryError("out of memory"), 1)

    def shortage() -> Exception | None:
        try:
            run(tape, owner.add_one, owner, 2)
        except torch.OutOfMemoryError as error:
            return error.with_traceback(None)
        return None

    with caplog.at_level(logging.WARNING, "fedloom"):
        assert shortage() is tape.error
    assert tape.begun is not None
    assert tape.begun() is None, "it would take memory while room is made"
    assert not caplog.text


LIBRARYS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_whose_library_had_no_memory_is_recorded_later_if_it_can_be(
    times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It may only have set itself up, which it may not in a recording."""
    owner, tape = Counter(), FailingTape(LIBRARYS, times)
    with caplog.at_level(logging.WARNING, "fedloom"):
        run(tape, owner.add_one, owner, 6)
    assert owner.total.tolist() == [6.0] * 3
    assert tape.captured == (1 if times == 1 else 0)
    assert ("CUBLAS_STATUS_ALLOC_FAILED" in caplog.text) is (times == 2)


def test_a_library_that_has_no_memory_outside_of_graphs_says_so() -> None:
    owner, tape = Counter(), FailingTape(LIBRARYS, 1)

    def step() -> None:
        if tape.begun is not None:
            assert tape.begun() is None, "what was recorded would take memory from it"
            raise LIBRARYS
        owner.add_one()

    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        run(tape, step, owner, 2)


def test_after_cooling_down_a_step_is_done_before_others_are_recorded() -> None:
    owner, tape = Counter(), FakeGraphTape()
    for key in "aab":
        tape.run("k", key, owner.add_one, owner)
    assert (tape.done, tape.captured) == (1, 2)
    tape.reset_warmup()
    for key in "cabd":  # those of before are still there
        tape.run("k", key, owner.add_one, owner)
    assert tape.captured == 3
    assert owner.total.tolist() == [7.0] * 3
