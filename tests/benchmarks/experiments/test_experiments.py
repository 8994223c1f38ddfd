"""Tests of the experiments: valid definitions, and continuation after a stop."""

import json
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedloom
from benchmarks.experiments import main as experiments
from fedloom.config import make_config, replace_config
from fedloom.methods import compose

LISTED = experiments.listed()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(experiments, "LEAST", 0.0)
    monkeypatch.setattr(experiments, "REFRESH", 0.0)
    return experiments


def test_an_experiment_like_another_has_its_entries(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = '\n[[experiment]]\nname = "longer"\nlike = "digits, small"\nseeds = 1\n[experiment.settings]\nrounds = 9\n'
    (tmp_path / "list.toml").write_text(SMALL + like)
    monkeypatch.setattr(driver, "LIST", tmp_path / "list.toml")
    first, _, longer = driver.listed()
    assert longer == {
        **first,
        "name": "longer",
        "like": "digits, small",
        "seeds": 1,
        "settings": {**first["settings"], "rounds": 9},
    }


@pytest.mark.parametrize("experiment", LISTED, ids=lambda experiment: experiment["name"])
def test_the_list_makes_sense(experiment: dict[str, Any], driver: ModuleType) -> None:
    for plan in (experiment, driver.tiny(experiment)):
        options = plan.get("options", {})
        assert set(options) <= set(plan["methods"])
        start = {"init": "the start"} if "start" in plan else {}
        config = make_config({"device": "cuda", **plan["settings"], **start})
        for method in plan["methods"]:
            composition = compose(method, {name: given for name, given in options.items() if name == method})
            assert replace_config(config, method=method, options=composition.resolved_options()).method == method
        if "start" in plan:
            before = make_config({"method": "centralized", "device": "cuda", **plan["start"]})
            assert before.model == plan["settings"]["model"]
            assert before.normalize == plan["settings"]["normalize"]
    names = [one["name"] for one in LISTED]
    assert len(set(names)) == len(names)


SMALL = """
[[experiment]]
name = "digits, small"
file = "digits"
paper = "none"
methods = ["fedavg", "scaffold"]
seeds = 2
concurrent_runs = 1
[experiment.settings]
rounds = 3
clients = 4
clients_per_round = 2
device = "cpu"
engine = "sequential"

[[experiment]]
name = "nothing"
file = "digits"
paper = "none"
methods = ["fedavg"]
seeds = 1
concurrent_runs = 1
[experiment.settings]
data = "csv:/nowhere"
device = "cpu"
"""


AFTER = """
[[experiment]]
name = "digits, warm-up"
file = "digits"
paper = "none"
methods = ["fedcda"]
seeds = 2
concurrent_runs = 1
options = { fedcda = { warmup = 3 } }
[experiment.settings]
rounds = 3
clients = 5
clients_per_round = 3
device = "cpu"
engine = "sequential"

[[experiment]]
name = "digits, random"
like = "digits, warm-up"
after = "digits, warm-up"
settings = { rounds = 7 }
options = { fedcda = { warmup = 3, selection = "random" } }

[[experiment]]
name = "digits, fedavg"
like = "digits, warm-up"
after = "digits, warm-up"
settings = { rounds = 7 }
options = { fedcda = { warmup = 7 } }
"""


def test_an_experiment_after_another_begins_with_its_rounds(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.toml").write_text(AFTER)
    monkeypatch.setattr(driver, "LIST", tmp_path / "list.toml")
    names = ["digits, random", "digits, fedavg"]
    given = [*names, "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    played: list[int] = []
    monkeypatch.setattr(driver.Deadline, "on_round_end", lambda _, record: played.append(record["round"]))
    driver.main(given)
    assert sorted(played) == sorted([0, 1, 2, 3, *[4, 5, 6, 7] * 2] * 2), "the first rounds are played once for a seed"
    found = json.loads((tmp_path / "results" / "digits.json").read_text())
    assert list(found) == ["digits, warm-up", *names]
    own = "the method's own figures, mean of the last ten rounds that have them, each seed"
    for seed in (0, 1):
        lines = (tmp_path / "runs" / "digits-random" / f"fedcda-seed{seed}" / "metrics.jsonl").read_text().splitlines()
        told = [json.loads(line).get("diagnostics", {}).get("server.older models chosen") for line in lines]
        mean = statistics.mean(value for value in told if value is not None)  # of seven rounds, all there are
        assert found["digits, random"]["methods"]["fedcda"][own]["server.older models chosen"][seed] == pytest.approx(
            mean, rel=1e-3
        )
    plain = {"clients": 5, "clients_per_round": 3, "rounds": 7, "engine": "sequential", "report": False}
    for seed in (0, 1):
        anew = {
            "random": fedloom.run(
                "fedcda", options={"fedcda": {"warmup": 3, "selection": "random"}}, seed=seed, runs=tmp_path, **plain
            ),
            "fedavg": fedloom.run("fedavg", seed=seed, runs=tmp_path, **plain),
        }
        for name, run in anew.items():
            after = json.loads((tmp_path / "runs" / f"digits-{name}" / f"fedcda-seed{seed}/summary.json").read_text())
            assert after["digest"] == run.digest, f"{name}, the same as from the beginning"
    (tmp_path / "runs" / "digits-warm-up" / "fedcda-seed1" / "summary.json").unlink()
    with pytest.raises(driver.InputError, match="fedcda-seed1 has not finished"):
        driver.begin_after(driver.listed()[1], tmp_path / "runs" / "digits-warm-up", tmp_path / "elsewhere")


def test_what_is_stopped_goes_on(driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list.toml").write_text(SMALL)
    monkeypatch.setattr(driver, "LIST", tmp_path / "list.toml")

    def call(*arguments: str) -> dict[str, Any]:
        driver.main(["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results"), *arguments])
        return json.loads((tmp_path / "results" / "digits.json").read_text())  # type: ignore[no-any-return]

    rounds = iter(range(100))
    monkeypatch.setattr(driver.Deadline, "should_stop", lambda _: next(rounds) > 3)
    stopped = call("digits, small")["digits, small"]
    assert stopped["ended"].startswith("stopped")
    assert "scaffold" not in stopped["methods"]
    monkeypatch.undo()
    monkeypatch.setattr(driver, "LIST", tmp_path / "list.toml")
    found = call()
    assert list(found) == ["digits, small"], "data that are not there are told, and nothing is written about them"
    entry = found["digits, small"]
    assert entry["ended"] == "finished"
    assert entry["seconds"] > stopped["seconds"]
    assert list(entry["methods"]) == ["fedavg", "scaffold"]
    assert entry["methods"]["fedavg"]["rounds"] == 3
    given = {**found, "digits, small": {**entry, "seconds": 1e6}}
    (tmp_path / "results" / "digits.json").write_text(json.dumps(given))
    assert call("digits, small")["digits, small"]["seconds"] >= 1e6, "it went on, though nothing was left to do"
    (tmp_path / "runs").rename(tmp_path / "moved")
    given |= {f"digits, small, {method} alone": given["digits, small"] for method in ("fedavg", "scaffold")}
    (tmp_path / "results" / "digits.json").write_text(json.dumps(given))
    for method in ("fedavg", "scaffold"):
        found = call("digits, small", "--alone", method)
    assert all(found[f"digits, small, {method} alone"]["seconds"] < 1e6 for method in ("fedavg", "scaffold"))
    shares = entry["methods"]["fedavg"]["shares of the time"]
    assert {"train", "aggregate", "evaluate", "checkpoint"} <= set(shares)
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.05)
    assert len(entry["methods"]["fedavg"]["accuracy of each seed"]) == 2
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["digits.json"]


def test_one_run_alone_is_timed_and_not_played_again(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.toml").write_text(SMALL)
    monkeypatch.setattr(driver, "LIST", tmp_path / "list.toml")
    given = [
        "digits, small",
        "--runs",
        str(tmp_path / "runs"),
        "--results",
        str(tmp_path / "results"),
    ]
    played: list[int] = []
    monkeypatch.setattr(driver.Deadline, "on_round_end", lambda _, record: played.append(record["round"]))
    driver.main([*given, "--alone", "scaffold"])
    found = json.loads((tmp_path / "results" / "digits.json").read_text())
    assert list(found) == ["digits, small, scaffold alone"]
    assert list(found["digits, small, scaffold alone"]["methods"]) == ["scaffold"]
    assert played == [0, 1, 2, 3]
    driver.main(given)
    assert len(played) == 4 * 4, "four runs, of which one was there already"
    driver.main([*given, "--alone", "fedavg"])
    found = json.loads((tmp_path / "results" / "digits.json").read_text())
    assert list(found["digits, small, fedavg alone"]["methods"]) == ["fedavg"], "and not what else is in the folder"
    assert len(found["digits, small, fedavg alone"]["methods"]["fedavg"]["accuracy of each seed"]) == 1
    driver.main([*given, "--alone", "fedprox"])
    assert "This experiment has no method 'fedprox'; it has fedavg, scaffold." in capsys.readouterr().out
