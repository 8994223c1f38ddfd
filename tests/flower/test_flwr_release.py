"""Tests that fedloom runs with the tested Flower release only."""

import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import InputError
from fedloom.flower import commands, flwr_patches
from fedloom.flower.flwr_patches import TESTED, require_supported_flwr
from fedloom.flower.server.serve import serve_app
from fedloom.flower.site.client_app import client_app
from tests.support.small_runs import Command

ROOT = Path(__file__).resolve().parents[2]


def install(version: str | None, monkeypatch: pytest.MonkeyPatch, name: str = "flwr") -> None:
    """Let this release of Flower be the one that is installed."""

    def found(asked: str) -> str:
        if version is None or asked != name:
            raise metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(flwr_patches.metadata, "version", found)


@pytest.mark.parametrize("version", ["1.42.0", "1.40.9", "1.410.0", "2.0", "1.4", "unknown"])
def test_another_release_is_refused_wherever_flower_starts(
    version: str, monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    install(version, monkeypatch)
    monkeypatch.setattr(commands, "exec_flower_command", lambda *words: pytest.fail(f"it starts {words}"))
    said = (
        f"Flower {version} is installed, but fedloom patches internals of Flower and works with 1.41 only; "
        "install fedloom[flower]."
    )
    out = tmp_path / "run"
    for words in (
        ("flower", "superlink"),
        ("flower", "supernode", "127.0.0.1:8000"),
        ("run", "fedavg", "--engine", "flower", "--out", str(out)),
    ):
        ended = command(*words)
        assert (ended.code, ended.err) == (2, f"fedloom: {said}\n"), words
    assert not list(out.rglob("metrics.jsonl"))
    with pytest.raises(InputError) as refused:  # the ServerApp, whatever its SuperLink is
        serve_app(None, None, tmp_path)  # type: ignore[arg-type]
    assert str(refused.value) == said
    with pytest.raises(InputError) as refused:  # the ClientApp, which Flower's own SuperNode may start
        client_app(str(tmp_path / "client.py"))
    assert str(refused.value) == said
    capfd.readouterr()
    monkeypatch.setattr(sys, "argv", ["flwr_patches", "supernode"])  # a process of fedloom's own
    with pytest.raises(SystemExit) as ended_so:
        flwr_patches._main()
    assert ended_so.value.code == 2
    assert capfd.readouterr().err == f"fedloom: {said}\n"


@pytest.mark.parametrize("name", ["flwr", "flwr-nightly"])
@pytest.mark.parametrize("version", ["1.41", "1.41.0", "1.41.7", "1.41.0.dev20260101"])
def test_the_tested_release_is_taken(version: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(version, monkeypatch, name)
    require_supported_flwr()


def test_without_flower_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    install(None, monkeypatch)
    ended = command("flower", "superlink")
    assert (ended.code, ended.err) == (2, "fedloom: this needs Flower; install fedloom[flower].\n")


def test_what_is_asked_for_to_be_installed_is_the_tested_release() -> None:
    project: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())
    major, minor = map(int, TESTED.split("."))
    wanted = f"flwr[simulation]>={TESTED},<{major}.{minor + 1}"
    assert wanted in project["project"]["optional-dependencies"]["flower"]
    assert f"\nflwr=={TESTED}." in (ROOT / "constraints-flower.txt").read_text()
