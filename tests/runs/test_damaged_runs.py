"""Tests of runs with damaged or changed files.

A run says what is wrong, or continues from intact files.
"""

import json
import os
from pathlib import Path

import pytest

import fedloom
from fedloom.errors import InputError
from fedloom.runs.callback import Callback
from tests.support.refusals import TINY, Command, refused
from tests.support.rewritten_config import rewrite_config


@pytest.fixture
def unfinished(command: Command, tmp_path: Path) -> Path:
    """A run with two checkpoints that has not finished."""
    words = ("--rounds", 3, "--checkpoint-seconds", 0, "--out", "r", "--quiet")
    assert command("run", "scaffold", *TINY, *words).code == 0
    (tmp_path / "r" / "summary.json").unlink()
    return tmp_path / "r"


def checkpoints(folder: Path, pattern: str) -> list[Path]:
    return sorted((folder / "checkpoints").glob(pattern))


@pytest.mark.quick_if(how=("bit", "gone"))
@pytest.mark.parametrize("pattern", ["round-*.json", "round-*.safetensors"])
@pytest.mark.parametrize("how", ["cut", "bit", "empty", "gone", "noise", "list"])
def test_damaged_checkpoints(command: Command, unfinished: Path, pattern: str, how: str) -> None:
    """One is passed over, with a word; when all are, that is said, and the run is left as it is."""
    whole = command("run", "scaffold", *TINY, "--rounds", 3, "--json").result
    content = {path: path.read_bytes() for path in checkpoints(unfinished, "*")}

    def damage(path: Path) -> None:
        old = path.read_bytes()
        if how == "gone":
            path.unlink()
            return
        flipped = old[:-20] + bytes([old[-20] ^ 1]) + old[-19:]
        broken = {"cut": old[:-7], "bit": flipped, "empty": b"", "noise": os.urandom(99), "list": b"[1, 2]\n"}
        path.write_bytes(broken[how])

    damage(checkpoints(unfinished, pattern)[-1])
    ended = command("resume", "r", "--json")
    assert ended.result["digest"] == whole["digest"]
    if not (how == "gone" and pattern.endswith("json")):
        assert "Continuing from the checkpoint before it" in ended.err

    (unfinished / "summary.json").unlink()
    for path in checkpoints(unfinished, "*"):
        path.unlink()
    for path, old in content.items():
        path.write_bytes(old)
    for path in checkpoints(unfinished, pattern):
        damage(path)
    if how == "gone" and pattern.endswith("json"):
        return  # then there is no checkpoint at all, and the run starts from the beginning
    metrics = (unfinished / "metrics.jsonl").read_bytes()
    refused(command("resume", "r"), "r/checkpoints/round-000003")
    assert (unfinished / "metrics.jsonl").read_bytes() == metrics


def test_without_checkpoints_a_run_starts_from_the_beginning(command: Command, unfinished: Path) -> None:
    for path in checkpoints(unfinished, "*"):
        path.unlink()
    whole = command("run", "scaffold", *TINY, "--rounds", 3, "--json").result
    assert command("resume", "r", "--json").result["digest"] == whole["digest"]
    lines = (unfinished / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3]


def test_damaged_client_files(command: Command, unfinished: Path) -> None:
    for path in checkpoints(unfinished, "clients-*"):
        path.write_bytes(path.read_bytes()[:-1])
    refused(command("resume", "r"), "checkpoints/clients-")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("format = 3", "format = 99", ("format 99", "fedloom")),
        ("format = 3\n", "", ("format None",)),
        ("rounds = 3", "rounds = -3", ("config.toml", "rounds")),
        ("rounds = 3", "rouns = 3", ("config.toml", "'rouns'", "'rounds'")),
        ("rounds = 3", "rounds = 3 3", ("config.toml", "TOML")),
        ('method = "scaffold"', 'method = "scafold"', ("'scafold'", "'scaffold'")),
        ("imports = []", 'imports = ["/nowhere/mine.py"]', ("/nowhere/mine.py",)),
    ],
)
def test_a_config_that_was_changed(
    command: Command, unfinished: Path, old: str, new: str, words: tuple[str, ...]
) -> None:
    path = unfinished / "config.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    refused(command("resume", "r"), *words)


@pytest.mark.parametrize("line", ["not json\n", "17\n", "{}\n", '["round"]\n', '{"round": null}\n'])
def test_metrics_that_were_changed(command: Command, unfinished: Path, line: str) -> None:
    path = unfinished / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], line, *lines[2:]]))
    refused(command("resume", "r"), "line 2", "metrics.jsonl")


@pytest.mark.parametrize("text", ["", "{", "[]", "[1]", "7", '"text"', "{}", "null"])
def test_a_summary_that_was_changed(command: Command, unfinished: Path, text: str) -> None:
    (unfinished / "summary.json").write_text(text)
    refused(command("resume", "r"), "summary.json")
    refused(command("verify", "r"), "summary.json")


@pytest.mark.parametrize("method", ["fedavg", "scaffold+fedcross", "fedcda"])
def test_a_model_that_is_gone_is_written_again(command: Command, tmp_path: Path, method: str) -> None:
    first = command("run", method, *TINY, "--out", "r", "--json").result
    model = tmp_path / "r" / "model.safetensors"
    content = model.read_bytes()
    model.unlink()
    way = "r/model.safetensors is gone; write it again with: fedloom resume r"
    refused(command("verify", "r"), way)
    refused(command("run", "fedavg", *TINY, "--init", "r", "--out", "s"), "model.safetensors is gone; write it again")
    with pytest.raises(InputError, match=r"model\.safetensors is gone; write it again with: fedloom resume"):
        fedloom.resume(tmp_path / "r", callbacks=[Gone(model)]).model()
    kept = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    ended = command("resume", "r", "--json")
    assert ended.result == first
    assert "r/model.safetensors was gone; it was written again from the last checkpoint." in ended.err
    assert model.read_bytes() == content
    assert {path: path.read_bytes() for path in kept} == kept, "nothing else is touched"
    assert command("resume", "r", "--json").err == ""


class Gone(Callback):
    """Somebody who deletes a file as soon as it was written."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_message(self, text: str) -> None:
        if "written again" in text:
            self.file.unlink()


def test_for_a_model_that_is_gone_one_of_several_gpus_is_enough(command: Command, tmp_path: Path) -> None:
    assert command("run", "fedavg", *TINY, "--out", "r", "--quiet").code == 0
    (tmp_path / "r" / "model.safetensors").unlink()
    rewrite_config(tmp_path / "r", device="cuda:7,cuda:8")
    refused(command("resume", "r"), "device 'cuda:7' cannot be used here")


@pytest.mark.parametrize("how", ["gone", "older", "damaged"])
def test_a_model_that_cannot_be_written_again(command: Command, tmp_path: Path, how: str) -> None:
    assert command("run", "fedavg", *TINY, "--checkpoint-seconds", 0, "--out", "r", "--quiet").code == 0
    (tmp_path / "r" / "model.safetensors").unlink()
    for path in checkpoints(tmp_path / "r", "round-*" if how != "older" else "round-000002*"):
        path.unlink() if how != "damaged" else path.write_bytes(b"")
    before = sorted((tmp_path / "r").rglob("*"))
    words = ("r/model.safetensors is gone, and so is the checkpoint after the last round", "settings in r/config.toml")
    refused(command("resume", "r"), *words)
    assert sorted((tmp_path / "r").rglob("*")) == before


def test_settings_that_would_change_the_result_cannot_be_changed(command: Command, unfinished: Path) -> None:
    assert unfinished.is_dir()
    refused(command("resume", "r", "--lr", 1), "--lr")
    refused(command("resume", "r", "--engine", "gpu"), "'gpu'")
    refused(command("resume", "r", "--workers", "many"), "'many'")
