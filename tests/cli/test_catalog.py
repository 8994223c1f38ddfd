"""Tests that `fedloom list` says what the package and this machine have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.cli import catalog
from fedloom.cli.catalog import CATALOG_FILE, KINDS, build_catalog, read_catalog_entries
from fedloom.data import available_datasets
from fedloom.data.sources import DATASET_SOURCES
from fedloom.data.sources.cifar import CIFAR10
from fedloom.data.sources.mnist import MNIST
from fedloom.methods import Method, register

Command = Callable[..., Any]


def test_the_file_is_up_to_date() -> None:
    stored = json.loads(CATALOG_FILE.read_text(encoding="utf-8"))
    built = json.loads(json.dumps(build_catalog()))
    assert tuple(stored) == tuple(built) == KINDS
    for kind in KINDS:
        assert stored[kind] == built[kind], "write it again: python -m fedloom.cli.catalog"


LAYOUTS: list[tuple[str, str, tuple[str, ...], list[str] | None]] = [
    ("mnist", "mnist", MNIST.files, []),
    ("mnist", "mnist", tuple(f"{name}.gz" for name in MNIST.files), []),
    ("mnist", "mnist", MNIST.files[1:], None),
    ("fashion-mnist", "fashion-mnist", (*MNIST.files[:3], f"{MNIST.files[3]}.gz"), []),
    ("cifar10", "cifar10", CIFAR10.files, []),
    ("cifar10", "cifar10", CIFAR10.files[:-1], None),
    ("cinic10", "cinic10", ("train/", "valid/", "test/"), []),
    ("cinic10", "cinic10", ("train/", "test/"), None),
    ("femnist", "femnist", ("data/train/a.json", "data/test/a.json"), []),
    ("femnist", "femnist", ("train/a.json",), None),
    ("femnist", "femnist", ("all_data/a.json",), None),
    ("sent140", "sent140", ("all_data/a.json",), []),
    ("shakespeare", "shakespeare", ("plays.txt",), []),
    ("shakespeare", "shakespeare", ("by_role.json",), []),
    ("shakespeare", "shakespeare", ("other.json",), None),
    ("pacs", "PACS", ("kfold/photo/", "kfold/sketch/"), ["art_painting", "cartoon"]),
    ("pacs", "PACS", ("photo/",), None),
    ("pacs", "PACS", ("pacs64.npz",), []),
    ("digit5", "digit5", ("usps/usps.npz", "train_32x32.mat"), None),
    ("digit5", "digit5", ("usps/usps.npz", "syn/train.npz", "syn/test.npz"), ["mnist", "mnist-m", "svhn"]),
    ("digit5", "digit5", (*(f"mnist/{name}" for name in MNIST.files), "syn_number.mat"), ["mnist-m", "svhn", "usps"]),
]  # fmt: skip
"""For a data set its folder, what is in it, and the parts that are missing then; None: it is not recognised."""


@pytest.mark.parametrize(("name", "folder", "files", "missing"), LAYOUTS)
@pytest.mark.parametrize("place", ["FEDLOOM_DATA", "FEDLOOM_CACHE"])
def test_what_is_on_this_machine_is_seen_without_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    name: str,
    folder: str,
    files: tuple[str, ...],
    missing: list[str] | None,
) -> None:
    root = tmp_path / place
    for variable in ("FEDLOOM_DATA", "FEDLOOM_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    for file in files:
        path = root / folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(parents=True) if file.endswith("/") else path.touch()
    listed = {entry["name"]: entry for entry in read_catalog_entries("datasets")}
    source = DATASET_SOURCES[name]
    if missing is None:
        by_hand = bool(source.manual_steps)
        assert listed[name]["state"] == ("must be downloaded by hand" if by_hand else "can be downloaded")
        assert (listed[name]["found"], listed[name]["missing"]) == (None, [])
        assert listed[name]["get"] == (source.manual_steps or None)
    else:
        assert (listed[name]["state"], listed[name]["get"]) == ("on this machine", None)
        assert (listed[name]["found"], listed[name]["missing"]) == (str(root / folder), missing)
    for info in available_datasets():
        found = str(info.folder) if info.folder else None
        now = (info.state, found, list(info.missing_parts), info.manual_steps or None)
        entry = listed[info.name]
        assert (entry["state"], entry["found"], entry["missing"], entry["get"]) == now


def test_methods_that_are_not_built_in_are_listed(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from fedloom import Client, Method, register\n"
        "register(Method('of-a-file', 'do nothing new', 'Doe, 2025', client=Client))\n"
    )
    built_in = [entry["name"] for entry in command("list", "methods", "--json").result]
    with_file = [entry["name"] for entry in command("list", "methods", "--import", "mine.py", "--json").result]
    assert with_file == sorted([*built_in, "of-a-file"])
    register(Method("of-a-package", "do nothing new", "Doe, 2025"))
    monkeypatch.setattr(catalog, "entry_points", lambda group: ["of-a-package"] if group == "fedloom.methods" else [])
    assert "of-a-package" in [entry["name"] for entry in read_catalog_entries("methods")]
    ended = command("list", "datasets", "--import", "none.py")
    assert (ended.code, ended.err) == (2, "fedloom: there is no file 'none.py' to import.\n")
