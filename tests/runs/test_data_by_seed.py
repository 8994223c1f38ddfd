"""Tests of comparisons whose data a function makes for each seed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom.errors import InputError
from fedloom.report import make_comparison_table, read_run_record

Y = np.arange(120) % 3
X = np.random.default_rng(0).normal(size=(120, 4)) + Y[:, None]
TINY: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "logreg", "engine": "sequential"}
SHARED = "All seeds share one partition"


def make(seed: int) -> fedloom.FederatedDataset:
    return fedloom.FederatedDataset.from_pool(X, Y, partition="dirichlet:0.5,min=1", clients=5, seed=seed)


def test_each_seed_has_its_own_partition_which_all_methods_share(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted(seed: int) -> fedloom.FederatedDataset:
        calls.append(seed)
        return make(seed)

    compared = fedloom.compare(["fedavg", "fedprox"], seeds=2, data=counted, seed=4, out=tmp_path / "c", **TINY)
    assert calls == [4, 5]
    tables = {(run.config.method, run.config.seed): read_run_record(run.path).counts for run in compared.runs}
    for seed in (4, 5):
        assert np.array_equal(tables["fedavg", seed], make(seed).label_counts())
        assert np.array_equal(tables["fedprox", seed], tables["fedavg", seed])
    alone = fedloom.run("fedprox", data=make(5), seed=5, **TINY)
    assert [run.digest for run in compared.runs][-1] == alone.digest
    assert not any(SHARED in note for note in compared.table.notes)


def test_a_stopped_comparison_goes_on_with_the_same_function(tmp_path: Path) -> None:
    whole = fedloom.compare(["fedavg"], seeds=2, data=make, out=tmp_path / "whole", **TINY)
    fedloom.compare(["fedavg"], seeds=1, data=make, out=tmp_path / "part", **TINY)
    again = fedloom.compare(["fedavg"], seeds=2, data=make, out=tmp_path / "part", **TINY)
    assert [run.digest for run in again.runs] == [run.digest for run in whole.runs]


def test_one_partition_for_all_seeds_is_noted(tmp_path: Path) -> None:
    compared = fedloom.compare(["fedavg", "fedprox"], seeds=2, data=make(0), out=tmp_path / "c", **TINY)
    said = [note for note in compared.table.notes if SHARED in note]
    assert said == [f"{SHARED}, so the spread over seeds does not cover other partitions."]
    assert said[0] in (compared.path / "report.html").read_text()
    single = fedloom.compare(["fedavg"], seeds=1, data=make(0), out=tmp_path / "single", **TINY)
    assert not any(SHARED in note for note in single.table.notes)


def test_a_function_that_ignores_the_seed_is_noted(tmp_path: Path) -> None:
    compared = fedloom.compare(["fedavg"], seeds=2, data=lambda seed: make(0), out=tmp_path / "c", **TINY)
    assert any(SHARED in note for note in compared.table.notes)


@pytest.mark.parametrize(("partition", "shared"), [("file:split.json", True), ("natural", True), ("iid", False)])
def test_partitions_by_name(partition: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("mine.npz", x=X, y=Y, owner=np.arange(120) % 4)
    Path("split.json").write_text("[[0, 1, 2, 3], [4, 5, 6, 7]]")
    compared = fedloom.compare(["fedavg"], seeds=2, data="mine.npz", partition=partition, **TINY)
    assert any(SHARED in note for note in compared.table.notes) == shared
    records = [read_run_record(run.path) for run in compared.runs]
    assert any(SHARED in note for note in make_comparison_table(records).notes) == shared


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda seed: "digits", r"data\(0\) is 'digits'; expected a FederatedDataset"),
        (
            lambda seed: fedloom.FederatedDataset.from_pool(X, Y, "iid", 4 + seed),
            r"data\(1\) has 5 clients, but data\(0\) has 4",
        ),
        (
            lambda seed: fedloom.FederatedDataset.from_pool(X[:, : 4 - seed], Y, "iid", 4),
            r"data\(1\) has shape \(3,\), but data\(0\) has shape",
        ),
        (
            lambda seed: fedloom.FederatedDataset.from_pool(X, Y, "iid", 4, name=f"n{seed}"),
            r"data\(1\) has name 'n1', but data\(0\) has name 'n0'",
        ),
    ],
)
def test_functions_that_cannot_be_used(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        fedloom.compare(["fedavg"], seeds=2, data=data, out=tmp_path / "c", **TINY)
    assert not (tmp_path / "c").exists()
