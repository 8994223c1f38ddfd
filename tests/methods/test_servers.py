"""Tests of the base classes of servers: what their hooks see, and in which order."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from fedloom import AveragingServer, Client, ClientTask, ClientUpdate, FedloomError, Method, Options, Refiner, register
from fedloom.methods import MultiModelServer
from fedloom.methods.fedavg import FedAvgServer
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import build_small_run
from fedloom.training.trainer import LocalSteps, LocalTrainer


class NotingServer(AveragingServer[Options]):
    """Goes twice as far as the mean, and notes what it sees."""

    def start(self) -> None:
        self.steps = self.zeros()
        self._seen: list[str] = []

    def weight(self, update: ClientUpdate) -> float:
        self._seen.append(f"weight {update.client_id}")
        return update.steps

    def observe(self, round: int, update: ClientUpdate) -> None:
        self._seen.append(f"observe {update.client_id} in {round}")

    def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
        self._seen.append(f"next {round}")
        self._old, self._mean = old.clone(), mean.clone()
        return old + 2 * (mean - old)


def updates_of(built_run: BuiltRun, changes: Sequence[float], steps: Sequence[int]) -> list[ClientUpdate]:
    """Clients that add a number to every float of the model."""
    sent = built_run.rounds.parts.server.global_model().clone()
    found = []
    for client_id, (change, count) in enumerate(zip(changes, steps, strict=True)):
        row = sent.clone()
        row[: built_run.layout.floats] += change
        found.append(ClientUpdate(ClientTask(client_id, sent), row, num_examples=1, loss=1.0, steps=count))
    return found


def noting(built_run: BuiltRun) -> NotingServer:
    return NotingServer(built_run.rounds.context, Options())


def test_the_next_model_comes_from_the_old_one_and_the_weighted_mean() -> None:
    with build_small_run("fedavg", {}).engine_closed() as built_run:
        server, layout = noting(built_run), built_run.layout
        before = server.global_model().clone()
        server.aggregate(3, iter(updates_of(built_run, [1.0, 4.0], [2, 1])))  # their mean is 2
        assert server._seen == ["observe 0 in 3", "weight 0", "observe 1 in 3", "weight 1", "next 3"]
        assert torch.equal(server._old, before[: layout.trainable])
        torch.testing.assert_close(server._mean, before[: layout.trainable] + 2)
        now = server.global_model()
        torch.testing.assert_close(now[: layout.trainable], before[: layout.trainable] + 4)


def test_buffers_are_the_mean_however_far_the_model_goes() -> None:
    with build_small_run("fedavg", {}).engine_closed() as built_run:
        server, buffers = noting(built_run), slice(built_run.layout.trainable, built_run.layout.floats)
        before = server.global_model()[buffers].clone()
        assert len(before)
        server.aggregate(0, iter(updates_of(built_run, [1.0, 4.0], [2, 1])))
        torch.testing.assert_close(server.global_model()[buffers], before + 2)


def test_without_a_mean_there_is_no_next_model() -> None:
    with build_small_run("fedavg", {}).engine_closed() as built_run:
        server = noting(built_run)
        before = server.global_model().clone()
        server.aggregate(0, iter([]))
        server.aggregate(1, iter(updates_of(built_run, [1.0, 4.0], [0, 0])))  # all weights are zero
        assert not any(line.startswith("next") for line in server._seen)
        assert torch.equal(server.global_model(), before)


def test_zeros_are_as_many_as_the_trainable_parameters() -> None:
    with build_small_run("fedavg", {}).engine_closed() as built_run:
        server = noting(built_run)
        assert torch.equal(server.steps, torch.zeros(built_run.layout.trainable))
        assert set(server.state_dict()) == {"bank", "steps"}


class Observing:
    """Sees single updates, for any server."""

    def observe(self, round: int, update: ClientUpdate) -> None:
        """Look."""


def test_what_a_server_needs_follows_from_what_it_overrides() -> None:
    class OwnMean(FedAvgServer):
        def next_model(self, round: int, old: Tensor, mean: Tensor) -> Tensor:
            return old

    class OwnWeight(FedAvgServer):
        def weight(self, update: ClientUpdate) -> float:
            return update.steps

    class Mixed(Observing, FedAvgServer):
        pass

    class SaysMean(OwnWeight):
        needs = "mean"

    class BelowSaysMean(SaysMean):
        pass

    class Refines(Refiner[Options]):
        def receive_update(self, round: int, update: ClientUpdate) -> None:
            pass

    assert {cls.needs for cls in (AveragingServer, FedAvgServer, OwnMean, SaysMean, BelowSaysMean)} == {"mean"}
    assert {cls.needs for cls in (Client, Refiner)} == {"mean"}
    assert {cls.needs for cls in (OwnWeight, Mixed, Refines, MultiModelServer)} == {"updates"}


class FailsHalfway(Client[Options]):
    """Client 1 trains, then fails."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step)
        if trainer.client_id == 1:
            raise ValueError("it fails")


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_clients_write_their_models_into_the_memory_of_the_server(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is made, and a client that fails on the way leaves no trace."""
    register(Method("fails-halfway", "a test", "nobody", client=FailsHalfway))
    with build_small_run("fedcross+fails-halfway", {}, engine=engine, clients_per_round=4).engine_closed() as built_run:
        server = built_run.rounds.parts.server
        assert isinstance(server, MultiModelServer)
        server.bank.rows.add_(torch.arange(4.0)[:, None])
        sent, seen = server.bank.rows.clone(), list[tuple[ClientUpdate, Tensor]]()

        def combine(round: int, v: Tensor, w: Tensor) -> None:
            for index in range(4):
                if index in server.absent:
                    assert torch.equal(v[index], sent[index])
            for update, row in seen:
                assert update.row.data_ptr() == v[update.model_index].data_ptr()
                assert torch.equal(v[update.model_index], row)
                assert not torch.equal(row, sent[update.model_index])

        def aggregate(round: int, updates: Iterator[ClientUpdate]) -> None:
            MultiModelServer.aggregate(server, round, noted(updates))

        def noted(updates: Iterator[ClientUpdate]) -> Iterator[ClientUpdate]:
            for update in updates:
                seen.append((update, update.row.clone()))
                yield update

        monkeypatch.setattr(server, "combine", combine)
        monkeypatch.setattr(server, "aggregate", aggregate)
        monkeypatch.setattr(server, "sample_clients", lambda round: [0, 1, 2, 3])
        record = built_run.rounds.run_round(0)
    assert list(record["failed_clients"]) == ["1"]
    assert (len(seen), server.absent) == (3, {1})


def test_two_tasks_with_one_memory_for_their_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with build_small_run("fedcross", {}).engine_closed() as built_run:
        server = built_run.rounds.parts.server
        twice = [task for task in server.dispatch(0, [0, 1]) for _ in range(2)]
        monkeypatch.setattr(server, "dispatch", lambda round, client_ids: twice)
        with pytest.raises(FedloomError, match="same `result_row`"):
            built_run.rounds.run_round(0)
