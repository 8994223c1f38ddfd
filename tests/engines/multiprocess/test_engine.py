"""Tests of the multiprocess engine against the sequential engine."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.engines.multiprocess.engine import MultiprocessEngine
from fedloom.engines.parallel import LargestFirstQueue
from fedloom.methods import Client, Method, Options, register
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import build_small_run
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.task_rounds import in_round


def jobs_for(experiment: BuiltRun, clients: list[int]) -> list[ClientTask]:
    companion = experiment.rounds.parts.extras
    jobs = experiment.rounds.parts.server.dispatch(0, clients)
    return [
        ClientTask(
            j.client_id, j.row, j.model_index, companion.send_to_client(0, j.client_id) if companion else j.extras
        )
        for j in jobs
    ]


def results(experiment: BuiltRun, clients: list[int]) -> list[tuple[int, Tensor, dict[str, Tensor], int, float]]:
    return [
        (u.client_id, u.row.clone(), {k: v.clone() for k, v in u.extras.items()}, u.steps, u.loss)
        for u in experiment.engine.train(in_round(0, jobs_for(experiment, clients)))
        if isinstance(u, ClientUpdate)
    ]


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_both_engines_return_the_same_answers_in_the_order_of_the_jobs(method: str) -> None:
    clients = [5, 0, 7, 2, 1]
    with build_small_run(method, {}, engine="sequential").engine_closed() as plain:
        expected, score = results(plain, clients), plain.engine.evaluate(plain.rounds.parts.server.global_model())
    with build_small_run(method, {}, engine="multiprocess", workers=3).engine_closed() as host:
        assert isinstance(host.engine, MultiprocessEngine)
        got, scored = results(host, clients), host.engine.evaluate(host.rounds.parts.server.global_model())
    assert [r[0] for r in got] == clients
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours[1], theirs[1])
        assert all(torch.equal(ours[2][name], theirs[2][name]) for name in theirs[2])
        assert ours[3:] == theirs[3:]
    assert (scored.loss, scored.correct_per_class.tolist()) == (score.loss, score.correct_per_class.tolist())


def test_few_slots_are_enough_for_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.engines.multiprocess.engine.SLOT_MEMORY", 1)
    with build_small_run("fedavg", {}, engine="multiprocess", workers=2).engine_closed() as host:
        assert len(host.engine._slots) == 8
        clients = [0, 1, 2, 3, 4, 5, 6, 7] * 3
        got = results(host, clients)
    with build_small_run("fedavg", {}).engine_closed() as plain:
        expected = results(plain, clients)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(got, expected, strict=True))


def test_rows_outside_shared_memory_are_lent() -> None:
    """A server may send a tensor it has just made; workers that were forked before must see it."""
    with build_small_run("fedavg", {}, engine="multiprocess", workers=2).engine_closed() as host:
        base = host.rounds.parts.server.global_model()
        pids = None
        for scale in (0.5, 2.0, 3.0):
            rows = [base * scale, base * scale + 1]
            answers = list(
                host.engine.train(in_round(0, [ClientTask(0, rows[0]), ClientTask(1, rows[1]), ClientTask(2, base)]))
            )
            assert all(isinstance(answer, ClientUpdate) for answer in answers)
            assert host.engine.evaluate(rows[1]).count == len(host.data.federated_data.test)
            if pids is not None:
                assert host.engine.worker_pids() == pids, "workers are made anew only when new memory is needed"
            pids = host.engine.worker_pids()


def test_an_abandoned_round_does_not_disturb_the_next() -> None:
    with build_small_run("fedavg", {}, engine="multiprocess", workers=2).engine_closed() as host:
        expected = results(host, [0, 1, 2, 3])
        unfinished = host.engine.train(in_round(0, jobs_for(host, [4, 5, 6, 7])))
        next(unfinished)
        unfinished.close()
        again = results(host, [0, 1, 2, 3])
    assert all(torch.equal(a[1], b[1]) for a, b in zip(again, expected, strict=True))


def test_a_killed_worker_is_replaced_and_its_work_done_again() -> None:
    with build_small_run("scaffold", {}, engine="multiprocess", workers=2).engine_closed() as host:
        expected = results(host, list(range(8)))
        running = host.engine.train(in_round(0, jobs_for(host, list(range(8)))))
        got = []
        for number, update in enumerate(running):
            got.append(update.row.clone())
            if number in (0, 3):
                os.kill(host.engine.worker_pids()[0], signal.SIGKILL)
        assert host.engine.num_dead_workers >= 1
    assert all(torch.equal(row, theirs[1]) for row, theirs in zip(got, expected, strict=True))


class Fatal(Client[Options]):
    """Client 3 takes its worker with it."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        if trainer.client_id == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield LocalSteps(self.training_step)


def test_a_client_that_kills_its_worker_is_given_up_by_name() -> None:
    register(Method("fatal", "a test", "nobody", client=Fatal))
    with build_small_run("fatal", {}, engine="multiprocess", workers=2).engine_closed() as host:
        answers = list(host.engine.train(in_round(0, jobs_for(host, [2, 3, 4]))))
        assert host.engine.num_dead_workers == 3
    assert [type(answer) for answer in answers] == [ClientUpdate, ClientFailure, ClientUpdate]
    assert answers[1].reason == "its worker died 3 times (signal 9)"


class Careless(Client[Options]):
    """Puts new tensors on the bench instead of filling those that are there."""

    def upload_shapes(self, layout):
        return {"seen": (2,)}

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step)
        trainer.uploads["seen"] = torch.ones(2 if trainer.client_id != 1 else 3)
        trainer.row = trainer.row * 1.0


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_results_put_elsewhere_are_brought_home_or_refused(engine: str) -> None:
    register(Method("careless", "a test", "nobody", client=Careless))
    with build_small_run("careless", {}, engine=engine).engine_closed() as experiment:
        first, second = experiment.engine.train(in_round(0, jobs_for(experiment, [0, 1])))
        assert isinstance(second, ClientFailure)
        assert "uploads['seen'] has shape (3,)" in second.reason
        assert isinstance(first, ClientUpdate)
    with build_small_run("careless", {}, engine=engine).engine_closed() as experiment:
        (update,) = experiment.engine.train(in_round(0, jobs_for(experiment, [0])))
        assert torch.equal(update.extras["seen"], torch.ones(2))


def test_orders_go_out_largest_first_within_the_window() -> None:
    waiting = LargestFirstQueue([1, 5, 3, 9], max_ahead=3)
    assert [waiting.next(), waiting.next(), waiting.next(), waiting.next()] == [1, 2, 0, None]
    waiting.num_delivered = 1
    assert waiting.next() == 3
    assert waiting.put_back_after_death(1) == 1
    assert waiting.next() == 1


def test_threads_are_as_they_were_when_an_engine_is_closed() -> None:
    before = torch.get_num_threads()
    for engine in ("sequential", "multiprocess"):
        with build_small_run("fedavg", {}, engine=engine).engine_closed():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_what_travels_down_beside_a_model_keeps_its_type(engine: str) -> None:
    class Reader(Client[Options]):
        def upload_shapes(self, layout):
            return {"same": (1,)}

        def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
            yield LocalSteps(self.training_step)
            count, mask = trainer.extras["count"], trainer.extras["mask"]
            assert trainer.evaluate(trainer.received, trainer._data).count == trainer.num_examples
            assert trainer.module.training
            trainer.uploads["same"][0] = float(
                count.dtype is torch.int64 and int(count[0]) == 2**40 + 1 and bool(mask[1])
            )

    register(Method("reader", "a test", "nobody", client=Reader))
    with build_small_run("reader", {}, engine=engine).engine_closed() as experiment:
        extras = {"count": torch.tensor([2**40 + 1]), "mask": torch.tensor([False, True])}
        (job,) = experiment.rounds.parts.server.dispatch(0, [1])
        (update,) = experiment.engine.train(in_round(0, [ClientTask(1, job.row, 0, extras)]))
        assert isinstance(update, ClientUpdate), update.reason
        assert update.extras["same"] == 1
