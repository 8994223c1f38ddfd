"""Tests of the sequential engine, with which all other engines are compared."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.tasks import ClientFailure, ClientTask, ClientUpdate
from fedloom.methods import Client, Method, Options, register
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run, simple_network
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.task_rounds import in_round


@pytest.fixture
def fedavg() -> Iterator[BuiltRun]:
    with build_small_run("fedavg", {}, model=simple_network, batch_size=0, epochs=3).engine_closed() as built_run:
        yield built_run


def tasks_of(built_run: BuiltRun, client_ids: list[int]) -> list[ClientTask]:
    extras = built_run.rounds.parts.extras
    return [
        ClientTask(task.client_id, task.row, extras=extras.send_to_client(0, task.client_id) if extras else {})
        for task in built_run.rounds.parts.server.dispatch(0, client_ids)
    ]


def rows_of(built_run: BuiltRun, client_ids: list[int]) -> list[Tensor]:
    return [update.row.clone() for update in built_run.engine.train(in_round(0, tasks_of(built_run, client_ids)))]


def test_an_update_is_that_of_an_ordinary_training_loop(fedavg: BuiltRun) -> None:
    layout, samples = fedavg.layout, fedavg.data.federated_data.client_samples(2)
    network = simple_network()
    network.load_state_dict(layout.state_dict(fedavg.rounds.global_model()))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(3):
        loss = F.cross_entropy(network(samples.x), samples.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    (update,) = fedavg.engine.train(in_round(0, tasks_of(fedavg, [2])))
    assert (update.client_id, update.num_examples, update.steps) == (2, len(samples), 3)
    assert update.loss == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(update.row, layout.read(network))


def test_updates_come_in_the_order_of_the_tasks_and_do_not_depend_on_each_other(fedavg: BuiltRun) -> None:
    order = [5, 0, 7, 5]
    updates = fedavg.engine.train(in_round(0, tasks_of(fedavg, order)))
    seen = [(update.client_id, update.row.clone()) for update in updates]
    assert [client_id for client_id, _ in seen] == order
    for client_id, row in seen:
        assert torch.equal(row, rows_of(fedavg, [client_id])[0])


def test_a_client_trains_when_its_update_is_read(fedavg: BuiltRun) -> None:
    asked: list[int] = []
    data = fedavg.data.federated_data
    load = type(data).client_samples
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(data), "client_samples", lambda self, k: (asked.append(k), load(self, k))[1])
        updates = fedavg.engine.train(in_round(0, tasks_of(fedavg, [1, 4])))
        assert asked == []
        next(updates)
        assert set(asked) == {1}
        next(updates)
        assert set(asked) == {1, 4}


def test_the_sent_model_stays_as_it_was(fedavg: BuiltRun) -> None:
    tasks = tasks_of(fedavg, [0, 1])
    before = tasks[0].row.clone()
    assert all(not torch.equal(update.row, before) for update in fedavg.engine.train(in_round(0, tasks)))
    assert torch.equal(tasks[0].row, before)


def test_client_state_is_stored_only_when_the_update_is_committed() -> None:
    with build_small_run("scaffold", {}).engine_closed() as built_run:
        states = built_run.engine.client_states
        for update in built_run.engine.train(in_round(0, tasks_of(built_run, [3, 4]))):
            assert any(tensor.any() for tensor in update.client_state.values())
            assert update.client_id not in states
            if update.client_id == 4:
                built_run.engine.commit_update(update)
        assert 3 not in states
        assert 4 in states


class Failing(Client[Options]):
    """Client 1 raises an error after its first step."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step, steps=1)
        if trainer.client_id == 1:
            raise ZeroDivisionError("no luck")
        yield LocalSteps(self.training_step, steps=1)


def test_a_client_that_fails_is_reported_and_the_next_one_trains_as_if_it_were_alone() -> None:
    register(Method("failing", "", "", client=Failing))
    with build_small_run("failing", {}).engine_closed() as built_run:
        first, failure, last = [
            update if isinstance(update, ClientFailure) else update.row.clone()
            for update in built_run.engine.train(in_round(0, tasks_of(built_run, [0, 1, 2])))
        ]
        assert isinstance(failure, ClientFailure)
        assert (failure.task.client_id, failure.permanent) == (1, False)
        assert "no luck" in failure.reason
        assert torch.equal(first, rows_of(built_run, [0])[0])
        assert torch.equal(last, rows_of(built_run, [2])[0])


def test_a_client_without_samples_returns_the_model_that_it_received() -> None:
    data = SmallFederatedDataset({2: 0})
    with build_small_run("fedavg", {}, federated_data=data).engine_closed() as built_run:
        (update,) = built_run.engine.train(in_round(0, tasks_of(built_run, [2])))
        assert isinstance(update, ClientUpdate)
        assert (update.num_examples, update.steps) == (0, 0)
        assert torch.equal(update.row, update.task.row)


def test_evaluation_is_that_of_the_network_on_all_test_samples(fedavg: BuiltRun) -> None:
    row, test = fedavg.rounds.global_model(), fedavg.data.federated_data.test
    network = simple_network()
    network.load_state_dict(fedavg.layout.state_dict(row))
    with torch.no_grad():
        outputs = network(test.x)
    result = fedavg.engine.evaluate(row)
    assert result.count == len(test)
    assert result.loss == pytest.approx(float(F.cross_entropy(outputs, test.y)), rel=1e-5)
    assert result.is_correct.tolist() == (outputs.argmax(1) == test.y).tolist()
    assert result.count_per_class.tolist() == torch.bincount(test.y, minlength=10).tolist()


def test_it_computes_with_one_thread_until_it_is_closed() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with build_small_run("fedavg", {}).engine_closed():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
