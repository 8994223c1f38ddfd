"""Tests of image folders on the command line."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

Command = Callable[..., Any]
TINY = ("--model", "logreg", "--rounds", 2, "--epochs", 1, "--engine", "sequential", "--json", "-q")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Dark cats and bright dogs in two domains, which a linear network can tell apart."""
    rng = np.random.default_rng(0)
    for domain, tint in (("photo", 0), ("sketch", 40)):
        for name, level in (("cat", 20), ("dog", 180)):
            folder = tmp_path / "photos" / domain / name
            folder.mkdir(parents=True)
            for i in range(15):
                pixels = rng.integers(level, level + 30, (6, 7, 3)) + tint
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "photos"


def test_a_run_on_folders_by_domain(command: Command, photos: Path, tmp_path: Path) -> None:
    arguments = ("--data", "domains:photos,size=6", "--partition", "domain", "--normalize", "half", *TINY)
    result = command("run", "fedavg", *arguments, "--rounds", 8, "--lr", 0.01, "--out", "run").result
    assert result["accuracy"] == 1
    config = (tmp_path / "run" / "config.toml").read_text()
    assert f'data = "domains:{photos},size=6"' in config, "so that it can be resumed from elsewhere"
    assert "clients = 2" in config
    assert 'normalize = "half"' in config
    verified = command("verify", "run", "--json", "-q").result
    assert verified["digest"] == result["digest"]


def test_another_normalisation_is_another_run(command: Command, photos: Path) -> None:
    digests = {
        command("run", "fedavg", "--data", "domains:photos,size=6", "--partition", "iid", "--clients", 3,
                "--normalize", name, *TINY).result["digest"]
        for name in ("default", "unit", "half", "mean-std")
    }  # fmt: skip
    assert len(digests) == 3, "the default of one's own images is unit"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--data", "domains:photos"), r"cannot decode .*photo/cat/0.png"),
        (("--data", "domains:absent"), "absent is not a folder"),
        (("--data", "folder:photos/sketch", "--partition", "domain"), "has no domains"),
        (("--data", "digits", "--normalize", "imagenet"), "is for 3 channels; 'digits' has 1"),
        (("--data", "digits", "--normalize", "nothing"), "nothing"),
    ],
)
def test_what_is_wrong_is_one_sentence(command: Command, photos: Path, arguments: tuple[str, ...], said: str) -> None:
    broken = photos / "photo" / "cat" / "0.png"
    broken.write_bytes(broken.read_bytes()[:70])
    ended = command("run", "fedavg", *arguments, *TINY)
    assert ended.code != 0
    assert re.search(said, ended.err.replace("\n", " "))
    assert "Traceback" not in ended.err


def test_the_list_says_what_is_at_hand(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    for domain in ("real", "sketch"):
        (tmp_path / "domainnet" / domain).mkdir(parents=True)
    entries = {entry["name"]: entry for entry in json.loads(command("list", "datasets", "--json").out)}
    assert entries["domainnet"]["state"] == "on this machine"
    assert entries["domainnet"]["found"] == str(tmp_path / "domainnet")
    assert entries["domainnet"]["missing"] == ["clipart", "infograph", "painting", "quickdraw"]
    assert entries["cinic10"]["state"] == "must be downloaded by hand"
    assert entries["cinic10"]["get"].startswith("download CINIC-10.tar.gz")
    assert entries["cifar100"]["state"] == "can be downloaded"
    assert entries["folder:PATH"] == {
        **dict.fromkeys(("classes", "training", "test", "found", "get")),
        "name": "folder:PATH",
        "summary": "images of your own, one folder a class",
        "shape": [],
        "state": "your own",
        "missing": [],
    }
    shown = command("list", "datasets").out
    assert "cinic10 must be downloaded by hand: download" in shown
    assert "domainnet is read without clipart" in shown
