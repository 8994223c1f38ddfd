"""Tests of `--server-data`: configs, notes, comparisons, reports, bad input."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.cli.catalog import read_catalog_entries
from fedloom.config import make_config
from fedloom.data import Dataset, FederatedDataset, Samples
from fedloom.errors import InputError
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.callback import Callback
from fedloom.runs.resolve import resolve_run

Command = Callable[..., Any]
TINY: dict[str, Any] = {
    "clients": 4,
    "clients_per_round": 3,
    "rounds": 2,
    "model": "logreg",
    "epochs": 1,
    "engine": "sequential",
}
WORDS = (
    "--clients",
    4,
    "--clients-per-round",
    3,
    "--rounds",
    2,
    "--model",
    "logreg",
    "--epochs",
    1,
    "--engine",
    "sequential",
)
QUICK = ("--set", "feddf.steps=20")


class Noted(Callback):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def on_message(self, text: str) -> None:
        self.said.append(text)


def experiment(**settings: Any) -> BuiltRun:
    made = build_run(resolve_run(make_config({**TINY, **settings})))
    made.engine.close()
    return made


def test_a_method_that_needs_it_gets_a_default_that_is_said_and_written_down(tmp_path: Path) -> None:
    noted = Noted()
    run = fedloom.run("abavg", out=tmp_path / "run", callbacks=[noted], **TINY)
    text = "The server holds 72 samples that no client holds (--server-data split:0.05), used by abavg."
    assert noted.said == [text]
    written = tomllib.loads((run.path / "config.toml").read_text())
    assert written["server_data"] == "split:0.05"
    assert written["server_data_used_by"] == ["abavg"]
    assert "--server-data split:0.05" in written["command"]
    assert "abavg used data on the server, split:0.05 (samples that no client holds)" in run.report().read_text()
    assert fedloom.verify(run.path) == (run.digest, run.digest)


def test_a_method_that_needs_none_gets_none_unless_asked_for() -> None:
    plain = experiment(method="fedavg")
    assert plain.config.server_data is None
    assert plain.rounds.context.server.data is None
    given = experiment(method="fedavg", server_data="split:100")
    context = given.rounds.context
    assert context.server.data is not None
    assert len(context.server.data) == 100
    sizes = [sum(map(context.num_examples, range(4))) for context in (plain.rounds.context, given.rounds.context)]
    assert sizes == [1438, 1338]


def test_the_server_gets_stored_samples_and_what_makes_input_of_them() -> None:
    context = experiment(method="fedavg", server_data="split:30").rounds.context
    assert context.server.data is not None
    assert context.server.data.x.dtype == torch.uint8
    x = context.transform(context.server.data.x)
    assert x.shape == (30, *context.shape)
    assert abs(float(x.mean())) < 0.2
    assert context.server.labels_fit


def test_all_methods_and_engines_see_the_same_samples_and_clients(tmp_path: Path) -> None:
    """The split does not depend on the method, and the partition of what is left neither."""
    made = [experiment(method=method, server_data="split:0.1") for method in ("fedavg", "feddf", "fedlaw")]
    for one in made[1:]:
        assert torch.equal(one.rounds.context.server.data.x, made[0].rounds.context.server.data.x)  # type: ignore[union-attr]
        assert all(
            torch.equal(one.data.federated_data.client_samples(k).x, made[0].data.federated_data.client_samples(k).x)
            for k in range(4)
        )


def test_in_a_comparison_all_runs_lose_the_same_samples(tmp_path: Path) -> None:
    settings = {**TINY, "runs": tmp_path}
    compared = fedloom.compare(["fedavg", "abavg"], **settings)
    assert [run.config.server_data for run in compared.runs] == ["split:0.05", "split:0.05"]
    counts = [(run.path / "partition.json").read_text() for run in compared.runs]
    assert counts[0] == counts[1]
    assert compared.table.notes == (
        "abavg used data on the server, split:0.05 (samples that no client holds); other methods did not.",
    )
    again = fedloom.compare(["fedavg", "abavg"], out=compared.path, **TINY)
    assert [run.digest for run in again.runs] == [run.digest for run in compared.runs]
    alone = fedloom.compare(["fedavg"], **settings)
    assert alone.runs[0].config.server_data is None


def test_a_grid_with_such_a_method_gives_it_to_all(tmp_path: Path) -> None:
    compared = fedloom.compare(grid="fedavg,abavg x sgd,fedprox", runs=tmp_path, **{**TINY, "rounds": 1})
    assert [run.config.method for run in compared.runs] == ["fedavg", "fedprox", "abavg", "abavg+fedprox"]
    assert {run.config.server_data for run in compared.runs} == {"split:0.05"}


def test_a_report_of_runs_that_differ_in_it_says_so(tmp_path: Path) -> None:
    one = fedloom.run("fedavg", out=tmp_path / "one", **TINY)
    two = fedloom.run("abavg", out=tmp_path / "two", **TINY)
    from fedloom.report import make_comparison_table, read_run_record

    notes = make_comparison_table([read_run_record(one.path), read_run_record(two.path)]).notes
    assert any("differ in server_data" in note for note in notes)


def test_the_report_names_all_who_used_it_in_one_sentence(tmp_path: Path) -> None:
    compared = fedloom.compare(
        ["fedavg", "abavg", "fedlaw+feddf"], runs=tmp_path, options={"feddf": {"steps": 3}}, **TINY
    )
    assert compared.table.notes == (
        "abavg, fedlaw and feddf used data on the server, split:0.05 (samples that no client holds); "
        "other methods did not.",
    )


def own(server_data: bool = True) -> FederatedDataset:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(60, 5)).astype(np.float32), draw.integers(0, 3, 60)
    made = FederatedDataset.from_arrays([(x[:20], y[:20]), (x[20:40], y[20:40])], classes=3, name="mine")
    if server_data:
        made.server_data = Samples(torch.from_numpy(x[40:]), torch.from_numpy(y[40:]))
    return made


def test_a_federation_of_ones_own_brings_its_own(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 2, "model": lambda: torch.nn.Linear(5, 3), "engine": "sequential"}
    run = fedloom.run("fedlaw", own(), out=tmp_path / "run", **settings)
    assert run.config.server_data == "own"
    assert fedloom.run("fedavg", own(), out=tmp_path / "other", **settings).config.server_data is None
    with pytest.raises(InputError, match="'mine' are spread over their clients already"):
        fedloom.run("fedlaw", own(server_data=False), out=tmp_path / "none", **settings)
    wrong = own()
    assert wrong.server_data is not None
    wrong.server_data.y.fill_(3)
    with pytest.raises(InputError, match="labels from 3 to 3; expected labels from 0 to 2"):
        fedloom.run("fedlaw", wrong, out=tmp_path / "none", **settings)
    assert not (tmp_path / "none").exists()


def test_another_data_set_and_when_its_labels_matter(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only methods that use labels care how many classes there are; `drop` of feddf does too."""
    from fedloom.data import registry

    real = registry.load_dataset

    def load(name: str, **options: Any) -> Dataset:
        if name != "other":
            return real(name, **options)
        x = torch.randint(0, 255, (40, 8, 8, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        samples = Samples(x, torch.arange(40) % 7)
        return Dataset(samples, samples, tuple("abcdefg"), name=name, transform=real("digits").transform)

    monkeypatch.setattr("fedloom.data.load_dataset", load)
    distilled = command("run", "feddf", *WORDS, *QUICK, "--server-data", "other", "--json")
    assert distilled.result["method"] == "feddf"
    for method, *more in (["abavg"], ["fedlaw"], ["feddf", *QUICK, "--set", "feddf.drop=true"]):
        ended = command("run", method, *WORDS, *more, "--server-data", "other")
        assert ended.code == 2
        assert ended.err.count("\n") == 1
        assert "classes" in ended.err


def test_the_list_says_who_needs_it(command: Command) -> None:
    needs = {method["name"]: method["server data"] for method in read_catalog_entries("methods")}
    assert {name: need for name, need in needs.items() if need != "no"} == {
        "abavg": "labels",
        "fedbe": "inputs",
        "feddf": "inputs",
        "fedlaw": "labels",
    }
    told = command("list", "methods").out
    assert "data on the server" in told
    assert [line.split()[0] for line in told.splitlines() if line.endswith("inputs")] == ["fedbe", "feddf"]
