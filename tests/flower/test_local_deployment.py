"""Tests of real local deployments: SuperLink, SuperNodes with keys, TLS.

They give the bits of the multiprocess engine.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedloom.config import Config, make_config, replace_config
from fedloom.runs.execute import execute_run, resume
from fedloom.runs.resolve import resolve_run
from fedloom.runs.result import RunResult

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedcross": {},
    "fedmr": {},
    "fedcda": {"fedcda": {"warmup": 1}},
    "lss": {"lss": {"models": 2}},
    "dynafed": {"dynafed": {"L": 2, "s": 1, "iterations": 5}},
    "scaffold": {},
}


def make_run(**more: Any) -> Config:
    usual = {"clients": 5, "rounds": 3, "epochs": 1, "engine": "flower", "deadline": 120}
    return make_config({**usual, **more})


def on_host(config: Config, folder: Path) -> RunResult:
    return execute_run(resolve_run(replace_config(config, engine="multiprocess", nodes=0)), out=folder, report=False)


def processes_of(folder: Path, name: str = "") -> list[int]:
    """The processes of the run in `folder` that are there now, or of one of its sites."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode(errors="replace")
            environ = (place / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if f"FEDLOOM_RUN={folder}" in environ and (not name or str(folder / "flower" / name) in words):
            found.append(int(place.name))
    return found


def nothing_is_left(folder: Path, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while processes_of(folder):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("method", METHODS)
def test_five_sites_give_the_same_bits_as_the_host_engine(method: str, tmp_path: Path) -> None:
    config = make_run(method=method, options=METHODS[method])
    run = execute_run(resolve_run(config), out=tmp_path / "run", report=False)
    assert run.summary["failed"] == 0
    assert run.digest == on_host(config, tmp_path / "host").digest
    assert nothing_is_left(tmp_path / "run")


def test_sites_share_clients(tmp_path: Path) -> None:
    config = make_run(method="scaffold", nodes=2, rounds=2)
    run = execute_run(resolve_run(config), out=tmp_path / "run", report=False)
    assert run.digest == on_host(config, tmp_path / "host").digest
    assert sorted(path.name for path in (tmp_path / "run" / "flower").glob("site-*") if path.is_dir()) == [
        "site-0",
        "site-1",
    ]


def rounds_of(folder: Path) -> int:
    try:
        return len((folder / "metrics.jsonl").read_text().splitlines())
    except OSError:
        return 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_leaves_no_process_and_goes_on_with_the_same_bits(how: int, tmp_path: Path) -> None:
    config = make_run(method="scaffold", clients=2, rounds=6)
    words = f"run scaffold --engine flower --clients 2 --rounds 6 --epochs 1 --deadline 120 -q --out {tmp_path / 'run'}"
    process = subprocess.Popen([sys.executable, "-m", "fedloom", *words.split()])
    while rounds_of(tmp_path / "run") < 3:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(how)
    if how == signal.SIGINT:  # the first stops after the round
        assert process.wait(60) == 130
    else:
        process.wait(60)
    assert nothing_is_left(tmp_path / "run", 20)
    assert not (tmp_path / "run" / "summary.json").exists()
    run = resume(tmp_path / "run", report=False)
    assert run.digest == on_host(config, tmp_path / "host").digest
    assert nothing_is_left(tmp_path / "run")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_rounds_go_on_without_a_site_that_is_killed_or_frozen(how: int, tmp_path: Path) -> None:
    words = f"run fedavg --engine flower --clients 3 --rounds 6 --deadline 12 -q --json --out {tmp_path / 'run'}"
    process = subprocess.Popen([sys.executable, "-m", "fedloom", *words.split()], stdout=subprocess.PIPE, text=True)
    while rounds_of(tmp_path / "run") < 2:
        assert process.poll() is None
        time.sleep(0.02)
    for pid in processes_of(tmp_path / "run", "site-1"):
        os.kill(pid, how)
    time.sleep(25)
    if how == signal.SIGSTOP:
        for pid in processes_of(tmp_path / "run", "site-1"):
            os.kill(pid, signal.SIGCONT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    summary = json.loads(out)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lost = [record["failed_clients"] for record in records[1:]]
    assert any("no answer within 12 s" in reasons.get("1", "") for reasons in lost), lost
    assert all(set(reasons) <= {"1"} for reasons in lost)
    assert summary["accuracy"] > 0.5
    assert nothing_is_left(tmp_path / "run")
