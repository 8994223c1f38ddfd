"""Tests of clients that never train."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom import FederatedDataset
from fedloom.core.rng import RngStreams
from fedloom.core.tasks import ClientTask
from fedloom.data import PartitionedDataset, Samples
from fedloom.data.held_out import draw_held_out_clients
from fedloom.errors import InputError, RunStopped
from fedloom.privacy import PrivacyAccountant
from fedloom.runs.build import build_run
from fedloom.runs.load_data import load_run_data
from fedloom.runs.resolve import RunRequest, UserObjects, resolve_config, resolve_run
from fedloom.testing.fixtures import SmallFederatedDataset
from fedloom.testing.method_checks import _StopAfter
from tests.support.cuda_engine import cuda_of

CLIENTS, HELD = 8, 2
IDS = draw_held_out_clients(CLIENTS, HELD, RngStreams(0).numpy("held-out clients")).tolist()
"""The held-out clients of seed 0."""
TINY: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "logreg", "engine": "sequential", "report": False}
MLP: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "mlp", "engine": "sequential"}
SHARE: dict[str, Any] = {"held_out_clients": 0.25}
KEYS = ("held_out_accuracy_mean", "held_out_accuracy_worst10", "held_out_scored")

Y = np.arange(240) % 3
X = (np.random.default_rng(0).normal(size=(240, 4)) + Y[:, None]).astype(np.float32)
OWNER = np.arange(240) // 3 % CLIENTS


def clients(kept: list[int]) -> FederatedDataset:
    """Some of eight clients with their own samples."""
    parts = [(X[k == OWNER], Y[k == OWNER]) for k in kept]
    return FederatedDataset.from_arrays(parts, test=(X[:60], Y[:60]))


def request(data: str | FederatedDataset = "digits", **settings: Any) -> RunRequest:
    if isinstance(data, str):
        return resolve_run(resolve_config({"method": "fedavg", "data": data, **settings}))
    objects, named = UserObjects(data), {"data": data.name, "partition": "own", "clients": len(data)}
    return resolve_run(resolve_config({"method": "fedavg", **named, **settings}, objects), objects)


def trained(run: fedloom.RunResult) -> list[dict[str, Any]]:
    """The records without time and without the held-out clients."""
    return [{key: value for key, value in row.items() if key not in ("seconds", *KEYS)} for row in run.history]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedcross", "fedfomo", "clusamp", "feddf:steps=2"])
def test_a_run_equals_one_whose_data_lack_these_clients(method: str, tmp_path: Path) -> None:
    """So they are never sampled, weighted or counted, whatever a server keeps for each client."""
    some = {"clients_per_round": 3}
    whole, rest = clients(list(range(CLIENTS))), clients([k for k in range(CLIENTS) if k not in IDS])
    for data in (whole, rest):
        data.server_data = Samples(torch.from_numpy(X[:30]), torch.from_numpy(Y[:30]))
    run = fedloom.run(method, whole, out=tmp_path / "a", **TINY, **SHARE, **some)
    alone = fedloom.run(method, rest, out=tmp_path / "b", **TINY, **some)
    assert run.digest == alone.digest
    assert trained(run) == trained(alone)
    assert run.config.clients == CLIENTS
    assert [set(row) & set(KEYS) for row in run.history] == [set(KEYS)] * 3
    assert not [key for row in alone.history for key in row if "held" in key]
    assert not [key for key in alone.summary if "held" in key]
    assert "held" not in (alone.path / "config.toml").read_text()


def test_all_samples_of_each_client_are_scored(tmp_path: Path) -> None:
    """Compared with the network of the result, outside of any engine."""
    run = fedloom.run("fedavg", clients(list(range(CLIENTS))), out=tmp_path / "run", **TINY, **SHARE)
    network, accuracies = run.model(), []
    for k in IDS:
        guessed = network(torch.from_numpy(X[k == OWNER])).argmax(1).numpy()
        accuracies.append(float((guessed == Y[k == OWNER]).mean()))
    last = run.history[-1]
    assert [last[key] for key in KEYS] == [pytest.approx(np.mean(accuracies)), min(accuracies), HELD]
    assert run.held_out_accuracy == run.summary["held_out_accuracy_mean"] == last["held_out_accuracy_mean"]
    assert (run.summary["held_out_accuracy_worst10"], run.summary["held_out_scored"]) == (min(accuracies), HELD)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedrep", "fedbabu", "fedfomo"])
def test_engines_agree(method: str, tmp_path: Path) -> None:
    found = []
    for name, engine in enumerate(({"engine": "sequential"}, {"engine": "multiprocess", "workers": 2})):
        settings = {**TINY, "model": "mlp", "clients": 8, "client_test": 0.3, "partition": "iid", **SHARE, **engine}
        run = fedloom.run(method, "digits", out=tmp_path / str(name), **settings)
        found.append(([[row[key] for key in KEYS] for row in run.history], run.digest))
    assert found[0] == found[1]
    assert found[0][0][-1][2] == HELD


def test_methods_share_the_clients_and_seeds_draw_others() -> None:
    def drawn(seed: int, **settings: Any) -> set[int]:
        held_out = load_run_data(request(seed=seed, clients=30, **SHARE, **settings), RngStreams(seed)).held_out
        assert held_out is not None
        return set(held_out.client_ids)

    assert drawn(0) == drawn(0, method="scaffold", lr=0.3) == drawn(0, method="abavg")
    assert len(drawn(0)) == 8
    assert drawn(0) != drawn(1)


@pytest.mark.parametrize(("share", "clients", "count"), [(0.01, 5, 1), (0.2, 20, 4), (0.5, 5, 3), (0.1, 20, 2)])
def test_the_share_is_rounded_and_at_least_one(share: float, clients: int, count: int) -> None:
    data = load_run_data(request(clients=clients, held_out_clients=share), RngStreams(0))
    assert data.held_out is not None
    assert (len(data.held_out), len(data.federated_data)) == (count, clients - count)


@pytest.mark.parametrize(
    "settings", [{"server_data": "split:0.3"}, {"client_test": 0.3, "server_data": "split:50"}, {}]
)
@pytest.mark.parametrize("partition", ["natural", "dirichlet:0.5", "labels:2"])
def test_no_sample_has_two_uses(partition: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Training, server, held-out clients and test samples are disjoint, and held-out clients keep all they have."""
    x = np.arange(240, dtype=np.float32)[:, None]
    np.savez(tmp_path / "own.npz", x=x, y=Y, owner=OWNER)
    count = {} if partition == "natural" else {"clients": CLIENTS}
    values = {"data": f"arrays:{tmp_path / 'own.npz'}", "partition": partition, **count, **settings}
    data = load_run_data(request(**values, **SHARE), RngStreams(0))
    assert data.held_out is not None

    def numbers(samples: Samples | None) -> list[int]:
        return [] if samples is None else samples.x.flatten().int().tolist()

    train = [n for k in range(len(data.federated_data)) for n in numbers(data.federated_data.client_samples(k))]
    new, tested = [], []
    for k in range(len(data.held_out)):
        adapted, own = data.held_out.samples(k)
        new += numbers(adapted)
        tested += numbers(own) if data.held_out.have_test_samples else []
    server = [] if data.server_data is None else numbers(data.server_data.samples)
    uses = [*train, *new, *tested, *server, *numbers(data.federated_data.test)]
    assert len(uses) == len(set(uses))
    assert bool(server) == ("server_data" in settings)
    if partition == "natural":
        owners = {k: set(OWNER[part].tolist()) for k, part in (("new", [*new, *tested]), ("old", [*train, *server]))}
        assert owners["new"] == set(data.held_out.client_ids)
        assert not owners["new"] & owners["old"]


def write_csv(path: Path, x: np.ndarray) -> None:
    """A table in which a client's rows come from one owner."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["a", "b", "word", "label", "owner"])
        rows.writerows([x[i, 0], x[i, 1], f"w{int(x[i, 2])}", Y[i], f"o{OWNER[i]}"] for i in range(len(Y)))


def test_tables_are_standardized_without_them(tmp_path: Path) -> None:
    """Whatever stands in the rows of these clients, the model is the same. With all rows it is not."""
    digests = []
    for name, factor in (("plain", 1.0), ("wild", 50.0)):
        x = X.copy()
        x[np.isin(OWNER, IDS)] *= factor
        write_csv(tmp_path / f"{name}.csv", x)
        settings: dict[str, Any] = {"partition": "natural", "clients_per_round": 3, **TINY, **SHARE}
        for options in ({}, {"server_data": "split:0.2"}, {"classes": "0,2"}, {"held_out_clients": None}):
            out, data = tmp_path / f"{name}{len(digests)}", f"{tmp_path / name}.csv,owner=owner"
            run = fedloom.run("fedavg", data, out=out, **{**settings, **options})
            digests.append(run.digest)
    plain, wild = digests[:4], digests[4:]
    assert plain[:3] == wild[:3]
    assert plain[3] != wild[3]


@pytest.mark.parametrize("kind", ["object", "named"])
def test_measured_normalization_leaves_them_out(kind: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    images, found = draw.integers(0, 200, size=(240, 6, 6, 1), dtype=np.uint8), []
    for name, values in (("plain", images), ("wild", images.copy())):
        if name == "wild":
            values[np.isin(OWNER, IDS)] = 255
        if kind == "object":
            parts = [np.flatnonzero(k == OWNER) for k in range(CLIENTS)]
            pool = Samples(torch.from_numpy(values), torch.from_numpy(Y))
            asked = request(PartitionedDataset(pool, parts, classes=3), normalize="mean-std", **SHARE)
        else:
            path = tmp_path / f"{name}.npz"
            np.savez(path, x=values, y=Y, owner=OWNER, test_x=images[:9], test_y=Y[:9])
            asked = request(data=f"arrays:{path}", partition="natural", normalize="mean-std", **SHARE)
        data = load_run_data(asked, RngStreams(0))
        assert data.held_out is not None
        assert sorted(data.held_out.client_ids) == sorted(IDS)
        assert data.held_out.federated_data.transform == data.federated_data.transform
        found.append(data.federated_data.transform)
    assert found[0] == found[1]


def test_with_client_test_they_have_training_and_test_samples() -> None:
    data = load_run_data(request(clients=8, client_test=0.25, **SHARE), RngStreams(0))
    assert data.held_out is not None
    assert data.federated_data.test_owners is not None
    assert set(data.federated_data.test_owners) == set(range(6))
    for k in range(HELD):
        train, test = data.held_out.samples(k)
        assert len(test) == int(0.25 * (len(train) + len(test)) + 0.5)


def test_methods_that_adapt_need_test_samples(tmp_path: Path) -> None:
    """Also in a comparison, before its first run."""
    text = "fedrep adapts the model to a new client's training samples, so held-out clients need other samples"
    settings = {**TINY, **SHARE, "model": "mlp", "clients": 8}
    with pytest.raises(InputError, match=text):
        fedloom.run("fedrep", "digits", out=tmp_path / "run", **settings)
    with pytest.raises(InputError, match=text):
        fedloom.compare(["fedavg", "fedrep"], data="digits", out=tmp_path / "both", **settings)
    assert not list(tmp_path.iterdir())


def test_a_new_client_is_adapted_and_its_state_is_not_kept(tmp_path: Path) -> None:
    """FedBABU's fine-tuning helps a new client; the model that it starts from is the same without it."""
    settings = {**TINY, "model": "mlp", "clients": 8, "client_test": 0.3, "partition": "shards:2", **SHARE}
    runs = [
        fedloom.run(f"fedbabu:finetune_epochs={epochs}", "digits", out=tmp_path / str(epochs), **settings)
        for epochs in (0, 5)
    ]
    assert runs[0].digest == runs[1].digest
    before, after = (run.held_out_accuracy for run in runs)
    assert before is not None
    assert after is not None
    assert after > before + 0.2


def test_epsilon_counts_the_training_clients() -> None:
    settings = {"clip_update": 1.0, "noise": 1.0, "clients": 8, "clients_per_round": 2, "rounds": 2, "model": "logreg"}
    run = fedloom.run("fedavg", "digits", report=False, epochs=1, **SHARE, **settings)
    expected = PrivacyAccountant(1.0, 2 / 6, 6**-1.1)
    assert run.summary["epsilon"] == expected.epsilon(2)
    assert run.summary["delta"] == 6**-1.1


def test_data_of_each_seed_have_their_own(tmp_path: Path) -> None:
    def make(seed: int) -> FederatedDataset:
        return FederatedDataset.from_pool(X, Y, partition="iid", clients=12, seed=seed)

    done = fedloom.compare(["fedavg", "fedprox"], 2, make, "logreg", out=tmp_path / "c", rounds=1, **SHARE)
    text = [(run.path / "config.toml").read_text() for run in done.runs]
    ids = [one[one.index("held_out_client_ids") :].partition("]")[0] for one in text]
    assert ids[:2] == ids[2:]
    assert ids[0] != ids[1]
    assert all(run.summary["held_out_scored"] == 3 for run in done.runs)


def test_clients_without_samples_are_not_counted() -> None:
    data = SmallFederatedDataset({IDS[0]: 0})
    run = fedloom.run("fedavg", data, **TINY, **SHARE)
    assert run.history[-1]["held_out_scored"] == 1
    empty = fedloom.run("fedavg", SmallFederatedDataset(dict.fromkeys(IDS, 0)), **TINY, **SHARE)
    assert empty.history[-1]["held_out_scored"] == 0
    assert empty.held_out_accuracy is None


def test_data_without_a_common_test_set_are_scored_on_them() -> None:
    data = SmallFederatedDataset()
    data.test = None
    run = fedloom.run("fedavg", data, **TINY, **SHARE)
    assert run.accuracy is None
    assert run.held_out_accuracy is not None


def test_a_resumed_run_has_the_same_records(tmp_path: Path) -> None:
    settings = {**TINY, "rounds": 3, "clients": 8, **SHARE}
    whole = fedloom.run("scaffold", "digits", out=tmp_path / "whole", **settings)
    with pytest.raises(RunStopped):
        fedloom.run("scaffold", "digits", out=tmp_path / "part", callbacks=[_StopAfter(1)], **settings)
    part = fedloom.resume(tmp_path / "part")
    assert [{**row, "seconds": 0} for row in part.history] == [{**row, "seconds": 0} for row in whole.history]
    assert fedloom.verify(tmp_path / "part") == (whole.digest, whole.digest)


Command = Callable[..., Any]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"held_out_clients": 0}, "held_out_clients must be greater than 0"),
        ({"held_out_clients": 1}, "held_out_clients must be less than 1"),
        ({"held_out_clients": -0.5}, "held_out_clients must be greater than 0"),
        ({"held_out_clients": "some"}, "held_out_clients must be a number"),
        ({"held_out_clients": 0.2, "clients": 1}, "held_out_clients is 0.2, which takes the only client away"),
        ({"held_out_clients": 0.99}, "held_out_clients is 0.99, which takes all 20 clients away from training"),
        (
            {"held_out_clients": 0.5, "clients_per_round": 12},
            "clients_per_round is 12, but held_out_clients 0.5 leaves only 10 of 20 for training",
        ),
        ({"held_out_clients": 0.2, "engine": "flower", "device": "cpu"}, "the samples of sites are not here"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=text):
        fedloom.run("fedavg", "digits", out=tmp_path / "run", **{"rounds": 1, **settings})
    assert not list(tmp_path.iterdir())


def test_the_number_of_clients_may_come_from_the_data(tmp_path: Path) -> None:
    write_csv(tmp_path / "own.csv", X)
    data = f"{tmp_path / 'own.csv'},owner=owner"
    text = "clients_per_round is 7, but held_out_clients 0.25 leaves only 6 of 8 for training"
    with pytest.raises(InputError, match=text):
        fedloom.run("fedavg", data, out=tmp_path / "run", partition="natural", clients_per_round=7, **TINY, **SHARE)
    run = fedloom.run("fedavg", data, out=tmp_path / "run", partition="natural", **TINY, **SHARE)
    assert (run.config.clients, run.history[-1]["clients"]) == (8, 6)


def test_regressions_are_refused() -> None:
    data = FederatedDataset.from_arrays([(X[:9], X[:9, :1])] * 4)
    with pytest.raises(InputError, match="held_out_clients reports accuracies, but 'own' is a regression"):
        fedloom.run("fedavg", data, **TINY, **SHARE)


def test_the_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fedloom.cli.main import main

    few = ["--rounds", "1", "--epochs", "1", "--model", "logreg", "--quiet", "--held-out-clients", "0.2"]
    with pytest.raises(SystemExit) as done:
        main(["run", "fedavg", "--out", str(tmp_path / "run"), *few])
    assert not done.value.code
    assert "for 4 clients that never trained" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        main(["compare", "fedavg", "fedprox", "--json", "--out", str(tmp_path / "both"), *few])
    assert not done.value.code
    found = json.loads(capsys.readouterr().out)
    assert [one["methods"] for one in found["protocol"]] == [["fedavg", "fedprox"]]
    assert "4 of 20 clients never trained" in found["protocol"][0]["held_out"]


@pytest.mark.parametrize("method", ["fedavg", "fedbabu"])
def test_the_cuda_engine_agrees_on_a_cpu(method: str) -> None:
    asked = request(method=method, clients=8, client_test=0.3, **MLP, **SHARE)
    with build_run(asked).engine_closed() as run:
        run.rounds.run_round(0)
        tasks = [ClientTask(k, run.rounds.global_model(), round=1) for k in range(6, 8)]
        expected = run.engine.evaluate_clients(tasks)
        assert cuda_of(run).evaluate_clients(tasks) == expected
    assert None not in expected
