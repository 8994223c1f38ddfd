"""Runs and comparisons of variants: the same bits as with plain settings, rows by their names, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.errors import InputError
from fedloom.report import make_comparison_table, read_run_record
from fedloom.runs.directory import RunDirectory
from fedloom.testing import small_run
from tests.support.small_runs import TINY, TINY_OPTIONS, tiny

Command = Callable[..., Any]
ONE = {**TINY, "rounds": 1, "engine": "sequential"}


def folders(place: Path) -> list[str]:
    return sorted(path.parent.name for path in place.glob("*/config.toml"))


@pytest.mark.parametrize(
    ("variant", "plain", "options", "settings"),
    [
        ("fedprox:mu=0.5,lr=0.2,epochs=2", "fedprox", {"fedprox": {"mu": 0.5}}, {"lr": 0.2, "epochs": 2}),
        ("fedcross:alpha=0.8+fedprox", "fedcross+fedprox", {"fedcross": {"alpha": 0.8}}, {}),
        ("fedavg:run.lr=0.3,momentum=0.9,nesterov=true", "fedavg", {}, {"lr": 0.3, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_a_variant_is_the_run_with_these_options_and_settings(
    variant: str, plain: str, options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    one = tiny(tmp_path / "variant", variant, rounds=2)
    other = tiny(tmp_path / "plain", plain, rounds=2, options=options, **settings)
    assert one.digest == other.digest
    named, unnamed = (run.config.model_dump() for run in (one, other))
    assert named.pop("variant")
    assert unnamed.pop("variant") is None
    assert named == unnamed
    assert (one.summary["method"], "variant" in other.summary) == (plain, False)
    assert fedloom.verify(one.path) == (one.digest, one.digest)
    assert small_run(plain, options, **settings).digest == small_run(variant, {}).digest


def test_a_variant_beats_the_settings_of_the_command(command: Command, tmp_path: Path) -> None:
    given = ("--set", "fedprox.mu=5", "--lr", 0.9, "--steps", 3, *TINY_OPTIONS)
    result = command("run", "fedprox:mu=0.5,lr=0.2,epochs=1", *given, "--json", "-q").result
    run = RunDirectory.open(tmp_path / result["run"])
    assert (run.config.options, run.config.lr, run.config.steps) == (
        {"fedprox": {"mu": 0.5}, "fedavg": {"weighting": "samples", "server_lr": 1.0}},
        0.2,
        None,
    )
    assert run.path.name == "fedprox.mu=0.5.epochs=1.lr=0.2-digits-seed0-001"
    assert result["variant"] == "fedprox:mu=0.5,epochs=1,lr=0.2"
    assert result["digest"] == tiny(tmp_path / "p", "fedprox", options={"fedprox": {"mu": 0.5}}, lr=0.2).digest
    resumed = command("resume", result["run"], "--json", "-q").result
    assert resumed["digest"] == result["digest"]


def test_rows_have_the_names_that_were_typed(command: Command, tmp_path: Path) -> None:
    rows = ["fedavg", "fedavg:lr=0.30", "fedcross:selection=highest,alpha=.9", "fedprox+fedcross:epochs=2"]
    labels = ["fedavg", "fedavg:lr=0.3", "fedcross:alpha=0.9,selection=highest", "fedprox+fedcross:epochs=2"]
    ended = command("compare", *rows, "--seeds", 2, *TINY_OPTIONS, "--out", "c", "-q")
    assert ended.code == 0, ended.err
    assert [line.split()[0] for line in ended.out.splitlines()[1:5]] == labels
    assert "differ in" not in ended.out, "what a variant sets is no hidden cause"
    assert folders(tmp_path / "c") == sorted(
        f"{name}-seed{seed}"
        for name in (
            "fedavg",
            "fedavg.lr=0.3",
            "fedcross.alpha=0.9.selection=highest",
            "fedprox+fedcross.epochs=2",
        )
        for seed in range(2)
    )
    config = RunDirectory.open(tmp_path / "c" / "fedavg.lr=0.3-seed1").config
    assert (config.method, config.lr, config.variant, config.seed) == ("fedavg", 0.3, "fedavg:lr=0.3", 1)
    page = (tmp_path / "c" / "report.html").read_text(encoding="utf-8")
    assert all(label in page for label in labels)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("c/*/summary.json")}
    again = command("compare", *rows, "--seeds", 2, *TINY_OPTIONS, "--out", "c", "-q", "--json").result
    assert [run.get("variant") for run in again["runs"][::2]] == [None, *labels[1:]]
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("c/*/summary.json")}, "kept as they are"
    records = [read_run_record(path.parent) for path in sorted(tmp_path.glob("c/*/config.toml"))]
    assert {group.label for group in make_comparison_table(records).groups} == set(labels)


def test_compare_in_python_knows_variants(tmp_path: Path) -> None:
    compared = fedloom.compare(["fedavg:lr=0.5", "fedavg"], options={"fedavg": {"server_lr": 0.5}}, out=tmp_path, **ONE)
    assert [group.label for group in compared.table.groups] == ["fedavg:lr=0.5", "fedavg"]
    assert [run.config.lr for run in compared.runs] == [0.5, 0.05]
    assert [run.config.options["fedavg"]["server_lr"] for run in compared.runs] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["fedcross", "fedcross:alpha=0.99"], "'fedcross:alpha=0.99' is the same as 'fedcross' here"),
        (["fedavg:lr=0.05", "fedavg"], "'fedavg' is the same as 'fedavg:lr=0.05' here"),
        (["fedavg:lr=0.1,epochs=3", "fedavg:epochs=3,run.lr=1e-1"], "'fedavg:epochs=3,lr=0.1' is named twice"),
        (["fedprox", "fedavg+fedprox"], "'fedavg.fedprox' is the same as 'fedprox' here"),
        (["fedavg", "fedavg:lr=-1"], "lr must be greater than or equal to 0, not -1"),
        (["fedavg", "fedavg:lr=high"], "lr must be a number, not 'high'"),
        (["fedavg", "fedavg:nesterov=true"], "nesterov needs a momentum above 0"),
        (["fedavg", "fedcda:selection=oldest"], r"fedcda\.selection must be 'approximate', .*'newest'"),
        (["fedavg", "fedavg:model=lenet"], "model 'lenet' cannot take images"),
        (["fedavg", "fedavg:model=no"], "unknown model 'no'"),
        (["fedavg", "fedavg:init=missing.safetensors"], "missing.safetensors"),
        (["fedavg", "fedavg:clients=3"], "clients is no setting of a single method"),
    ],
)
def test_wrong_rows_are_refused_before_anything_is_written(rows: list[str], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        fedloom.compare(rows, out=tmp_path / "c", **ONE)
    assert not (tmp_path / "c").exists()


def test_a_model_given_as_an_object_cannot_be_replaced_by_a_row(tmp_path: Path) -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    settings = {key: value for key, value in ONE.items() if key != "model"}
    with pytest.raises(InputError, match="sets model, but the model is a Python object"):
        fedloom.compare(["fedavg", "fedavg:model=mlp"], model=network, out=tmp_path / "c", **settings)
    with pytest.raises(InputError, match="variant cannot be set"):
        fedloom.run("fedavg", variant="mine", out=tmp_path / "r", **ONE)


def test_a_row_may_start_from_other_weights(tmp_path: Path) -> None:
    mlp = {**ONE, "model": "mlp"}
    start = tiny(tmp_path / "start", "fedavg", lr=0.5, model="mlp")
    rows = ["fedavg", "fedavg:init=none", "fedavg:init=none,lr=0.5"]
    compared = fedloom.compare(rows, init=str(start.path), new_head=True, out=tmp_path / "c", **mlp)
    warm, cold, _ = compared.runs
    assert (warm.config.init, cold.config.init, cold.config.new_head) == (str(start.path), None, False)
    assert warm.config.init_sha256 is not None
    assert cold.digest == tiny(tmp_path / "cold", "fedavg", rounds=1, model="mlp").digest


def test_a_method_of_a_file_has_variants(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fedloom import Client, Method, Options, register\n"
        "class MineOptions(Options):\n"
        "    lr: float = 1.0\n"
        "    '''a number'''\n"
        "register(Method('mine', 'a test', 'nobody', options=MineOptions, client=Client))\n"
    )
    rows = ("mine:lr=2", "mine:run.lr=0.2", "--import", "mine.py", *TINY_OPTIONS, "--out", "c", "--json", "-q")
    runs = command("compare", *rows).result["runs"]
    assert [run["variant"] for run in runs] == ["mine:lr=2", "mine:run.lr=0.2"]
    configs = [RunDirectory.open(tmp_path / run["run"]).config for run in runs]
    assert [(config.options["mine"]["lr"], config.lr) for config in configs] == [(2.0, 0.05), (1.0, 0.2)]


def test_levels_of_a_grid_may_be_variants(tmp_path: Path) -> None:
    compared = fedloom.compare(
        grid="fedavg,fedcross:alpha=0.9,lr=0.2 x sgd,fedprox:mu=0.5,fedprox:run.lr=0.3", out=tmp_path / "g", **ONE
    )
    assert compared.effects is not None
    grid = compared.effects.grid
    assert grid.factors[0].levels == ("fedavg", "fedcross:alpha=0.9,lr=0.2")
    assert grid.factors[1].levels == ("sgd", "fedprox:mu=0.5", "fedprox:lr=0.3")
    assert grid.methods == [
        *("fedavg", "fedprox:mu=0.5", "fedprox:lr=0.3"),
        *("fedcross:alpha=0.9,lr=0.2", "fedcross:alpha=0.9+fedprox:mu=0.5,lr=0.2"),
    ]
    assert ["lr is given twice" in reason for reason in grid.refused.values()] == [True]
    assert len(compared.effects.scores) == 5, "each cell finds its run"
    assert json.loads((tmp_path / "g" / "grid.json").read_text())["cells"][1]["method"] == "fedprox:mu=0.5"


def test_a_grid_is_planned_with_the_settings_of_its_levels(tmp_path: Path) -> None:
    grid = "fedavg x sgd,scaffold:optimizer=adam,scaffold"
    compared = fedloom.compare(grid=grid, out=tmp_path / "g", **ONE)
    assert compared.effects is not None
    assert compared.effects.grid.methods == ["fedavg", "scaffold"]
    assert "works only with sgd" in compared.effects.grid.refused["scaffold:optimizer=adam"]
    with pytest.raises(InputError, match="'sgd' stands for no method, so nothing can stand behind it"):
        fedloom.compare(grid="fedavg x sgd:lr=0.1,fedprox", out=tmp_path / "h", **ONE)
