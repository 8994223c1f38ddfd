"""Config files as the input of a run."""

from pathlib import Path

import pytest

import fedloom
from fedloom.errors import InputError
from tests.support.refusals import TINY, Command, refused
from tests.support.small_runs import TINY as SETTINGS


def test_the_config_of_a_run_makes_it_again(tmp_path: Path) -> None:
    options = {"fedprox": {"mu": 0.3}}
    first = fedloom.run("fedprox:mu=0.3", out=tmp_path / "a", **SETTINGS)
    again = fedloom.run(config=tmp_path / "a" / "config.toml", out=tmp_path / "b", report=False)
    assert again.digest == first.digest
    assert again.config.options["fedprox"] == options["fedprox"]
    other = fedloom.run(config=tmp_path / "a" / "config.toml", lr=0.2, out=tmp_path / "c", report=False)
    assert (other.config.lr, other.config.rounds, other.config.method) == (0.2, 3, "fedprox")
    assert other.digest != first.digest
    avg = fedloom.run("fedavg", config=tmp_path / "a" / "config.toml", out=tmp_path / "d", report=False)
    assert "fedprox" not in avg.config.options


def test_options_override_the_file(command: Command, tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(
        'method = "fedprox"\nrounds = 2\nclients = 6\nmodel = "logreg"\n[options.fedprox]\nmu = 0.3\n'
    )
    file = ("run", "--config", "f.toml", "--json", "--quiet")
    plain = command("run", "fedprox:mu=0.3", *TINY, "--clients-per-round", 6, "--epochs", 2, "--json", "--quiet").result
    assert command(*file).result["digest"] == plain["digest"]
    assert command(*file, "--rounds", 1).result["rounds"] == 1
    command(*file, "--set", "fedprox.mu=0.5", "--out", "o")
    assert fedloom.resume(tmp_path / "o").config.options["fedprox"]["mu"] == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rouns = 3", ("f.toml: unknown setting 'rouns'; did you mean 'rounds'?",)),
        ("rounds = 0", ("f.toml: rounds must be",)),
        ("rounds = ", ("f.toml is not TOML",)),
        ('method = "fedprx"', ("'fedprx'",)),
    ],
)
def test_a_file_with_a_mistake(command: Command, tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / "f.toml").write_text(text)
    refused(command("run", "--config", "f.toml"), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["f.toml"]


def test_neither_method_nor_file(command: Command) -> None:
    refused(command("run"), "Missing argument 'METHOD'", "--config FILE")
    refused(command("run", "--config", "nowhere.toml"), "cannot read nowhere.toml")


def test_objects_are_passed_again(tmp_path: Path) -> None:
    from torch import nn

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    settings = {key: value for key, value in SETTINGS.items() if key != "model"}
    first = fedloom.run("fedavg", model=network, out=tmp_path / "a", **settings)
    with pytest.raises(InputError, match=r"is of a run with model as Python objects; pass them"):
        fedloom.run(config=first.path / "config.toml", out=tmp_path / "b")
    again = fedloom.run(config=first.path / "config.toml", model=network, out=tmp_path / "b", report=False)
    assert again.digest == first.digest
