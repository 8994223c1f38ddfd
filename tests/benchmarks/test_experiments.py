"""benchmarks/experiments.py: its list makes sense, and what is stopped goes on."""

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedloom
from fedloom.config import PretrainConfig, make_config, replace_config
from fedloom.methods import compose
from fedloom.utils.settings import validate_settings

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load_driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("experiments_driver", FOLDER / "experiments.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(FOLDER)
        spec.loader.exec_module(module)
    return module


LISTED = load_driver().listed()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_driver()
    monkeypatch.setattr(module, "LEAST", 0.0)
    monkeypatch.setattr(module, "REFRESH", 0.0)
    return module


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
        start = {"init": "made by the pretraining"} if "pretrain" in plan else {}
        config = make_config({"device": "cuda", **plan["settings"], **start})
        for method in plan["methods"]:
            composition = compose(method, {name: given for name, given in options.items() if name == method})
            assert replace_config(config, method=method, options=composition.stated()).method == method
        if "pretrain" in plan:
            before = validate_settings(PretrainConfig, plan["pretrain"])
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
at_once = 1
[experiment.settings]
rounds = 3
clients = 4
per_round = 2
device = "cpu"
engine = "plain"

[[experiment]]
name = "nothing"
file = "digits"
paper = "none"
methods = ["fedavg"]
seeds = 1
at_once = 1
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
at_once = 1
options = { fedcda = { warmup = 3 } }
[experiment.settings]
rounds = 3
clients = 5
per_round = 3
device = "cpu"
engine = "plain"

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
    given = ["experiments.py", *names, "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", given)
    played: list[int] = []
    monkeypatch.setattr(driver.Deadline, "record", lambda _, record: played.append(record["round"]))
    driver.main()
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
    plain = {"clients": 5, "per_round": 3, "rounds": 7, "engine": "plain", "report": False}
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
        given = ["experiments.py", "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results"), *arguments]
        monkeypatch.setattr(sys, "argv", given)
        driver.main()
        return json.loads((tmp_path / "results" / "digits.json").read_text())  # type: ignore[no-any-return]

    rounds = iter(range(100))
    monkeypatch.setattr(driver.Deadline, "wants_stop", lambda _: next(rounds) > 3)
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
    assert {"train", "collect", "evaluate", "checkpoint"} <= set(shares)
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.05)
    assert len(entry["methods"]["fedavg"]["accuracy of each seed"]) == 2
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["digits.json"]


def test_one_run_alone_is_timed_and_not_played_again(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.toml").write_text(SMALL)
    monkeypatch.setattr(driver, "LIST", tmp_path / "list.toml")
    given = [
        "experiments.py",
        "digits, small",
        "--runs",
        str(tmp_path / "runs"),
        "--results",
        str(tmp_path / "results"),
    ]
    played: list[int] = []
    monkeypatch.setattr(driver.Deadline, "record", lambda _, record: played.append(record["round"]))
    monkeypatch.setattr(sys, "argv", [*given, "--alone", "scaffold"])
    driver.main()
    found = json.loads((tmp_path / "results" / "digits.json").read_text())
    assert list(found) == ["digits, small, scaffold alone"]
    assert list(found["digits, small, scaffold alone"]["methods"]) == ["scaffold"]
    assert played == [0, 1, 2, 3]
    monkeypatch.setattr(sys, "argv", given)
    driver.main()
    assert len(played) == 4 * 4, "four runs, of which one was there already"
    monkeypatch.setattr(sys, "argv", [*given, "--alone", "fedavg"])
    driver.main()
    found = json.loads((tmp_path / "results" / "digits.json").read_text())
    assert list(found["digits, small, fedavg alone"]["methods"]) == ["fedavg"], "and not what else is in the folder"
    assert len(found["digits, small, fedavg alone"]["methods"]["fedavg"]["accuracy of each seed"]) == 1
    monkeypatch.setattr(sys, "argv", [*given, "--alone", "fedprox"])
    driver.main()
    assert "it runs fedavg, scaffold, not 'fedprox'." in capsys.readouterr().out
