"""Tests of the brackets: local, each client alone, and centralized."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedloom
from fedloom.core.layout import model_digest
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.data import FederatedDataset, Samples
from fedloom.errors import InputError, RunStopped
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import SmallFederatedDataset, batch_norm_network, build_small_run, simple_network
from fedloom.training.context import PERSONAL_KEY
from tests.support.callbacks import Eye
from tests.support.task_rounds import in_round

ENGINES: list[dict[str, Any]] = [{"engine": "sequential"}, {"engine": "multiprocess", "workers": 2}]
ALL = 8


def only_client() -> FederatedDataset:
    """All samples of the small data at one client."""
    data = SmallFederatedDataset()
    parts = [data.client_samples(client_id) for client_id in range(len(data))]
    everything = Samples(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
    return FederatedDataset.from_arrays([(everything.x, everything.y)], test=data.test, classes=10)


def played(method: str, rounds: int = 3, options: Any = None, **settings: Any) -> tuple[BuiltRun, list[dict[str, Any]]]:
    """A run after some rounds, and its records."""
    with build_small_run(method, options or {}, **settings).engine_closed() as built_run:
        return built_run, [built_run.rounds.run_round(round) for round in range(rounds)]


def digest_of(method: str, **settings: Any) -> str:
    return played(method, **settings)[0].rounds.digest()


# One client


@pytest.mark.parametrize("network", [simple_network, batch_norm_network], ids=["plain", "normed"])
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine["engine"])
def test_with_one_client_fedavg_and_the_brackets_are_the_same(
    engine: dict[str, Any], network: Callable[..., Any]
) -> None:
    for given in ({"steps": 5}, {"epochs": 2}, {"steps": 60, "validation": 0.2, "weight_decay": 0.01}):
        settings = {**engine, **given, "federated_data": only_client(), "clients_per_round": 1, "model": network}
        expected = digest_of("fedavg", **settings)
        assert digest_of("centralized", **settings) == expected
        assert digest_of("local", **settings) == expected


@pytest.mark.parametrize("optimizer", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}], ids=["momentum", "adam"])
def test_the_optimizer_of_centralized_lives_on(optimizer: dict[str, Any]) -> None:
    settings = {**optimizer, "federated_data": only_client(), "clients_per_round": 1}
    ours, fresh = digest_of("centralized", **settings), digest_of("fedavg", **settings)
    assert ours == digest_of("fedavg", keep_optimizer=True, **settings) != fresh
    assert ours == digest_of("centralized", keep_optimizer=True, **settings)


# Centralized


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine["engine"])
def test_full_batches_of_all_clients_make_fedavg_centralized(engine: dict[str, Any]) -> None:
    settings = {**engine, "clients_per_round": ALL, "epochs": 1, "batch_size": 0, "model": simple_network}
    fedavg, _ = played("fedavg", **settings)
    ours, _ = played("centralized", options={"centralized": {"budget": "epochs"}}, **settings)
    expected, found = fedavg.rounds.global_model(), ours.rounds.global_model()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, ours.rounds.context.initial, atol=1e-3)


def steps_of_a_round(method: str, round: int, **settings: Any) -> int:
    with build_small_run(method, settings.pop("options", {}), **settings).engine_closed() as built_run:
        server = built_run.rounds.parts.server
        tasks = list(server.dispatch(round, server.sample_clients(round)))
        updates = list(built_run.engine.train(in_round(round, tasks)))
        assert all(isinstance(update, ClientUpdate) for update in updates)
        return sum(update.steps for update in updates if isinstance(update, ClientUpdate))


@pytest.mark.parametrize("given", [{}, {"steps": 3}, {"batch_size": 0}, {"validation": 0.3, "batch_size": 5}], ids=str)
def test_it_makes_the_steps_of_the_clients_of_the_round(given: dict[str, Any]) -> None:
    settings = {**given, "federated_data": SmallFederatedDataset({0: 0, 1: 1, 2: 2})}
    found = [steps_of_a_round("centralized", round, **settings) for round in range(3)]
    assert found == [steps_of_a_round("fedavg", round, **settings) for round in range(3)]
    assert len(set(found)) > 1 or "batch_size" in given or "steps" in given


def test_or_passes_over_all_samples() -> None:
    options = {"centralized": {"budget": "epochs"}}
    assert steps_of_a_round("centralized", 0, options=options, epochs=3, batch_size=100) == 3 * 4  # 320 samples


def test_its_pool_is_the_training_samples_of_all_clients() -> None:
    plain = SmallFederatedDataset()
    with build_small_run("centralized", {}).engine_closed() as built_run:
        pool = built_run.engine.context.data.client_samples(0)
    assert torch.equal(pool.x, torch.cat([plain.client_samples(k).x for k in range(ALL)]))
    assert torch.equal(pool.y, torch.cat([plain.client_samples(k).y for k in range(ALL)]))


def test_samples_for_validation_stay_outside_the_pool() -> None:
    """The same ones as in the federation."""
    with build_small_run("fedavg", {}, validation=0.25).engine_closed() as built_run:
        sizes = [update.num_examples for update in trained(built_run, list(range(ALL)))]
    with build_small_run("centralized", {}, validation=0.25).engine_closed() as built_run:
        (update,) = trained(built_run, list(range(ALL)))
    assert update.num_examples == sum(sizes) < 320


def trained(built_run: BuiltRun, client_ids: list[int]) -> list[ClientUpdate]:
    answers = built_run.engine.train(in_round(0, list(built_run.rounds.parts.server.dispatch(0, client_ids))))
    return [answer for answer in answers if isinstance(answer, ClientUpdate)]


def test_it_sends_the_samples_once() -> None:
    _, records = played("centralized")
    assert [record["bytes_up"] for record in records] == [320 * (64 * 4 + 8), 0, 0]
    assert not any(record["bytes_down"] for record in records)


def test_the_model_is_scored_for_the_clients_as_fedavgs(tmp_path: Path) -> None:
    """By the classes of the clients, although the engine sees all samples at one of them."""
    made = {
        method: fedloom.run(method, clients=6, rounds=1, lr=0.0, out=tmp_path / method, report=False)
        for method in ("fedavg", "centralized")
    }
    names = ("accuracy", "client_accuracy_mean", "client_accuracy_worst10")
    assert [made["fedavg"].summary[name] for name in names] == [made["centralized"].summary[name] for name in names]


# Local


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine["engine"])
def test_each_client_goes_on_from_its_own_model(engine: dict[str, Any]) -> None:
    """Against FedAvg's clients, who get their own last model by hand."""
    ours, _ = played("local", rounds=4, **engine)
    rows: dict[int, Tensor] = {}
    with build_small_run("fedavg", {}).engine_closed() as built_run:
        for round in range(4):
            for client_id in built_run.rounds.parts.server.sample_clients(round):
                row = rows.get(client_id, built_run.rounds.context.initial)
                (update,) = built_run.engine.train(in_round(round, [ClientTask(client_id, row)]))
                assert isinstance(update, ClientUpdate)
                rows[client_id] = update.row.clone()
    states = ours.engine.client_states
    assert states.client_ids() == sorted(rows)
    assert all(torch.equal(states.get(client_id)[PERSONAL_KEY], row) for client_id, row in rows.items())
    assert ours.rounds.digest() == model_digest(torch.cat([rows[client_id] for client_id in sorted(rows)]))


def test_it_sends_nothing_and_scores_only_the_clients() -> None:
    _, records = played("local")
    for record in records:
        assert not any(record[name] for name in ("bytes_down", "bytes_up", "models_down", "models_up"))
        assert "accuracy" not in record
        assert record["personal_accuracy_worst10"] <= record["personal_accuracy_mean"] <= 1
    assert records[-1]["personal_accuracy_mean"] > 0.5


def test_a_run_has_no_model_file_and_is_resumed_and_verified(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 3, "clients": 4, "report": False}
    whole = fedloom.run("local", out=tmp_path / "whole", **settings)
    with pytest.raises(RunStopped):
        fedloom.run("local", out=tmp_path / "part", callbacks=[Eye(stop_after=2)], **settings)
    assert fedloom.resume(tmp_path / "part", engine="sequential").digest == whole.digest
    assert fedloom.resume(tmp_path / "part").digest == whole.digest  # it has finished
    assert fedloom.verify(tmp_path / "whole") == (whole.digest, whole.digest)
    assert not (whole.path / "model.safetensors").exists()
    assert whole.accuracy is None
    with pytest.raises(InputError, match="has no global model: in local, each client has its own"):
        whole.model()
    with pytest.raises(InputError, match="has no global model, because each client has its own; choose another run"):
        fedloom.run("fedavg", init=str(whole.path), out=tmp_path / "next")


# Both


@pytest.mark.parametrize("method", ["local", "centralized"])
def test_they_run_without_privacy_and_say_so(method: str, tmp_path: Path, command: Callable[..., Any]) -> None:
    given = ("--rounds", 1, "--clip-update", 1, "--noise", 1, "--model", "logreg", "--out", tmp_path / "run")
    done = command("run", method, *given)
    assert done.code == 0
    assert f"{method} trains without privacy" in done.err
    assert "epsilon" not in done.out


def test_more_clients_may_be_asked_for_than_one() -> None:
    _, records = played("centralized", min_clients=4)
    assert records[-1]["train_loss"] < records[0]["train_loss"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run local+fedprox", "local is not federated, so no part of another method has anything to do"),
        ("run fedcross+centralized", "centralized is not federated"),
        ("run centralized --engine flower --device cpu", "those of sites stay there"),
        ("run local --engine flower --device cpu", "sites have nothing to do together"),
        ("run centralized:budget=epochs --steps 3", "counts passes over all samples, but steps is 3"),
        ("run centralized:budget=days", "budget"),
    ],
)
def test_what_cannot_be_is_refused(words: str, told: str, command: Callable[..., Any]) -> None:
    done = command(*words.split())
    assert done.code == 2
    assert told in " ".join(done.err.split())
    assert not Path("runs").exists()


def test_a_comparison_shows_both(tmp_path: Path) -> None:
    compared = fedloom.compare(["local", "fedavg", "centralized"], rounds=2, clients=5, out=tmp_path / "runs")
    assert [group.label for group in compared.table.groups] == ["local", "fedavg", "centralized"]
    text = (tmp_path / "runs" / "report.html").read_text()
    assert "local has no global model" in text
    assert np.isfinite(compared.runs[0].summary["personal_accuracy_mean"])
