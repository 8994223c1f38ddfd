"""Test samples that clients hold out themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedloom
from fedloom import Federation
from fedloom.data import Dataset, PooledFederation, Prepare, Samples, hold_out, merge
from fedloom.errors import InputError
from fedloom.experiment import build


def numbered(first: int, count: int) -> Samples:
    x = torch.arange(first, first + count)
    return Samples(x.float().unsqueeze(1), x % 3)


def dataset(**more: Any) -> Dataset:
    return Dataset("numbers", numbered(0, 8), numbered(8, 4), 3, (1,), Prepare.identity(), ("a", "b", "c"), **more)


def test_merged_samples_are_all_there_once() -> None:
    merged = merge(dataset())
    assert merged.train.x.flatten().tolist() == list(range(12))
    assert torch.equal(merged.train.y, torch.arange(12) % 3)
    assert len(merged.test) == 0


def test_test_samples_of_nobody_are_left_out() -> None:
    merged = merge(dataset(owners=np.arange(8) % 2, owner_names=("a", "b")))
    assert len(merged.train) == 8
    assert len(merged.test) == 0
    assert merged.notes == ("the 4 test samples of 'numbers' are left out: whose they are is not known.",)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.floats(0.05, 0.95), st.integers(0, 5))
def test_every_client_holds_out_its_share(sizes: list[int], share: float, seed: int) -> None:
    pool = numbered(0, sum(sizes))
    parts = np.split(np.random.default_rng(seed).permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    whole = PooledFederation(pool, parts, classes=3)
    held = [min(int(share * size + 0.5), max(0, size - 1)) for size in sizes]
    if not sum(held):
        with pytest.raises(InputError, match="no client has enough samples"):
            hold_out(whole, share, np.random.default_rng(seed))
        return
    made = hold_out(whole, share, np.random.default_rng(seed))
    assert made.test is not None
    tested = made.test.x.flatten().int().tolist()
    start = 0
    for k, size in enumerate(sizes):
        own = tested[start : start + held[k]]
        start += held[k]
        assert made.samples(k) == size - held[k]
        assert sorted(own + made.client(k).x.flatten().int().tolist()) == sorted(parts[k].tolist())
    assert start == len(tested)
    again = hold_out(whole, share, np.random.default_rng(seed))
    assert again.test is not None
    assert torch.equal(again.test.x, made.test.x)


def test_from_the_command_line(command: Callable[..., Any], tmp_path: Path) -> None:
    outcome = command(
        *("run", "fedavg", "--client-test", "0.25", "--partition", "shards:2", "--clients", 5, "--rounds", 2),
        *("--model", "logreg", "--engine", "plain", "--epochs", 1, "--out", "run", "--json", "-q"),
    )
    assert outcome.result["accuracy"] > 0.2
    assert "client_test = 0.25" in (tmp_path / "run" / "config.toml").read_text()
    experiment = build(fedloom.resume(tmp_path / "run").config)
    experiment.engine.close()
    held = [experiment.federation.samples(k) for k in range(5)]
    assert experiment.federation.test is not None
    assert sum(held) + len(experiment.federation.test) == 1797  # training and test samples of the digits
    assert all(269 <= size <= 271 for size in held)


def test_own_data_bring_their_own_test_samples(tmp_path: Path) -> None:
    own = Federation.from_arrays([(np.zeros((4, 2)), np.array([0, 1, 0, 1]))])
    with pytest.raises(InputError, match="client_test divides a data set known by name, and 'own' is your own"):
        fedloom.run(data=own, model="logreg", client_test=0.25, out=tmp_path / "run")


@pytest.mark.parametrize("share", ["1", "-0.1", "x"])
def test_impossible_shares(command: Callable[..., Any], share: str) -> None:
    outcome = command("run", "fedavg", "--client-test", share)
    assert outcome.code == 2
    assert "client_test must be" in outcome.err
