"""Tests of the comparison with other libraries: ratios, checks, tables."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import fedloom_run, loop, main, summary, tables
from benchmarks.peers.contestant import CONTESTANTS
from benchmarks.peers.environment import CONSTRAINTS, command_of_contestant
from benchmarks.peers.job import INITIAL, LAUNCHED, RoundClock, Settings, write_job
from benchmarks.peers.pictures import DIGITS, load_pictures
from fedloom.methods import registry

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "results" / "peers.json"


def made(*rounds: float, accuracy: float = 60.0, steps: int = 20) -> dict[str, Any]:
    """The result of a contestant with ten steps a round, if there are two rounds with the one that warms up."""
    versions = {"torch": "2", "pfl": "1", "flwr": "1"}
    return {"first round": 5.0, "rounds": list(rounds), "steps": steps, "accuracy": accuracy, "versions": versions}


def turn(**contestants: dict[str, Any]) -> dict[str, Any]:
    return {"load before": 0.0, "contestants": contestants}


def results(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Results as the command writes them, of turns made up."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found | {"turns": turns, "summary": summary.summarize_turns(turns)}


def test_ratios_compare_contestants_within_a_turn() -> None:
    turns = [turn(loop=made(2, 4, 9), fedloom=made(1, 2, 3)), turn(loop=made(30), fedloom=made(10)), turn(
        loop=made(5), fedloom=made(5))]  # fmt: skip
    found = summary.summarize_turns(turns)
    assert found["loop"]["all ratios to fedloom"] == [1.0, 2.0, 3.0]
    assert found["loop"]["ratio to fedloom"] == 2.0
    assert found["loop"]["seconds a round"] == 5.0
    assert found["fedloom"]["ratio to fedloom"] == 1.0


def test_a_failure_is_reported_and_other_turns_count() -> None:
    turns = [turn(pfl={"failure": "no"}, flower={"failure": "x"}, fedloom=made(1)), turn(
        pfl=made(3), flower={"failure": "y"}, fedloom=made(2))]  # fmt: skip
    found = summary.summarize_turns(turns)
    assert found["pfl"]["all ratios to fedloom"] == [1.5]
    assert found["pfl"]["failures"] == ["no"]
    assert found["flower"] == {"failures": ["x", "y"]}
    shown = tables.cpu_table(results(turns))
    assert "| pfl-research (1) (failed in 1 of 2 turns) | one process" in shown
    assert "| Flower's simulation | did not run: x |" in shown


def test_work_that_differs_is_found() -> None:
    equal = summary.summarize_turns([turn(loop=made(2), pfl=made(2, accuracy=67.9), fedloom=made(1))])
    near = {"loop": 0.0, "pfl": 9e-5, "fedloom": 1e-6}
    assert not summary.find_differences(equal, near, steps=10)
    assert len(summary.find_differences(equal, near, steps=11)) == 3
    for distance in (2e-4, float("nan"), "it failed"):
        (said,) = summary.find_differences(equal, {**near, "pfl": distance}, steps=10)
        assert said.startswith("pfl's model")
    other = summary.summarize_turns([turn(loop=made(2), pfl=made(2, accuracy=51.9), fedloom=made(1, steps=21))])
    steps, accuracy = sorted(summary.find_differences(other, near, steps=10))
    assert steps.startswith("fedloom made [10.5] steps")
    assert "-8.1 points" in accuracy


def test_the_pages_show_the_results() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.fill_page(text, found) == text, f"python -m benchmarks peers --write {RESULTS.name}"
    docs = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert all(f"<!-- peers: {name} -->" in docs for name in ("setting", "cpu", "gpu"))


def test_the_results_are_whole() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert found["summary"] == summary.summarize_turns(found["turns"])
    assert list(found["summary"]) == list(CONTESTANTS)
    assert found["same work"]["differences"] == []
    assert found["same work"]["steps a round"] == 60
    assert found["settings"]["data"] == "fashion-mnist"
    assert "Entered by hand" in found["gpu"]["source"]
    versions = {one.get("versions", {}).get("torch") for one in found["summary"].values()}
    assert len(versions) == 1


def test_the_overview_takes_the_faster_setting_of_a_peer() -> None:
    one = turn(**{"loop": made(2), "pfl": made(3), "pfl-torchrun": made(1.5), "flower": made(4), "fedloom": made(1)})
    first = tables.overview(results([one])).splitlines()[2]
    assert first.endswith("| 2.0 | 1.50 | 4.0 | 1.00 s |")


def test_a_new_call_keeps_the_figures_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = json.loads(RESULTS.read_text(encoding="utf-8"))["gpu"]
    out = tmp_path / "peers.json"
    out.write_text(json.dumps({"gpu": gpu, "summary": "old"}), encoding="utf-8")
    same = {name: made(1.0) for name in CONTESTANTS}
    monkeypatch.setattr(main, "prepare_environment", lambda: Path("python"))
    monkeypatch.setattr(main, "measure_distances", lambda *_: dict.fromkeys(CONTESTANTS, 0.0))
    monkeypatch.setattr(main, "run_turn", lambda *_: same)
    main.main(["--turns", "2", "--rounds", "1", "--samples", "50", "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["gpu"] == gpu
    assert [one["contestants"] for one in found["turns"]] == [same, same]
    assert found["summary"]["loop"]["ratio to fedloom"] == 1.0
    assert str(tmp_path) in found["command"]


def test_a_failed_process_gives_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.exit('no such peer\\n====')"
    monkeypatch.setattr(main, "command_of_contestant", lambda *_: ["python3", "-c", code])
    assert main.run_contestant("pfl", tmp_path, Path("python")) == {"failure": "no such peer"}
    with pytest.raises(SystemExit, match="fedloom failed: no such peer"):
        main.run_contestant("fedloom", tmp_path, Path("python"))


def test_peers_run_in_their_own_environment() -> None:
    python = Path("peers") / "python"
    for name, contestant in CONTESTANTS.items():
        words = command_of_contestant(name, python, cores=3)
        assert (words[0] == str(python)) == contestant.peer
        assert words[-1] == name
        assert ("--nproc-per-node" in words) == contestant.torchrun
    pinned = CONSTRAINTS.read_text(encoding="utf-8")
    for package in ("torch", "pfl", "flwr", "ray"):
        assert f"\n{package}==" in pinned


def test_loop_and_fedloom_do_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is drawn. The comparison would also find another loss, learning rate or weighting."""
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path))
    monkeypatch.setenv(LAUNCHED, str(time.time()))
    registry.methods()
    monkeypatch.setattr(registry, "_methods", dict(registry._methods))  # the run registers a method
    name, arrays, mean, std = load_pictures(3 * 8, seed=0)
    assert name == DIGITS
    assert arrays["x"].shape == (24, 28, 28)
    assert arrays["x"].dtype == np.uint8
    settings = Settings(name, mean, std, 1, 8, clients=3, clients_per_round=3, batch_size=8, epochs=2, smooth=True)
    job = write_job(tmp_path, settings, arrays)
    found = {}
    for train in (loop.train, lambda job, clock: fedloom_run.train(job, clock, "sequential")):
        clock = RoundClock()
        weights, steps = train(job, clock)
        assert steps == 2 * settings.steps_per_round == 12
        assert len(clock.seconds) == 2
        found[len(found)] = main._flatten(weights)
    initial = main._flatten(torch.load(job.folder / INITIAL))
    assert (found[0] - found[1]).norm() < summary.MODEL_TOLERANCE * (found[0] - initial).norm()
