"""Tests of `fedloom partition`, and of runs on partitions from a file.

Some partitions bring their own clients.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom import data
from fedloom.config import config_to_command, make_config
from fedloom.errors import InputError
from fedloom.runs.directory import RunDirectory

Command = Callable[..., Any]
TINY = ("--rounds", 1, "--model", "logreg", "--epochs", 1, "--engine", "sequential", "--json")


@pytest.fixture
def with_writers(monkeypatch: pytest.MonkeyPatch) -> data.Dataset:
    """Digits that say who wrote them: twelve writers, and three domains."""
    digits = data.load_dataset("digits")
    writers = np.arange(len(digits.train)) % 12
    known = replace(
        digits, owners=writers, owner_names=tuple("abcdefghijkl"), domains=writers % 3, domain_names=("x", "y", "z")
    )
    monkeypatch.setattr(data, "load_dataset", lambda *_, **__: known)
    return known


def test_the_table_is_of_the_split_that_a_run_would_have(command: Command, tmp_path: Path) -> None:
    said = command("partition", "digits", "dirichlet:0.5", "--clients", 6, "--seed", 3, "--out", "split.json")
    assert said.code == 0, said.err
    assert said.err == ""
    assert re.search(r"^  clients +6$", said.out, re.MULTILINE)
    assert re.search(r"^  samples +1,438$", said.out, re.MULTILINE)
    for word in ("Gini", "label entropy", "distance to all", "distance of a pair", "classes of a client", "split.json"):
        assert word in said.out
    written = json.loads((tmp_path / "split.json").read_text())
    assert {key: written[key] for key in ("data", "partition", "seed", "samples")} == {
        **{"data": "digits", "partition": "dirichlet:0.5", "seed": 3, "samples": 1438},
    }
    command("run", "fedavg", *TINY, "--partition", "dirichlet:0.5", "--clients", 6, "--seed", 3, "--out", "r").result  # noqa: B018
    counts = np.array(json.loads((tmp_path / "r" / "partition.json").read_text())["counts"])
    labels = data.load_dataset("digits").train.y.numpy()
    assert [np.bincount(labels[part], minlength=10).tolist() for part in written["clients"]] == counts.tolist()


def test_the_documented_table_is_the_one_that_is_printed(command: Command) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    line = "$ fedloom partition digits dirichlet:0.3\n"
    assert line + command("partition", "digits", "dirichlet:0.3").out in page


def test_the_json_has_the_same_numbers(command: Command, tmp_path: Path) -> None:
    found = command("partition", "digits", "labels:2", "--clients", 4, "--plot", "p.svg", "--json").result
    assert (found["clients"], found["data"], found["partition"], found["plot"]) == (4, "digits", "labels:2", "p.svg")
    assert found["samples"] + found["left_out"] == 1438
    assert found["labels"]["classes_fewest"] == found["labels"]["classes_most"] == 2
    assert found["sizes"]["smallest"] <= found["sizes"]["median"] <= found["sizes"]["largest"]
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_a_written_split_is_run_again_exactly(command: Command, tmp_path: Path) -> None:
    shape = ("--clients", 5, "--seed", 2)
    drawn = command("run", "fedavg", *TINY, "--partition", "shards:2", *shape, "--out", "drawn").result
    command("partition", "digits", "shards:2", *shape, "--out", "split.npz", "--json").result  # noqa: B018
    read = command("run", "fedavg", *TINY, "--partition", "file:split.npz", "--seed", 2, "--out", "read").result
    assert drawn["digest"] == read["digest"]
    config = RunDirectory.open(tmp_path / "read").config
    assert (config.partition, config.clients) == (f"file:{tmp_path / 'split.npz'}", 5)
    assert command("verify", "read").code == 0
    (tmp_path / "split.npz").unlink()
    other = ("partition", "digits", "shards:2", "--clients", 5, "--seed", 9, "--out", "split.npz", "--json")
    command(*other).result  # noqa: B018
    refused = command("verify", "read")
    assert refused.code == 2
    assert "is not the expected partition: its SHA-256 is not" in refused.err


@pytest.mark.parametrize("name", ["split.json", "split.npz"])
def test_a_file_that_is_there_already_is_not_written_over(command: Command, tmp_path: Path, name: str) -> None:
    words = ("partition", "digits", "shards:2", "--clients", 5, "--out", name, "--plot", "p.svg")
    (tmp_path / name).write_bytes(b"my notes")
    for seed in (1, 2):
        before = (tmp_path / name).read_bytes()
        refused = command(*words, "--seed", seed)
        said = f"{name} is there already and is not this partition; choose another --out, or delete it."
        assert (refused.code, refused.out, refused.err) == (2, "", f"fedloom: {said}\n")
        assert (tmp_path / name).read_bytes() == before
        assert not (tmp_path / "p.svg").exists()
        (tmp_path / name).write_bytes(b"")  # as mktemp leaves it: there is nothing to lose
        assert command(*words[:-2], "--seed", seed).code == 0
    written, at = (tmp_path / name).read_bytes(), (tmp_path / name).stat().st_mtime_ns
    assert command(*words, "--seed", 2).code == 0, "the same partition is not an error"
    assert ((tmp_path / name).read_bytes(), (tmp_path / name).stat().st_mtime_ns) == (written, at)
    (tmp_path / f"folder-{name}").mkdir()
    refused = command(*words[:-3], f"folder-{name}")
    assert (refused.code, refused.err) == (2, f"fedloom: cannot write the partition folder-{name}: Is a directory.\n")


@pytest.mark.parametrize(("partition", "clients"), [("natural", 12), ("natural,min=120", 10), ("domain", 3)])
def test_a_run_has_the_clients_that_the_data_bring(
    command: Command, tmp_path: Path, with_writers: data.Dataset, partition: str, clients: int
) -> None:
    command("run", "fedavg", *TINY, "--partition", partition, "--out", "r").result  # noqa: B018
    config = RunDirectory.open(tmp_path / "r").config
    assert (config.clients, config.cohort_size) == (clients, min(10, clients))
    assert command("verify", "r").code == 0
    counts = json.loads((tmp_path / "r" / "partition.json").read_text())["counts"]
    assert len(counts) == clients


def test_some_of_the_owners_may_be_asked_for(command: Command, tmp_path: Path, with_writers: data.Dataset) -> None:
    command("run", "fedavg", *TINY, "--partition", "natural", "--clients", 4, "--out", "r").result  # noqa: B018
    assert RunDirectory.open(tmp_path / "r").config.clients == 4
    refused = command("run", "fedavg", *TINY, "--partition", "natural", "--clients-per-round", 13)
    assert (refused.code, refused.err) == (2, "fedloom: clients_per_round is 13, but there are only 12 clients.\n")


def test_a_comparison_of_natural_clients_goes_on(tmp_path: Path, with_writers: data.Dataset) -> None:
    settings: dict[str, Any] = {
        "partition": "natural",
        "rounds": 1,
        "model": "logreg",
        "epochs": 1,
        "engine": "sequential",
    }
    first = fedloom.compare(["fedavg"], out=tmp_path / "c", **settings)
    both = fedloom.compare(["fedavg", "fedprox"], out=tmp_path / "c", **settings)
    assert both.runs[0].digest == first.runs[0].digest
    assert [run.config.clients for run in both.runs] == [12, 12]


def test_the_command_of_a_run_says_how_many_clients_where_it_matters() -> None:
    assert "--clients" not in config_to_command(make_config({}))
    assert "--clients" not in config_to_command(make_config({"partition": "natural"}))
    assert "--clients 20" in config_to_command(make_config({"partition": "natural", "clients": 20}))
    assert make_config({"partition": "iid"}).clients == 20
    assert make_config({"partition": "natural,min=3"}).clients is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("digits", "iid", "--plot", "p.pdf"), ".html or .svg"),
        (("digits", "iid", "--out", "split.pkl"), ".json or .npz"),
        (("digitz", "iid"), "did you mean 'digits'"),
        (("digits", "idd"), "did you mean 'iid'"),
        (("digits", "iid", "--clients", "0"), "clients must be"),
        (("digits", "iid", "--clients", "1439"), "1438 samples among 1439 clients"),
        (("digits", "dirichlet:0"), "alpha of 'dirichlet' is '0'"),
        (("digits", "dirichlet:0.01", "--clients", "80"), "none of 1000 draws"),
        (("digits", "labels:11"), "there are only 10"),
        (("digits", "natural"), "does not say whose sample is whose"),
        (("digits", "domain"), "has no domains"),
        (("digits", "file:nowhere.json"), "cannot read the partition"),
        (("digits", "file:."), "cannot read the partition"),
        (("digits",), "PARTITION"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    command: Command, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    ended = command("partition", *words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("fedloom: ")
    assert ended.err.count("\n") == 1
    assert said in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_checksum_belongs_to_a_file() -> None:
    with pytest.raises(InputError, match="partition_sha256 needs a partition file:PATH"):
        make_config({"partition": "iid", "partition_sha256": "0" * 64})
    with pytest.raises(InputError, match="64 hexadecimal digits"):
        make_config({"partition": "file:split.json", "partition_sha256": "0"})
