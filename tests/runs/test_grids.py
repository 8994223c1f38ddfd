"""Tests of grids of methods: combinations run and left out, continuation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom import Client, Method, register
from fedloom.config import make_config
from fedloom.errors import InputError, RunStopped
from fedloom.methods.base import MethodContext, Options, Refiner, Server
from fedloom.report import read_effect_grid
from fedloom.runs.callback import Callback
from fedloom.runs.directory import RunDirectory
from fedloom.runs.grids import _make_grid, _parse_grid

Command = Callable[..., Any]
TINY = ("--clients", 6, "--clients-per-round", 4, "--rounds", 2, "--model", "logreg", "--epochs", 1)
SMALL: dict[str, Any] = {
    "clients": 6,
    "clients_per_round": 4,
    "rounds": 2,
    "model": "logreg",
    "epochs": 1,
    "engine": "sequential",
}


class Halves(Refiner[Options]):
    """Halves every model."""

    def refine(self, round: int, server: Server[Any]) -> None:
        server.models().mul_(0.5)


class Picky(Client[Options]):
    """Refuses any network but a large one."""

    def __init__(self, context: MethodContext, options: Options) -> None:
        super().__init__(context, options)
        if context.layout.size < 10_000:
            raise InputError("picky wants a larger network.")


@pytest.fixture
def halves() -> None:
    register(Method("halves", "a test", "nobody", refiner=Halves))


def test_levels_that_bring_nothing_are_the_baselines_and_come_first() -> None:
    server, local = _parse_grid("fedcross , fedavg x  fedprox,sgd")
    assert (server.name, server.levels, server.baseline) == ("server", ("fedavg", "fedcross"), "fedavg")
    assert (local.name, local.levels) == ("client", ("sgd", "fedprox"))
    assert _parse_grid([["fedmr", "fedcross"], "sgd"])[0].baseline == "fedmr"
    assert _parse_grid("fedavg,fedcross × sgd,fedprox") == (server, local)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fedavg,fedcross", "servers x clients"),
        ("fedavg x sgd x none x sgd", "servers x clients"),
        ("fedavg,fedcros x sgd", "unknown server 'fedcros'; did you mean 'fedcross'"),
        ("fedavg x sgd,fedprx", "unknown client 'fedprx'; did you mean 'fedprox'"),
        ("fedavg, x sgd", "unknown server ''"),
        ("fedavg x sgd,sgd", "'sgd' is named twice among the clients of the grid"),
        ("fedprox x sgd", "fedprox provides a client, so it cannot be one of the servers"),
        ("fedavg x fedcross", "fedcross provides a server, so it cannot be one of the clients"),
        ("fedcross x fedavg", "one of the clients of a grid; the default there is 'sgd'"),
        ("fedavg x sgd x fedprox", "fedprox provides a client, so it cannot be one of the refiners"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        _parse_grid(text)


def test_every_combination_is_run_or_refused_by_name(halves: None) -> None:
    grid = _make_grid("fedavg,fedcross,scaffold x sgd,fedprox x none,halves", make_config(SMALL))
    assert [cell.method for cell in grid.cells] == [
        *("fedavg", "halves", "fedprox", "fedprox+halves"),
        *("fedcross", "fedcross+halves", "fedcross+fedprox", "fedcross+fedprox+halves"),
        *("scaffold", "scaffold+halves", "scaffold+fedprox", "scaffold+fedprox+halves"),
    ]
    assert set(grid.refused) == {"scaffold+fedprox", "scaffold+fedprox+halves"}
    assert grid.refused["scaffold+fedprox"] == (
        "'scaffold+fedprox' cannot be run: scaffold and fedprox both provide the part 'client', and a run has only one."
    )
    assert len(grid.methods) == 10


def test_a_part_that_refuses_the_task_is_left_out_in_its_own_words() -> None:
    register(Method("picky", "a test", "nobody", client=Picky))
    grid = _make_grid("fedavg,scaffold x sgd,picky", make_config(SMALL))
    assert grid.refused["picky"] == "'picky' cannot be run: picky wants a larger network."
    assert "both provide the part 'client'" in grid.refused["scaffold+picky"]
    assert _make_grid("fedavg x sgd,picky", make_config({**SMALL, "model": "mlp", "data": "digits"})).refused == {}
    with pytest.raises(InputError, match=r"no combination of the grid can be run; .*picky wants"):
        _make_grid("fedavg x picky", make_config(SMALL))


def test_what_is_wrong_without_any_method_is_no_refusal() -> None:
    with pytest.raises(InputError, match="dirichlet"):
        _make_grid("fedavg x sgd,fedprox", make_config({**SMALL, "partition": "dirichle:1"}))
    with pytest.raises(InputError, match=r"fedprox\.mu must be greater"):
        _make_grid("fedavg x sgd,fedprox", make_config(SMALL), {"fedprox": {"mu": -1}})


def test_from_python(tmp_path: Path, halves: None) -> None:
    compared = fedloom.compare(
        grid=[["fedavg", "fedcross"], ["sgd"], ["none", "halves"]],
        seeds=2,
        options={"fedavg": {"weighting": "uniform"}, "fedcross": {"alpha": 0.9}},
        out=tmp_path / "g",
        **SMALL,
    )
    assert [run.config.method for run in compared.runs[::2]] == ["fedavg", "halves", "fedcross", "fedcross+halves"]
    assert compared.runs[0].config.options == {"fedavg": {"weighting": "uniform", "server_lr": 1.0}}
    assert "fedavg" not in compared.runs[4].config.options
    effects = compared.effects
    assert effects is not None
    effect = next(one.estimate for one in effects.effects if one.level == "halves")
    scores = {(run.config.method, run.config.seed): run.accuracy or 0.0 for run in compared.runs}
    pairs = [("halves", "fedavg"), ("fedcross+halves", "fedcross")]
    expected = [sum(scores[a, seed] - scores[b, seed] for a, b in pairs) / 2 for seed in (0, 1)]
    assert effect.values == pytest.approx(expected)
    assert read_effect_grid(tmp_path / "g") == effects.grid
    assert '"grid":{' in (tmp_path / "g" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("given", [{}, {"methods": ["fedavg"], "grid": "fedavg x sgd"}])
def test_methods_or_a_grid(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="either methods to compare or a grid"):
        fedloom.compare(**given, out=tmp_path / "c", **SMALL)
    assert not (tmp_path / "c").exists()


def test_a_grid_that_was_stopped_goes_on(tmp_path: Path) -> None:
    class StopIn(Callback):
        """Asks to stop in the first round of the third run."""

        begun = 0

        def on_run_start(self, *_: Any) -> None:
            self.begun += 1

        def should_stop(self) -> bool:
            return self.begun == 3

    words: dict[str, Any] = {"grid": "fedavg,fedcross x sgd,fedprox", **SMALL}
    whole = fedloom.compare(out=tmp_path / "whole", **words)
    with pytest.raises(RunStopped, match="continue with the same command"):
        fedloom.compare(out=tmp_path / "g", callbacks=[StopIn()], **words)
    assert read_effect_grid(tmp_path / "g") is not None
    done = tmp_path / "g" / "fedavg-seed0" / "summary.json"
    before = done.stat().st_mtime_ns
    again = fedloom.compare(out=tmp_path / "g", **words)
    assert [run.digest for run in again.runs] == [run.digest for run in whole.runs]
    assert done.stat().st_mtime_ns == before
    with pytest.raises(InputError, match="rounds 2, not 3"):
        fedloom.compare(out=tmp_path / "g", **{**words, "rounds": 3})


# the command


@pytest.mark.parametrize("quoted", [True, False])
def test_the_grid_of_the_command(command: Command, tmp_path: Path, quoted: bool) -> None:
    text = "fedavg,scaffold x sgd,fedprox"
    grid = ["--grid", text] if quoted else ["--grid", *text.split()]
    ended = command("compare", *grid, *TINY, "--seeds", 2, "--out", "g", "--quiet")
    assert ended.code == 0, ended.err
    refusal = (
        "'scaffold+fedprox' cannot be run: scaffold and fedprox both provide the part 'client', and a run has only one."
    )
    assert f"left out: {refusal}\n" in ended.out
    found = sorted(path.parent.name for path in (tmp_path / "g").glob("*/summary.json"))
    assert found == [f"{method}-seed{seed}" for method in ("fedavg", "fedprox", "scaffold") for seed in (0, 1)]
    table = ended.out.partition("Effect of each part\n")[2].splitlines()
    assert [line.split()[:3] for line in table[1:3]] == [
        ["scaffold", "fedavg", "(server)"],
        ["fedprox", "sgd", "(client)"],
    ]
    assert "1 of 2 pairs" in table[1]
    page = (tmp_path / "g" / "report.html").read_text(encoding="utf-8")
    assert "1 combination left out, with reasons" in page
    assert "scaffold and fedprox both provide the part" in page


def test_what_is_left_out_is_said_before_the_first_run(command: Command) -> None:
    ended = command("compare", "--grid", "fedavg,scaffold x sgd,fedprox", *TINY)
    assert ended.err.index("left out: 'scaffold+fedprox'") < ended.err.index("1/3")
    assert "3/3" in ended.err


def test_the_grid_in_json(command: Command) -> None:
    result = command("compare", "--grid", "fedavg,fedcross x sgd,fedprox", *TINY, "--seeds", 2, "--json").result
    grid = result["grid"]
    assert grid["factors"] == {"server": ["fedavg", "fedcross"], "client": ["sgd", "fedprox"]}
    assert [one["level"] for one in grid["effects"]] == ["fedcross", "fedprox"]
    assert all(one["seeds"] == 2 and one["pairs"] == 2 for one in grid["effects"])
    assert [one["levels"] for one in grid["pairs"]] == [["fedcross", "fedprox"]]
    plain = command("compare", "fedavg", *TINY, "--json").result
    assert "grid" not in plain


def test_report_of_a_grids_folder_shows_the_grid(command: Command, tmp_path: Path) -> None:
    words = ("compare", "--grid", "fedavg,fedcross x sgd,fedprox", *TINY, "--out", "g", "-q")
    assert command(*words).code == 0
    assert command("report", "g", "-o", "again.html").code == 0
    assert '"grid":{' in (tmp_path / "again.html").read_text(encoding="utf-8")
    assert command("report", "g/fedavg-seed0", "g/fedprox-seed0", "-o", "two.html").code == 0
    assert '"grid":{' not in (tmp_path / "two.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--grid", "fedavg"], "servers x clients"),
        (["--grid", "fedavg", "sgd"], "servers x clients"),
        (["--grid", "fedavg", "x", "sgd,fedprx"], "did you mean 'fedprox'"),
        (["--grid", "fedavg x sgd", "--set", "fedprox.mu=1"], "takes no part"),
    ],
)
def test_a_bad_grid_is_one_sentence(command: Command, tmp_path: Path, words: list[str], sentence: str) -> None:
    ended = command("compare", *words, *TINY, "--out", "g")
    assert ended.code == 2
    assert sentence in ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "g").exists()


def test_the_grid_on_disk_is_plain_json(command: Command, tmp_path: Path) -> None:
    assert command("compare", "--grid", "fedavg,scaffold x sgd,fedprox", *TINY, "--out", "g", "-q").code == 0
    table = json.loads((tmp_path / "g" / "grid.json").read_text())
    assert [cell["refused"] is None for cell in table["cells"]] == [True, True, True, False]
    assert RunDirectory.open(tmp_path / "g" / "scaffold-seed0").config.method == "scaffold"
