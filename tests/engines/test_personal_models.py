"""Tests of the accuracy of personal models: equal on all engines, no side effects."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.layout import scatter_columns
from fedloom.core.tasks import ClientTask
from fedloom.engines.multiprocess.engine import MultiprocessEngine
from fedloom.errors import RunStopped
from fedloom.methods import Client, Method, Options, register
from fedloom.runs import round as rounds
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.execute import resume
from fedloom.runs.resolve import resolve_run
from fedloom.testing.fixtures import (
    SETTINGS,
    SmallFederatedDataset,
    batch_norm_network,
    build_small_run,
    simple_network,
    small_run,
)
from fedloom.testing.method_checks import _StopAfter
from fedloom.training.context import PERSONAL_KEY
from fedloom.training.trainer import LocalSteps, LocalTrainer
from tests.support.cuda_engine import cuda_of
from tests.support.task_rounds import in_round

METHODS = ["fedbn", "fedrep", "fedbabu", "fedfomo"]
KEYS = ("personal_accuracy_mean", "personal_accuracy_worst10", "personal_clients")


def scored(experiment: BuiltRun, engine: Any = None, played: int = 2) -> list[float | None]:
    """The accuracy of every client's own model."""
    row, server = experiment.rounds.global_model(), experiment.rounds.parts.server
    own = [server.personal_model(client) for client in range(8)]
    jobs = [ClientTask(client, row if mine is None else mine) for client, mine in enumerate(own)]
    return (engine or experiment.engine).evaluate_clients(in_round(played, jobs))


@pytest.mark.parametrize("method", METHODS)
def test_engines_and_workers_agree_to_the_bit(method: str) -> None:
    """After two rounds with half of the clients, so that some have a model of their own and some have none."""
    found = []
    for settings in (
        {"engine": "sequential"},
        {"engine": "multiprocess", "workers": 1},
        {"engine": "multiprocess", "workers": 3},
    ):
        with build_small_run(method, {}, **settings).engine_closed() as experiment:
            records = [experiment.rounds.run_round(number) for number in range(2)]
            found.append(([[record[key] for key in KEYS] for record in records], scored(experiment)))
            if settings["engine"] == "sequential":
                found.append((found[0][0], scored(experiment, cuda_of(experiment))))
    assert all(one == found[0] for one in found[1:])
    assert len(set(found[0][1])) > 3, "clients fare differently"


@pytest.mark.parametrize("method", METHODS)
def test_scoring_leaves_no_trace(method: str) -> None:
    often, seldom = (small_run(method, {}, rounds=5, eval_every=every) for every in (1, 5))
    assert often.digest == seldom.digest
    assert [often.records[-1][key] for key in KEYS] == [seldom.records[-1][key] for key in KEYS]
    assert [key in record for record in seldom.records for key in KEYS] == [False] * 12 + [True] * 3


def test_by_hand() -> None:
    """FedBN's client 3: the server's weights, its own norms, the test set in its own mixture of classes."""
    with build_small_run("fedbn", {}, clients_per_round=8).engine_closed() as experiment:
        record = experiment.rounds.run_round(0)
        row, homes = experiment.rounds.parts.server.global_model().clone(), experiment.engine.client_states
        scatter_columns(
            row, experiment.rounds.parts.client.personal_columns(experiment.layout), homes.get(3)[PERSONAL_KEY]
        )
        module, federation = batch_norm_network(), experiment.data.federated_data
        module.load_state_dict(experiment.layout.state_dict(row))
        module.eval()
        test, mine = federation.test, federation.client_samples(3)
        right = (module(federation.transform(test.x)).argmax(1) == test.y).double()
        classes = [(mine.y == c).sum().item() / len(mine) * right[test.y == c].mean().item() for c in range(10)]
        accuracies = scored(experiment, played=1)
        assert accuracies[3] == pytest.approx(sum(classes), abs=1e-12)
        assert record["personal_accuracy_mean"] == pytest.approx(np.mean(accuracies))
        assert record["personal_accuracy_worst10"] == min(accuracies)
        assert record["personal_clients"] == 8


def test_a_client_that_was_never_asked_uses_the_deployed_model() -> None:
    with build_small_run("fedbn", {}).engine_closed() as experiment:
        experiment.rounds.run_round(0)
        (new, *_) = sorted(set(range(8)) - set(experiment.engine.client_states.client_ids()))
        score = experiment.engine.evaluate(experiment.rounds.global_model())
        counts = np.bincount(experiment.data.federated_data.client_samples(new).y, minlength=10)
        assert scored(experiment)[new] == pytest.approx(score.accuracy_for(counts), abs=1e-12)


def test_clients_with_test_samples_of_their_own_are_tested_on_these(tmp_path: Path) -> None:
    settings = {"data": "digits", "partition": "shards:2", "clients": 8, "rounds": 2, "engine": "sequential"}
    run = fedloom.run("fedbabu", client_test=0.25, out=tmp_path / "run", report=False, **settings)
    with build_run(resolve_run(run.config)).engine_closed() as experiment:
        federation = experiment.data.federated_data
        assert [int(n) for n in np.bincount(federation.test_owners)] == [
            round(len(federation.client_samples(k)) / 3) for k in range(8)
        ]
        owners = federation.test_owners
        for client in range(8):
            assert set(federation.test.y[owners == client].tolist()) <= set(
                federation.client_samples(client).y.tolist()
            )
        # With all test samples of two clients given to client 0, clients without any have no score.
        federation.test_owners = np.where(owners < 2, 0, owners)
        accuracies = scored(experiment)
        assert accuracies[1] is None
        whole = experiment.engine.evaluate_clients(in_round(2, [ClientTask(0, experiment.rounds.global_model())]))
        assert accuracies[0] == whole[0]
        step = accuracies[0] * int((owners < 2).sum())
        assert step == pytest.approx(round(step), abs=1e-9), "a share of its own test samples"
    assert run.history[-1]["personal_clients"] == 8


def test_clients_without_samples_are_left_out() -> None:
    records = small_run("fedbabu", {}, federated_data=SmallFederatedDataset(sizes={0: 0, 5: 0, 1: 1})).records
    assert {record["personal_clients"] for record in records} == {6}


def test_of_many_clients_the_same_few_are_scored_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MOST_PERSONAL", 3)
    with build_small_run("fedbn", {}).engine_closed() as experiment:
        asked: list[list[int]] = []
        score = experiment.engine.evaluate_clients
        experiment.engine.evaluate_clients = lambda jobs: asked.append([j.client_id for j in jobs]) or score(jobs)
        records = [experiment.rounds.run_round(number) for number in range(2)]
        assert [record["personal_clients"] for record in records] == [3, 3]
        assert asked[0] == asked[1] == sorted(set(asked[0]))
        assert len(asked[0]) == 3


def test_methods_with_one_model_for_all_have_no_such_scores() -> None:
    for method in ("fedavg", "scaffold", "fedcross"):
        assert not any(key in record for record in small_run(method, {}).records for key in KEYS)


class Fragile(Client[Options]):
    """Cannot make client 2's own model."""

    def personalize(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step, steps=1)
        if trainer.client_id == 2:
            raise RuntimeError("out of luck")


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_a_client_that_fails_is_left_out_and_the_run_goes_on(engine: str) -> None:
    register(Method("fragile", "", "", client=Fragile))
    records = small_run("fragile", {}, engine=engine, workers=2).records
    assert {record["personal_clients"] for record in records} == {7}


class Dying(Client[Options]):
    """The first worker that makes client 3's own model is killed."""

    place: Path

    def personalize(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step, steps=1)
        if trainer.client_id == 3 and not self.place.exists():
            self.place.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_replaced_and_its_client_scored(tmp_path: Path) -> None:
    register(Method("dying", "", "", client=Dying))
    Dying.place = tmp_path / "died"
    with build_small_run("dying", {}, engine="multiprocess", workers=2).engine_closed() as experiment:
        interrupted = scored(experiment)
        assert isinstance(experiment.engine, MultiprocessEngine)
        assert experiment.engine.num_dead_workers == 1
        assert scored(experiment) == interrupted
        assert None not in interrupted


def test_few_slots_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with build_small_run("fedrep", {}, engine="multiprocess", workers=1).engine_closed() as experiment:
        expected = scored(experiment)
    monkeypatch.setattr("fedloom.engines.multiprocess.engine.SLOT_MEMORY", 1)
    with build_small_run("fedrep", {}, engine="multiprocess", workers=1).engine_closed() as experiment:
        assert len(experiment.engine._slots) == 4
        assert scored(experiment) == expected


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_records_the_same(method: str, tmp_path: Path) -> None:
    whole = [[record[key] for key in KEYS] for record in small_run(method, {}).records]
    federation, out = SmallFederatedDataset(), tmp_path / "run"
    with pytest.raises(RunStopped):
        fedloom.run(
            method, federation, batch_norm_network, callbacks=[_StopAfter(2)], out=out, report=False, **SETTINGS
        )
    history = resume(out, data=federation, model=batch_norm_network, report=False).history[1:]
    assert [[record[key] for key in KEYS] for record in history] == whole


def test_statistics_are_estimated_for_a_fine_tuned_model_too() -> None:
    running, estimated = (
        [record["personal_accuracy_mean"] for record in small_run("fedbabu", {}, statistics=how).records]
        for how in ("running", "estimated")
    )
    assert running != estimated


def test_a_regression_has_no_accuracy_to_score() -> None:
    x = torch.randn(8, 6, 64)
    clients = [(part, part[:, :10] * 2) for part in x]
    data = fedloom.FederatedDataset.from_arrays(clients, test=clients[0])
    assert not any(key in record for record in small_run("fedrep", {}, federated_data=data).records for key in KEYS)
    assert small_run("fedrep", {}, federated_data=data, model=simple_network).loss > 0
