"""Tests of FedFomo: which models a client averages."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.core.tasks import ClientTask, ClientUpdate, TaskMemory
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import build_small_run, small_run
from fedloom.training.local_training import train_client
from tests.support.task_rounds import in_round


def visit(experiment: BuiltRun, v: Tensor, others: list[Tensor], client: int = 2) -> tuple[Tensor, list[float]]:
    """What the mixture is that the client would train, and u. The run trains for no epoch."""
    job = ClientTask(client, v, client, {f"w{n}": w for n, w in enumerate(others)})
    (update,) = experiment.engine.train(in_round(0, [job]))
    return update.row.clone(), update.extras["u"].tolist()


@pytest.fixture
def trained():
    """An experiment that trains for no epoch, and models from bad to good for its client 2."""
    with build_small_run("fedavg", {}, validation=0.2, epochs=1).engine_closed() as other:
        rows, row = [other.rounds.context.initial.clone()], other.rounds.context.initial.clone()
        for number in range(3):
            (update,) = other.engine.train(in_round(number, [ClientTask(2, row)]))
            row = update.row.clone()
            rows.append(row)
    with build_small_run("fedfomo", {"fedfomo": {"M": 4}}, epochs=0).engine_closed() as experiment:
        yield experiment, rows


def loss_of(experiment: BuiltRun, row: Tensor, client: int = 2) -> float:
    """On what this client holds out."""
    bench, layout = experiment.engine._trainer, experiment.layout
    memory = TaskMemory(layout.empty(), {}, {"u": torch.zeros(3)})
    train_client(bench, experiment.engine.context, ClientTask(client, row, round=0), memory)
    assert len(bench.validation) == int(0.2 * experiment.data.federated_data.num_examples(client) + 0.5)
    return bench.validate(row).loss


def test_u_is_the_gain_by_the_way(trained) -> None:
    experiment, (bad, fair, good, _) = trained
    _, u = visit(experiment, fair, [bad, good])
    for w, value in zip((bad, good), u[:2], strict=True):
        way = (w - fair)[: experiment.layout.trainable].norm()
        expected = (loss_of(experiment, fair) - loss_of(experiment, w)) / way
        assert value == pytest.approx(float(expected), rel=1e-4)
    assert u[0] < 0 < u[1]
    assert u[2] == 0, "three others were expected, two came"


def test_no_better_model_leaves_its_own_as_it_is(trained) -> None:
    experiment, (bad, fair, good, _) = trained
    mixture, u = visit(experiment, good, [bad, fair, good])
    assert torch.equal(mixture, good)
    assert u[0] < 0
    assert u[1] < 0
    assert u[2] == 0, "a model that equals its own helps by nothing, and nothing is divided by zero"


def test_one_better_model_is_taken_exactly(trained) -> None:
    experiment, (bad, fair, good, _) = trained
    mixture, _ = visit(experiment, fair, [bad, good, fair])
    assert torch.equal(mixture, good)


def test_several_better_ones_are_mixed_by_their_u(trained) -> None:
    experiment, (bad, fair, good, best) = trained
    mixture, u = visit(experiment, bad, [fair, good, best])
    assert min(u) > 0
    floats = experiment.layout.floats
    weights = torch.tensor(u) / sum(u)
    expected = bad + weights @ (torch.stack([fair, good, best]) - bad)
    torch.testing.assert_close(mixture[:floats], expected[:floats], rtol=1e-4, atol=1e-5)


def test_a_model_whose_loss_overflows_helps_by_nothing(trained) -> None:
    experiment, (_, fair, *_) = trained
    huge = fair.clone()
    huge[: experiment.layout.trainable] = 1e38
    mixture, u = visit(experiment, fair, [huge])
    assert torch.equal(mixture, fair)
    assert u == [0.0, 0.0, 0.0]


def test_the_server_keeps_what_clients_sent_and_who_gained_from_whom() -> None:
    with build_small_run("fedfomo", {}, clients_per_round=8).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        first = experiment.rounds.run_round(0)
        assert first["models_down"] == 8, "nobody has sent a model that others could have"
        assert not server.P.any()
        rows = server.bank.rows.clone()
        assert len({tuple(row.tolist()) for row in rows}) == 8
        floats = experiment.layout.floats
        torch.testing.assert_close(server.global_model()[:floats], rows[:, :floats].mean(0), rtol=1e-5, atol=1e-6)

        second = experiment.rounds.run_round(1)
        assert second["models_down"] == 8 * 5
        assert second["bytes_up"] == 8 * (experiment.layout.nbytes + 4 * 4)
        assert all(len(others) == 4 and client not in others for client, others in server._others.items())
        rated = {client: set(server.P[client].nonzero().flatten().tolist()) for client in range(8)}
        assert rated == {client: set(others) for client, others in server._others.items()}
        assert not server.P.diagonal().any()


def test_gains_add_up_over_the_rounds_as_they_are() -> None:
    """Negative ones too; and for those alone whose models were received."""
    with build_small_run("fedfomo", {"fedfomo": {"M": 3, "epsilon": 0.0}}).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        server.sent[:] = 1
        server.P[0] = torch.tensor([0.0, 5.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0])
        for round, u in enumerate([[0.5, -0.25], [1.0, 0.125]]):
            (job,) = server.dispatch(round, [0])
            row = job.row.clone()
            server.aggregate(round, iter([ClientUpdate(job, row, 10, 1.0, 1, {"u": torch.tensor(u)})]))
        assert server.P[0].tolist() == [0.0, 6.5, 3.875, 0.0, 0.0, 0.0, 0.0, 0.0]
        assert not server.P[1:].any()


def test_models_of_a_round_stay_until_its_last_client_has_read_them() -> None:
    """Jobs point at the server's rows; what client 0 sends must not reach client 1 in the same round."""
    with build_small_run("fedfomo", {}, clients_per_round=8).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        experiment.rounds.run_round(0)
        before = server.bank.rows.clone()

        def watched(updates):
            for update in updates:
                assert torch.equal(server.bank.rows, before)
                yield update

        jobs = list(server.dispatch(1, list(range(8))))
        server.aggregate(1, watched(experiment.engine.train(in_round(1, jobs))))
        assert not any(torch.equal(*pair) for pair in zip(server.bank.rows, before, strict=True))


def chosen(epsilon: float, round: int, decay: float = 0.05) -> list[list[int]]:
    options = {"fedfomo": {"M": 4, "epsilon": epsilon, "epsilon_decay": decay}}
    with build_small_run("fedfomo", options).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        server.sent[:] = 1
        server.sent[6] = 0
        server.P[0] = torch.tensor([9.0, 1.0, 5.0, 3.0, 4.0, -1.0, 8.0, 0.0])
        return [server.choose(round + 100 * n, 0) for n in range(200)] if decay == 0 else [server.choose(round, 0)]


def test_the_others_are_those_it_gained_most_from() -> None:
    assert chosen(0.0, 0) == [[2, 4, 3]], "neither itself nor one that has sent nothing"
    assert chosen(0.3, 6) == [[2, 4, 3]], "by then nothing is drawn at random"


def test_each_is_drawn_at_random_with_probability_epsilon() -> None:
    draws = chosen(0.3, 0, decay=0.0)
    assert all(len(set(draw)) == 3 and not {0, 6} & set(draw) for draw in draws)
    # Random draws may give the best one all the same, as one of the six that are left.
    kept = np.mean([draw[0] == 2 for draw in draws])
    assert kept == pytest.approx(0.7 + 0.3 / 6, abs=0.1)
    assert {draw[0] for draw in chosen(1.0, 0, decay=0.0)} == {1, 2, 3, 4, 5, 7}


def test_a_client_alone_with_its_model_trains_it_on() -> None:
    """M = 1: nobody else's model is sent, so models never meet."""
    record = small_run("fedfomo", {"fedfomo": {"M": 1}}).records[-1]
    assert record["models_down"] == record["models_up"] == record["clients"]


def test_clients_that_never_sent_a_model_are_no_candidates_and_use_the_deployed_one() -> None:
    with build_small_run("fedfomo", {}, clients_per_round=3).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        assert torch.equal(server.global_model(), experiment.rounds.context.initial)
        experiment.rounds.run_round(0)
        sent = set(server.sent.nonzero().flatten().tolist())
        assert len(sent) == 3
        assert all(set(server.choose(1, client)) == sent - {client} for client in range(8))
        assert [server.personal_model(c) is not None for c in range(8)] == [c in sent for c in range(8)]


def test_the_runs_own_validation_comes_first() -> None:
    for settings, share in (({}, 0.2), ({"validation": 0.5}, 0.5)):
        with build_small_run("fedfomo", {}, **settings).engine_closed() as experiment:
            assert experiment.engine.context.config.validation == share
