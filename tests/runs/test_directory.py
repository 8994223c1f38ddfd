"""Tests of the run directory: round trip, damaged files, no overwriting."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.config import Config
from fedloom.errors import FedloomError, InputError
from fedloom.runs.directory import RunDirectory, claim_directory, directory_name, refuse_occupied_directory
from fedloom.utils.storage import read_json, read_safetensors

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
OPTION = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), TEXT)


@pytest.fixture
def folder(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", Config())


def claim(path: Path) -> RunDirectory:
    with claim_directory(path, refuse_occupied_directory):
        return RunDirectory.create(path, Config())


@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "method": TEXT,
            "data": TEXT,
            "model": TEXT,
            "clients": st.integers(10, 1000),
            "clients_per_round": st.one_of(st.none(), st.integers(1, 10)),
            "steps": st.one_of(st.none(), st.integers(0, 9)),
            "clip": st.one_of(st.none(), st.floats(1e-300, 1e300)),
            "lr": st.floats(0, 1e300),
            "momentum": st.floats(0, 1, exclude_max=True),
            "seed": st.integers(0, 2**63 - 1),
            "optimizer": st.sampled_from(["sgd", "adam"]),
            "channels_last": st.booleans(),
            "imports": st.lists(TEXT.filter(lambda path: "\0" not in path), max_size=2),
            "options": st.dictionaries(TEXT, st.dictionaries(TEXT, OPTION, max_size=2), max_size=2),
        },
    ),
    own=st.sampled_from([(), ("data",), ("data", "model", "loss")]),
)
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_config_is_read_back_as_it_was(
    values: dict[str, Any], own: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run")
    config = Config(**values)
    RunDirectory.create(path, config, own)
    opened = RunDirectory.open(path)
    assert opened.config == config
    assert opened.python_objects == own
    assert opened.path == path


def test_a_new_folder_holds_its_config_alone(tmp_path: Path) -> None:
    made = RunDirectory.create(tmp_path / "a" / "b", Config(keep_checkpoints=5))
    assert sorted(p.name for p in made.path.iterdir()) == ["config.toml", "inputs.json"]
    assert made.checkpoints.keep_checkpoints == 5
    assert made.history() == []
    assert made.summary() is None


# refusals


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"is not empty; choose another --out\.$"):  # nothing that can go on
        claim(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    RunDirectory.create(tmp_path / "run", Config())
    with pytest.raises(
        InputError, match=r"is not empty; choose another --out, or continue with: fedloom resume .*run$"
    ):
        claim(tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.toml", "inputs.json"]


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="it, or a part of its path, is a file"):
            claim(path)
        with (
            pytest.raises(InputError, match="it, or a part of its path, is a file"),
            claim_directory(path / "x", numbered=True),
        ):
            raise AssertionError("it was made")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("mkdir", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, full)
            with pytest.raises(InputError, match=r"cannot make the folder .*full, .*: No space left on device\."):
                claim(tmp_path / "full")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FedloomError, match=r"cannot write .*inputs\.json: No space left on device\."):
            claim(tmp_path / "full")
    assert list(tmp_path.iterdir()) == []
    claim(tmp_path / "full")  # once there is room again, nothing is in the way


def test_a_name_that_is_too_long_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="File name too long"):
        claim(tmp_path / ("x" * 300))


def test_what_is_not_a_run_is_said(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match=r"is not a run: there is no config\.toml in it\."):
            RunDirectory.open(path)


@pytest.mark.parametrize("found", ["2", "4", '"one"'])
def test_a_run_of_another_format_is_said(found: str, folder: RunDirectory) -> None:
    config = folder.path / "config.toml"
    config.write_text(config.read_text().replace("format = 3", f"format = {found}"))
    with pytest.raises(
        InputError,
        match=r"is a run of format .* \(made by fedloom .*\); .* reads format 3\. Repeat it with: fedloom run",
    ):
        RunDirectory.open(folder.path)
    config.write_text("")
    with pytest.raises(InputError, match=r"format None \(made by fedloom unknown\)"):
        RunDirectory.open(folder.path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("rounds = 0", r"config\.toml: rounds must be greater than or equal to 1, not 0\."),
        ("rouns = 3", r"config\.toml: unknown setting 'rouns'; did you mean 'rounds'\?"),
        ("rounds = ", r"config\.toml is not TOML"),
    ],
)
def test_a_spoilt_config_is_said(change: str, complaint: str, folder: RunDirectory) -> None:
    config = folder.path / "config.toml"
    config.write_text(config.read_text().replace("rounds = 30", change))
    with pytest.raises(InputError, match=complaint):
        RunDirectory.open(folder.path)


# metrics


RECORDS = [{"round": n, "loss": 0.1 * n, "é": None} for n in range(4)]


def test_records_are_read_back_in_order(folder: RunDirectory) -> None:
    for record in RECORDS:
        folder.append_record(record)
    assert folder.history() == RECORDS
    assert RunDirectory.open(folder.path).history() == RECORDS


def test_a_line_cut_anywhere_does_not_count_and_is_rewound(folder: RunDirectory) -> None:
    for record in RECORDS:
        folder.append_record(record)
    path = folder.path / "metrics.jsonl"
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in range(1, last):
        path.write_bytes(whole[:-cut])
        assert folder.history() == RECORDS[:-1]
    folder.rewind(3)
    assert path.read_bytes() == whole[:-last]
    folder.append_record(RECORDS[3])
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", [b"{", b"", b"3", b"[]", b"{}", b'{"round": "x"}', b"\xff"])
def test_a_spoilt_line_in_the_middle_is_said(line: bytes, folder: RunDirectory) -> None:
    for record in RECORDS:
        folder.append_record(record)
    lines = (folder.path / "metrics.jsonl").read_bytes().splitlines()
    (folder.path / "metrics.jsonl").write_bytes(b"\n".join([lines[0], line, *lines[2:], b""]))
    with pytest.raises(InputError, match=r"line 2 of .*metrics\.jsonl is damaged"):
        folder.history()


@given(count=st.integers(0, 5), round=st.integers(-1, 6))
@settings(deadline=None, max_examples=12)
def test_rewind_forgets_later_rounds_alone(count: int, round: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = RunDirectory.create(tmp_path_factory.mktemp("run"), Config())
    records = [{"round": number, "x": number / 3} for number in range(count)]
    for record in records:
        folder.append_record(record)
    folder.rewind(round)
    assert folder.history() == [record for record in records if record["round"] <= round]


def test_rewind_adds_the_record_that_a_kill_left_out(folder: RunDirectory) -> None:
    for record in RECORDS[:2]:
        folder.append_record(record)
    before = folder.metrics_checksum
    folder.rewind(2, RECORDS[2], before)
    assert folder.history() == RECORDS[:3]
    folder.rewind(2, {"round": 2, "loss": 99.0}, before)
    assert folder.history() == RECORDS[:3], "a record that is there already stays"


def test_metrics_that_cannot_be_written_or_read_are_said(folder: RunDirectory) -> None:
    (folder.path / "metrics.jsonl").mkdir()
    with pytest.raises(FedloomError, match=r"cannot read .*metrics\.jsonl: Is a directory\."):
        folder.history()
    (folder.path / "metrics.jsonl").rmdir()
    folder.append_record({"round": 0})
    (folder.path / "metrics.jsonl").unlink()
    (folder.path / "metrics.jsonl").mkdir()
    with pytest.raises(FedloomError, match=r"cannot write .*metrics\.jsonl: Is a directory\."):
        folder.append_record({"round": 1})


# beside them


def test_the_model_is_stored_under_its_names(folder: RunDirectory) -> None:
    weight = torch.arange(6.0).view(2, 3)
    folder.write_model({"a.weight": weight, "tied.weight": weight, "steps": torch.tensor(3)})
    back = read_safetensors(folder.path / "model.safetensors")
    assert torch.equal(back["tied.weight"], weight)
    assert back["steps"].item() == 3


def test_the_partition_is_stored_where_it_is_known(folder: RunDirectory) -> None:
    folder.write_partition(None, (), None)
    assert not (folder.path / "partition.json").exists()
    stored = {"classes": 3, "class_names": ["a", "b", "c"], "counts": [[1, 2, 3], [0, 0, 9]]}
    for test_counts, also in ((None, {}), (np.array([4, 5, 6]), {"test_counts": [4, 5, 6]})):
        folder.write_partition(np.array(stored["counts"]), ("a", "b", "c"), test_counts)
        assert read_json(folder.path / "partition.json") == stored | also


def test_the_summary_is_read_back_or_refused(folder: RunDirectory) -> None:
    summary = {"accuracy": 0.5, "digest": "abc", "loss": None}
    folder.write_summary(summary)
    assert folder.summary() == summary
    for content in (b"{", b"3", b"[1]", b"{}", b"\xff"):
        (folder.path / "summary.json").write_bytes(content)
        with pytest.raises(InputError, match=r"summary\.json is damaged"):
            folder.summary()


def test_numbered_folders_are_new_and_their_names_safe(tmp_path: Path) -> None:
    name = directory_name(Config(method="fedavg+fedprox", data="folder:a/my x", seed=3))
    assert name == "fedavg+fedprox-my_x-seed3"
    (tmp_path / f"{name}-002").write_text("")
    with (
        claim_directory(tmp_path / name, numbered=True) as first,
        claim_directory(tmp_path / name, numbered=True) as second,
    ):
        assert [first.name, second.name] == [f"{name}-001", f"{name}-003"]
        RunDirectory.create(second, Config())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}-002", f"{name}-003"]


def test_two_processes_cannot_work_on_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.runs.directory.PATIENCE", 2)
    folder = RunDirectory.create(tmp_path / "run", Config())
    again = RunDirectory.open(folder.path)
    with folder.lock(), pytest.raises(InputError, match="another process is at work"), again.lock():
        raise AssertionError("the lock was given twice")
    with again.lock():
        assert (folder.path / "config.toml").is_file()
