"""Tests with flipped bits in the files of runs: none is silent."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.cli.main import main
from fedloom.report import read_run_record
from tests.support.small_runs import TINY

NEVER_READ = ("report.html", ".lock")
METHOD = "fedcda"
SETTINGS: dict[str, Any] = {**TINY, "options": {"fedcda": {"warmup": 1, "K": 2}}, "checkpoint_seconds": 0}


def run_once(place: Path) -> tuple[Path, Path]:
    """Return a finished run and the same run after its second round; both keep their rows in files."""
    place.mkdir(exist_ok=True)
    finished = fedloom.run(METHOD, out=place / "run", cache_dir=str(place / "rows"), **SETTINGS)
    unfinished = place / "unfinished"
    shutil.copytree(finished.path, unfinished)
    for name in ("summary.json", "model.safetensors"):
        (unfinished / name).unlink()
    for path in (unfinished / "checkpoints").glob("*000003*"):
        path.unlink()
    return finished.path, unfinished


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return run_once(tmp_path_factory.mktemp("flips"))


def flip(path: Path, draw: random.Random) -> bytes:
    """Flip one bit of a file, and return what it held before."""
    before = path.read_bytes()
    at = draw.randrange(8 * len(before))
    after = bytearray(before)
    after[at // 8] ^= 1 << at % 8
    path.write_bytes(after)
    return before


def attempt(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command. Return its exit code and what it wrote to stderr."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return int(ended.value.code or 0), err


def check_flip(run: Path, other: Path, draw: random.Random, place: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Flip a bit in a file of a copy of `run`. Return whether it was detected; fail if it is silent."""
    copy = place / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    rows = sorted((run.parent / "rows").rglob("rows-*.bin"))
    files = [path for path in sorted(copy.rglob("*")) if path.is_file() and path.name not in NEVER_READ] + rows
    path = draw.choice([path for path in files if path.stat().st_size])
    before = flip(path, draw)
    saved = [(row, row.read_bytes()) for row in rows]
    try:
        said = []
        for words in (["report", str(copy), "--out", str(place / "r.html")], ["resume", str(copy), "--quiet"]):
            code, err = attempt(words, capsys)
            assert code in (0, 2), (path, words, err)
            said.append(err)
        if (copy / "model.safetensors").exists() and (copy / "summary.json").exists():
            words = ["run", "fedavg", "--init", str(copy), "--out", str(place / "init"), "--quiet"]
            code, err = attempt([*words, "--rounds", "1", "--model", "logreg", "--clients", "6"], capsys)
            shutil.rmtree(place / "init", ignore_errors=True)
            said.append(err)
        if any(path.name in err for err in said):
            return True
        # Not detected, so nothing of it may be visible.
        fresh = fedloom.resume(copy)
        whole = fedloom.resume(other)
        assert fresh.digest == whole.digest, path
        times = [[{**record, "seconds": 0} for record in result.history] for result in (fresh, whole)]
        assert times[0] == times[1], path
        for name, tensor in fresh.model().state_dict().items():
            assert tensor.equal(whole.model().state_dict()[name]), path
        return False
    finally:
        for row, content in saved:
            row.write_bytes(content)
        if path in rows:
            path.write_bytes(before)


@pytest.mark.parametrize("count", [8, pytest.param(150, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("which", [0, 1])
def test_no_flipped_bit_is_silent(
    runs: tuple[Path, Path], which: int, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(which)
    found = sum(check_flip(runs[which], runs[0], draw, tmp_path, capsys) for _ in range(count))
    assert found >= count // 4, "most of the bytes are in files that both commands read"


def read_everything(run: Path) -> None:
    read_run_record(run)
    fedloom.resume(run).model()


@pytest.mark.parametrize(
    "name", ["config.toml", "inputs.json", "metrics.jsonl", "summary.json", "partition.json", "model.safetensors"]
)
def test_each_file_of_a_finished_run_is_named(runs: tuple[Path, Path], name: str, tmp_path: Path) -> None:
    draw = random.Random(name)
    for attempt_number in range(12):
        copy = tmp_path / str(attempt_number)
        shutil.copytree(runs[0], copy)
        flip(copy / name, draw)
        with pytest.raises(fedloom.InputError, match=name.replace(".", r"\.")):
            read_everything(copy)


def test_rows_of_fedcda_are_checked(runs: tuple[Path, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(runs[1], copy)
    [rows] = (runs[1].parent / "rows").rglob("rows-*.bin")
    before = rows.read_bytes()
    rows.write_bytes(bytes([before[0] ^ 1]) + before[1:])
    try:
        with pytest.raises(fedloom.InputError, match=r"rows-.*\.bin is damaged"):
            fedloom.resume(copy)
    finally:
        rows.write_bytes(before)
