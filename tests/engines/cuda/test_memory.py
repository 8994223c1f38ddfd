"""Tests that a GPU short of memory gets fewer slots, on the CPU.

It may also get fewer places for results, or load samples in parts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fedloom.core.bank import Bank
from fedloom.devices.cuda_graphs import EagerRunner
from fedloom.engines.base import Engine
from fedloom.engines.cuda.engine import CudaEngine
from fedloom.engines.cuda.graph_evaluator import GraphEvaluator
from fedloom.engines.cuda.slot import CudaSlot
from fedloom.errors import FedloomError
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import build_small_run
from fedloom.training.trainer import LocalTrainer
from tests.support.cuda_engine import answers, assert_alike, cuda_of, jobs_for, pooled
from tests.support.task_rounds import in_round


@contextmanager
def experiment(**settings: Any) -> Iterator[BuiltRun]:
    with build_small_run("fedavg", {}, engine="sequential", **settings).engine_closed() as plain:
        yield plain


def short(when: Callable[[], bool], then: Callable[..., Any]) -> Callable[..., Any]:
    """The same, where there is memory."""

    def tried(*given: Any, **named: Any) -> Any:
        if when():
            raise torch.OutOfMemoryError("out of memory")
        return then(*given, **named)

    return tried


@pytest.mark.parametrize("where", ["at first", "for a slot", "for a step"])
def test_samples_that_do_not_fit_come_with_their_clients(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def has_pool() -> bool:
        return where == "at first" or engine.gpus[0]._pool is not None

    with experiment() as plain, caplog.at_level("WARNING", "fedloom"):
        jobs = jobs_for(plain, [4, 0, 1, 2])
        expected, shop = answers(plain.engine, jobs), pooled(plain.engine.context)
        if where == "at first":
            moved, to = shop.data.pool, torch.Tensor.to  # type: ignore[attr-defined]

            def no_room(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
                if self is moved.x:
                    raise torch.OutOfMemoryError("out of memory")
                return to(self, *given, **named)

            monkeypatch.setattr(torch.Tensor, "to", no_room)
        engine = CudaEngine(shop, "cpu", 2)
        if where == "for a slot":
            monkeypatch.setattr("fedloom.engines.cuda.device.CudaSlot", short(has_pool, CudaSlot))
        elif where == "for a step":
            monkeypatch.setattr(CudaSlot, "_take_steps", short(has_pool, CudaSlot._take_steps))
        assert_alike(answers(engine, jobs), expected)
        assert len(engine.slots) == (1 if where == "for a step" else 2)
        assert engine.gpus[0]._pool is None
    assert caplog.text.count("has no room for all samples") == 1


def test_answers_wait_in_as_many_places_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, make = list[int](), Engine.make_bank

    def small(count: int, *given: Any) -> Bank:
        counts.append(count)
        if count > 2:
            raise torch.OutOfMemoryError("out of memory")
        return make(count, *given)

    with experiment() as plain:
        engine = cuda_of(plain, 3)
        monkeypatch.setattr(Engine, "make_bank", staticmethod(small))
        for clients in ([0, 1], list(range(8))):
            jobs = jobs_for(plain, clients)
            assert_alike(answers(engine, jobs), answers(plain.engine, jobs))
        assert engine.gpus[0].allocate_results(8) == 2
    assert counts[:8] == [1, 2, 1, 8, 4, 2, 1, 8]


@pytest.mark.parametrize("room", [2, 1, 0, -1])
def test_slots_make_room_for_scoring(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for so many slots beside the test set."""
    monkeypatch.setattr(GraphEvaluator, "_body", short(lambda: len(engine.slots) > room, GraphEvaluator._body))
    with experiment() as plain:
        engine, jobs = cuda_of(plain, 3), jobs_for(plain, list(range(5)))
        expected = answers(plain.engine, jobs)
        assert_alike(answers(engine, jobs), expected)
        if room < 0:
            with pytest.raises(FedloomError, match="not enough memory to evaluate a model"):
                engine.evaluate(jobs[0].row)
            return
        ours, theirs = engine.evaluate(jobs[0].row), plain.engine.evaluate(jobs[0].row)
        assert ours is not None
        assert theirs is not None
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert len(engine.slots) == room
        assert_alike(answers(engine, jobs), expected)


def test_slots_make_room_for_the_scoring_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    with build_small_run("fedrep", {}, engine="sequential").engine_closed() as plain:
        engine, jobs = cuda_of(plain, 3), jobs_for(plain, list(range(5)))
        list(engine.train(in_round(0, jobs)))
        expected = plain.engine.evaluate_clients(in_round(1, jobs))
        monkeypatch.setattr(LocalTrainer, "evaluate", short(lambda: len(engine.slots) > 1, LocalTrainer.evaluate))
        assert engine.evaluate_clients(in_round(1, jobs)) == expected
        assert len(engine.slots) == 1


SHORT = (
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    torch.AcceleratorError("CUDA error: out of memory"),
)


@pytest.mark.parametrize("error", SHORT)
@pytest.mark.parametrize("clients", [False, True])
def test_slots_make_room_for_scoring_however_it_is_said(
    error: Exception, clients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build_small_run("fedrep", {}, engine="sequential").engine_closed() as plain:
        engine, jobs = cuda_of(plain, 3), jobs_for(plain, list(range(5)))
        list(engine.train(in_round(0, jobs)))
        expected, score = plain.engine.evaluate_clients(in_round(1, jobs)), LocalTrainer.evaluate

        def tried(*given: Any) -> Any:
            if len(engine.slots) > 1:
                raise error
            return score(*given)

        monkeypatch.setattr(LocalTrainer, "evaluate", tried)
        monkeypatch.setattr(GraphEvaluator, "evaluate", lambda self, row: tried(self._trainer, row, self._test[:50]))
        if clients:
            assert engine.evaluate_clients(in_round(1, jobs)) == expected
        else:
            assert engine.evaluate(jobs[0].row) is not None
        assert len(engine.slots) == 1


@pytest.mark.parametrize("error", SHORT)
def test_libraries_say_otherwise_that_there_is_no_memory(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    take = CudaSlot._take_steps

    def tried(*given: Any) -> None:
        if len(engine.slots) > 2:
            raise error
        take(*given)

    monkeypatch.setattr(CudaSlot, "_take_steps", tried)
    with experiment() as plain:
        engine, jobs = cuda_of(plain, 4), jobs_for(plain, list(range(5)))
        assert_alike(answers(engine, jobs), answers(plain.engine, jobs))
        assert len(engine.slots) == 2


def test_slots_that_are_left_cool_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had no memory may have been forgotten, and cannot be loaded while a step is being recorded."""
    cooled, reset_warmup = list[EagerRunner](), EagerRunner.reset_warmup
    monkeypatch.setattr(EagerRunner, "reset_warmup", lambda tape: (cooled.append(tape), reset_warmup(tape))[1])
    monkeypatch.setattr(CudaSlot, "_take_steps", short(lambda: len(engine.slots) > 2, CudaSlot._take_steps))
    with experiment() as plain:
        engine, jobs = cuda_of(plain, 3), jobs_for(plain, list(range(5)))
        assert engine.evaluate(jobs[0].row) is not None
        assert_alike(answers(engine, jobs), answers(plain.engine, jobs))
        assert engine._evaluator is None, "whatever it keeps is memory as well"
        assert {id(slot.graph_runner) for slot in engine.slots} <= {id(tape) for tape in cooled}


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling ...")]
)
def test_the_plain_engine_does_not_lose_clients_for_want_of_memory(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    with experiment() as plain:
        monkeypatch.setattr(LocalTrainer, "run_steps", fail)
        with pytest.raises(FedloomError, match="not enough memory to train one client"):
            plain.rounds.run_round(0)
