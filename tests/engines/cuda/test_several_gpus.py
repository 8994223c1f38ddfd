"""Tests of several simulated GPUs, each with slots, samples and results."""

import pytest
import torch

from fedloom.devices.selection import select_devices
from fedloom.engines.cuda.device import CudaDevice
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.engines.cuda.slot import CudaSlot
from fedloom.errors import FedloomError, InputError
from fedloom.testing.fixtures import build_small_run
from tests.support.cuda_engine import answers, assert_alike, jobs_for
from tests.support.fake_graphs import fake_tape

CLIENTS = [5, 0, 7, 2, 1, 6, 3]


@pytest.mark.quick_if(method=("scaffold",))
@pytest.mark.parametrize("slots", [1, 2, 0])
@pytest.mark.parametrize("gpus", [2, 3])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedmix"])
def test_the_number_of_gpus_does_not_change_a_bit(
    method: str, gpus: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.engines.cuda.slot.make_graph_runner", fake_tape)
    with build_small_run(method, {}, engine="sequential", clients_per_round=8, momentum=0.5).engine_closed() as plain:
        one, several = (CudaEngine(plain.engine.context, ["cpu"] * count, slots) for count in (1, gpus))
        for round in (0, 1):
            jobs = jobs_for(plain, CLIENTS)
            for ours, theirs in zip(answers(several, jobs, round), answers(one, jobs, round), strict=True):
                assert torch.equal(ours[1], theirs[1])
                for mine, other in zip(ours[2:4], theirs[2:4], strict=True):
                    assert all(torch.equal(mine[name], other[name]) for name in other)
                assert ours[0] == theirs[0]
                assert ours[4:] == theirs[4:]
        assert [len(gpu.slots) for gpu in several.gpus] == [min(slots or 16, -(-len(CLIENTS) // gpus))] * gpus
        assert all(any(slot.graph_runner.done for slot in gpu.slots) for gpu in several.gpus), "every GPU has worked"


def test_large_clients_are_spread_over_the_gpus() -> None:
    with build_small_run("fedavg", {}, engine="sequential").engine_closed() as plain:
        engine = CudaEngine(plain.engine.context, ["cpu", "cpu"], 2)
        answers(engine, jobs_for(plain, CLIENTS))
        first, second = engine.gpus
        assert engine.slots == [first.slots[0], second.slots[0], first.slots[1], second.slots[1]]


def test_frozen_weights_are_shared_on_one_gpu_only() -> None:
    def partly_frozen() -> torch.nn.Module:
        module = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
        module[0].requires_grad_(False)
        return module

    with build_small_run("fedavg", {}, engine="sequential", model=partly_frozen).engine_closed() as plain:
        jobs = jobs_for(plain, CLIENTS)
        engine = CudaEngine(plain.engine.context, ["cpu", "cpu"], 2)
        assert_alike(answers(engine, jobs), answers(plain.engine, jobs))
        places = [{slot.module[0].weight.data_ptr() for slot in gpu.slots} for gpu in engine.gpus]  # type: ignore[index, union-attr]
        assert [len(place) for place in places] == [1, 1]
        assert not places[0] & places[1]


def test_answers_wait_in_little_memory_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.engines.cuda.device.RESULT_MEMORY", 1)
    marks = list[CudaDevice]()
    monkeypatch.setattr(CudaDevice, "record_event", lambda self: marks.append(self))
    with build_small_run("fedavg", {}, engine="sequential").engine_closed() as plain:
        jobs = jobs_for(plain, [0, 1, 2, 3, 4, 5, 6, 7] * 2)
        engine = CudaEngine(plain.engine.context, ["cpu", "cpu"], 1)
        assert_alike(answers(engine, jobs), answers(plain.engine, jobs))
        assert [gpu.allocate_results(16) for gpu in engine.gpus] == [2, 2]
    # One for each answer, and on each GPU one before new work: it must wait for those who read the places it fills.
    assert len(marks) >= len(jobs) + 2 * len(jobs) // 2


def test_a_gpu_without_memory_leaves_the_work_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    take = CudaSlot._take_steps

    def short(self: CudaSlot, *given: object) -> None:
        if self in engine.gpus[1].slots:
            raise torch.OutOfMemoryError("out of memory")
        take(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaSlot, "_take_steps", short)
    with build_small_run("scaffold", {}, engine="sequential").engine_closed() as plain:
        jobs = jobs_for(plain, CLIENTS)
        expected = answers(plain.engine, jobs)
        engine = CudaEngine(plain.engine.context, ["cpu", "cpu"], 2)
        for _ in range(2):
            assert_alike(answers(engine, jobs), expected)
        assert [gpu.max_slots for gpu in engine.gpus] == [2, 0]


@pytest.mark.parametrize("room", [0, 2])
def test_slots_are_made_as_long_as_there_is_memory(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = list[CudaSlot](), CudaSlot.__init__

    def short(self: CudaSlot, *given: object) -> None:
        if len(made) == room:
            raise torch.OutOfMemoryError("out of memory")
        make(self, *given)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(CudaSlot, "__init__", short)
    with build_small_run("fedavg", {}, engine="sequential").engine_closed() as plain:
        jobs = jobs_for(plain, CLIENTS)
        engine = CudaEngine(plain.engine.context, "cpu")
        if room:
            assert_alike(answers(engine, jobs), answers(plain.engine, jobs))
            assert len(engine.slots) == room
        else:
            with pytest.raises(FedloomError, match="not enough memory to train one client"):
                answers(engine, jobs)


@pytest.mark.parametrize("names", ["cpu,cpu", "cuda,cuda", "mps", "cpu,", "cuda:0,gpu"])
def test_devices_that_make_no_sense(names: str) -> None:
    with pytest.raises(InputError):
        select_devices(names)


def test_the_plain_engine_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.devices.selection._usable_device", torch.device)
    with pytest.raises(InputError, match="sequential engine computes on one device, not on 'cuda:0,cuda:1'"):
        build_small_run("fedavg", {}, engine="sequential", device="cuda:0,cuda:1")
