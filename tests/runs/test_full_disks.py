"""Tests that a run on a full disk stops with a message and can be resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.small_runs import TINY_OPTIONS, Command


def test_a_full_disk_ends_in_a_sentence_and_the_run_goes_on_later(command: Command, tmp_path: Path) -> None:
    """Files may not grow beyond 2,500 bytes: the model's checkpoint does."""
    code = (
        "import resource, signal, sys\n"
        "from fedloom.cli.main import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))\n"
        "main(sys.argv[1:])\n"
    )
    words = [*map(str, ("run", "scaffold", *TINY_OPTIONS, "--out", "r", "--checkpoint-seconds", 0, "-q"))]
    process = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 1
    assert process.stdout == ""
    assert process.stderr.startswith("fedloom: cannot write r/checkpoints/")
    assert process.stderr.endswith("File too large.\n")
    assert process.stderr.count("\n") == 1
    resumed = command("resume", "r", "--json").result
    assert resumed["digest"] == command("run", "scaffold", *TINY_OPTIONS, "--json").result["digest"]
    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2, 3]


@pytest.mark.parametrize("after", range(0, 12, 3))
def test_no_space_at_the_nth_write(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: int
) -> None:
    real, calls = os.fsync, iter(range(10**6))

    def full(handle: int) -> None:
        if next(calls) >= after:
            raise OSError(28, "No space left on device")
        real(handle)

    words = ("run", "scaffold", *TINY_OPTIONS, "--checkpoint-seconds", 0, "--quiet")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        ended = command(*words, "--out", "r")
    assert ended.code == 1
    assert ended.err.startswith("fedloom: cannot write r/")
    assert ended.err.endswith("No space left on device.\n")
    again = ("resume", "r", "--json") if (tmp_path / "r" / "config.toml").exists() else (*words, "--out", "r", "--json")
    assert command(*again).result["digest"] == command(*words, "--json").result["digest"]
