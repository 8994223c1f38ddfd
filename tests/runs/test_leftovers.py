"""What killed processes leave outside a run directory, and its removal."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.runs import leftovers
from fedloom.runs.directory import hold_directory_lock
from tests.support.small_runs import TINY


def run(place: Path, **more: Any) -> fedloom.RunResult:
    return fedloom.run("fedcda", out=place / "run", cache_dir=str(place / "rows"), **{**TINY, **more})


def test_rows_that_no_checkpoint_names_are_removed(tmp_path: Path) -> None:
    first = run(tmp_path)
    [kept] = (tmp_path / "rows").rglob("rows-*.bin")
    orphan = kept.with_name("rows-00000000000000000000000000000000.bin")
    orphan.write_bytes(b"left")
    other = tmp_path / "rows" / "fedloom-of-another-run"
    other.mkdir()
    (other / "rows-1.bin").write_bytes(b"of another run")
    (first.path / "summary.json").unlink()
    assert fedloom.resume(first.path).digest == first.digest
    assert kept.exists()
    assert not orphan.exists()
    assert (other / "rows-1.bin").exists()
    (first.path / "summary.json").unlink()
    shutil.rmtree(first.path / "checkpoints")  # as if it was killed before the first one
    assert fedloom.resume(first.path).digest == first.digest
    assert len(list(kept.parent.iterdir())) == 1
    assert not kept.exists()


def test_a_verification_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    first = run(tmp_path)
    before = sorted((tmp_path / "rows").rglob("*"))
    dead, alive = (tmp_path / "tmp" / f"{leftovers.VERIFY}{name}" for name in ("dead", "alive"))
    shutil.copytree(first.path, dead / "run")
    (dead / ".lock").touch()
    holder = "import sys, time; from pathlib import Path; from fedloom.runs.directory import hold_directory_lock\n"
    holder += f"with hold_directory_lock(Path({str(alive)!r})): print('held', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        shutil.copytree(first.path, alive / "run")
        copy = shutil.copytree(first.path, tmp_path / "copy")
        inputs = (dead / "run" / "inputs.json").read_bytes()
        (dead / "run" / "inputs.json").write_bytes(inputs[:-9])  # damaged: its rows stay
        assert fedloom.verify(copy) == (first.digest, first.digest)
        assert not dead.exists()
        assert alive.exists()
    finally:
        process.kill()
        process.communicate()
    assert sorted((tmp_path / "rows").rglob("*")) == before
    with hold_directory_lock(alive):
        pass
    assert fedloom.verify(first.path) == (first.digest, first.digest)
    assert not alive.exists()
