"""Tests of test samples that clients hold out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedloom
from fedloom import FederatedDataset
from fedloom.data import Dataset, PartitionedDataset, Samples, merge_train_and_test, split_client_tests
from fedloom.data import partition_dataset as build_federation
from fedloom.data.dataset import NO_OWNER
from fedloom.errors import InputError
from fedloom.runs.build import build_run
from fedloom.runs.resolve import resolve_run


def numbered(first: int, count: int) -> Samples:
    x = torch.arange(first, first + count)
    return Samples(x.float().unsqueeze(1), x % 3)


def dataset(**more: Any) -> Dataset:
    return Dataset(numbered(0, 8), numbered(8, 4), ("a", "b", "c"), name="numbers", **more)


def test_merged_samples_are_all_there_once() -> None:
    merged = merge_train_and_test(dataset())
    assert merged.train.x.flatten().tolist() == list(range(12))
    assert torch.equal(merged.train.y, torch.arange(12) % 3)
    assert len(merged.test) == 0


def test_merged_samples_keep_their_owners_and_domains() -> None:
    owners = {"owners": np.arange(8) % 2, "test_owners": np.array([1, 0, 1, 1]), "owner_names": ("a", "b")}
    domains = {"domains": np.arange(8) // 4, "test_domains": np.array([0, 0, 1, 1]), "domain_names": ("p", "q")}
    merged = merge_train_and_test(dataset(**owners, **domains))
    assert merged.train.x.flatten().tolist() == list(range(12))
    assert merged.owners is not None
    assert merged.domains is not None
    assert merged.owners.tolist() == [0, 1] * 4 + [1, 0, 1, 1]
    assert merged.domains.tolist() == [0] * 4 + [1] * 4 + [0, 0, 1, 1]
    assert (merged.test_owners, merged.test_domains, len(merged.test)) == (None, None, 0)


@pytest.mark.parametrize("test_owners", [None, np.array([0, 1, NO_OWNER, 0])])
def test_test_samples_of_nobody_are_left_out(test_owners: np.ndarray | None) -> None:
    merged = merge_train_and_test(dataset(owners=np.arange(8) % 2, owner_names=("a", "b"), test_owners=test_owners))
    assert len(merged.train) == 8
    assert len(merged.test) == 0
    assert merged.notes == ("the 4 test samples of 'numbers' are left out: whose they are is not known.",)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.floats(0.05, 0.95), st.integers(0, 5))
def test_every_client_holds_out_its_share(sizes: list[int], share: float, seed: int) -> None:
    pool = numbered(0, sum(sizes))
    parts = np.split(np.random.default_rng(seed).permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    whole = PartitionedDataset(pool, parts, classes=3)
    held = [min(int(share * size + 0.5), max(0, size - 1)) for size in sizes]
    if not sum(held):
        with pytest.raises(InputError, match="no client has enough samples"):
            split_client_tests(whole, share, np.random.default_rng(seed))
        return
    made = split_client_tests(whole, share, np.random.default_rng(seed))
    assert made.test is not None
    tested = made.test.x.flatten().int().tolist()
    start = 0
    for k, size in enumerate(sizes):
        own = tested[start : start + held[k]]
        start += held[k]
        assert made.num_examples(k) == size - held[k]
        assert sorted(own + made.client_samples(k).x.flatten().int().tolist()) == sorted(parts[k].tolist())
    assert start == len(tested)
    again = split_client_tests(whole, share, np.random.default_rng(seed))
    assert again.test is not None
    assert torch.equal(again.test.x, made.test.x)


@st.composite
def owned(draw: st.DrawFn) -> Dataset:
    """Numbers whose owners, or domains, are known, of test samples too; of some of these nobody is it."""
    owners = draw(st.integers(1, 4))
    train = draw(st.lists(st.integers(0, owners - 1), min_size=1, max_size=20))
    test = draw(st.lists(st.integers(NO_OWNER, owners - 1), min_size=1, max_size=20))
    marks: dict[str, Any] = {"owners": np.array(train), "test_owners": np.array(test)}
    marks["owner_names"] = marks["domain_names"] = tuple("abcd"[:owners])
    marks |= {"domains": marks["owners"], "test_domains": marks["test_owners"]}
    samples = numbered(0, len(train)), numbered(100, len(test))
    return Dataset(*samples, ("x", "y", "z"), name="owned", **marks)


@settings(max_examples=80, deadline=None)
@given(owned(), st.sampled_from(["natural", "domain"]), st.integers(1, 6), st.integers(0, 3))
def test_clients_are_tested_on_samples_of_their_owner_or_domain(
    data: Dataset, spec: str, clients: int, seed: int
) -> None:
    assert data.owners is not None
    assert data.test_owners is not None
    try:
        made = build_federation(data, spec, clients, np.random.default_rng(seed))
    except InputError:
        return  # more clients than owners, or than samples of a domain
    whose = [set(data.owners[part].tolist()) for part in made.client_indices]
    assert all(len(owners) == 1 for owners in whose)
    taking_part = set().union(*whose)
    theirs = [100 + i for i, owner in enumerate(data.test_owners.tolist()) if owner in taking_part]
    assert made.test is not None
    if not theirs:
        assert made.test_owners is None
        assert len(made.test) == len(data.test), "strangers are tested on as before"
        return
    assert made.test.x.flatten().int().tolist() == theirs
    assert made.test_owners is not None
    for number, client in zip(theirs, made.test_owners.tolist(), strict=True):
        assert whose[client] == {int(data.test_owners[number - 100])}
    for owner in taking_part:  # clients of one domain have equally many, but for one
        alike = [int((made.test_owners == k).sum()) for k in range(clients) if whose[k] == {owner}]
        assert max(alike) - min(alike) <= 1


def test_other_partitions_have_a_common_test_set() -> None:
    data = dataset(owners=np.arange(8) % 2, owner_names=("a", "b"), test_owners=np.arange(4) % 2)
    made = build_federation(data, "iid", 2, np.random.default_rng(0))
    assert made.test_owners is None
    assert made.test is not None
    assert len(made.test) == 4


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_clients_are_scored_on_their_own_test_samples(engine: str, tmp_path: Path) -> None:
    """Against each sample looked at by itself."""
    settings_ = {
        "partition": "shards:2",
        "clients": 6,
        "client_test": 0.3,
        "model": "logreg",
        "rounds": 2,
        "workers": 2,
    }
    run = fedloom.run("fedavg", engine=engine, out=tmp_path / "run", report=False, **settings_)
    with build_run(resolve_run(run.config)).engine_closed() as experiment:
        federation = experiment.data.federated_data
    module, owners = run.model(), federation.test_owners
    assert owners is not None
    assert federation.test is not None
    accuracies = []
    for client in range(6):
        own = federation.test.take(np.flatnonzero(owners == client))
        with torch.no_grad():
            right = [
                int(module(federation.transform(x[None])).argmax()) == int(y) for x, y in zip(own.x, own.y, strict=True)
            ]
        accuracies.append(sum(right) / len(right))
    assert run.summary["client_accuracy_mean"] == pytest.approx(np.mean(accuracies), abs=1e-12)
    assert run.summary["client_accuracy_worst10"] == pytest.approx(min(accuracies), abs=1e-12)
    assert len(set(accuracies)) > 1


def test_from_the_command_line(command: Callable[..., Any], tmp_path: Path) -> None:
    outcome = command(
        *("run", "fedavg", "--client-test", "0.25", "--partition", "shards:2", "--clients", 5, "--rounds", 2),
        *("--model", "logreg", "--engine", "sequential", "--epochs", 1, "--out", "run", "--json", "-q"),
    )
    assert outcome.result["accuracy"] > 0.2
    assert "client_test = 0.25" in (tmp_path / "run" / "config.toml").read_text()
    experiment = build_run(resolve_run(fedloom.resume(tmp_path / "run").config))
    experiment.engine.close()
    held = [experiment.data.federated_data.num_examples(k) for k in range(5)]
    assert experiment.data.federated_data.test is not None
    assert sum(held) + len(experiment.data.federated_data.test) == 1797  # training and test samples of the digits
    assert all(269 <= size <= 271 for size in held)


def test_own_data_bring_their_own_test_samples(tmp_path: Path) -> None:
    own = FederatedDataset.from_arrays([(np.zeros((4, 2)), np.array([0, 1, 0, 1]))])
    with pytest.raises(InputError, match="client_test needs a data set given by name, but 'own' is your own"):
        fedloom.run(data=own, model="logreg", client_test=0.25, out=tmp_path / "run")


@pytest.mark.parametrize("share", ["1", "-0.1", "x"])
def test_impossible_shares(command: Callable[..., Any], share: str) -> None:
    outcome = command("run", "fedavg", "--client-test", share)
    assert outcome.code == 2
    assert "client_test must be" in outcome.err
