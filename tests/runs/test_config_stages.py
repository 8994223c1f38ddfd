"""What resolving a run, loading its data and building it add to its config."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.config import Config, make_config
from fedloom.errors import RunStopped
from fedloom.flower.app import make_app_run_config
from fedloom.flower.site.handlers import SiteHandler
from fedloom.runs import build
from fedloom.runs.build import build_run
from fedloom.runs.resolve import resolve_run
from tests.support.callbacks import Eye
from tests.support.fake_transport import flat

TINY: dict[str, Any] = {"engine": "sequential", "clients": 4, "clients_per_round": 2, "rounds": 1, "epochs": 1}
FEDAVG = {"fedavg": {"server_lr": 1.0, "weighting": "samples"}}
FEDPROX = {"fedprox": {"mu": 0.01}}
STAGES = ("resolved", "loaded", "built")

Stages = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    """The configs of all runs that are built, each with the name of its stage."""
    seen: Stages = []

    def watch(stage: str, owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("config", args[0] if args else None)
            config = given if isinstance(given, Config) else given.config  # type: ignore[union-attr]
            seen.append((stage, config.model_dump()))
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch("resolved", build, "load_run_data")
    watch("loaded", build.PrivacyMechanism, "of")
    watch("built", build, "RoundRunner")
    return seen


def changes(stages: Stages, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each stage has that `given` does not have, for all runs in a row."""
    before = make_config(given).model_dump()
    names = [name for name, _ in stages]
    assert names == [STAGES[i % 3] for i in range(len(names))], "every run goes through all stages"
    return [{key: value for key, value in config.items() if before[key] != value} for _, config in stages]


def test_a_run_states_its_options_first(stages: Stages, tmp_path: Path) -> None:
    given = {**TINY, "method": "fedprox"}
    fedloom.run(**given, out=tmp_path / "run", report=False)
    options = {"options": {**FEDAVG, **FEDPROX}}
    assert changes(stages, given) == [options] * 3


def test_resuming_and_verifying_a_run_change_nothing(stages: Stages, tmp_path: Path) -> None:
    with pytest.raises(RunStopped):
        fedloom.run("feddf", **{**TINY, "rounds": 2}, out=tmp_path / "run", callbacks=[Eye(stop_after=1)], report=False)
    whole = stages[-1][1]
    stages.clear()
    fedloom.resume(tmp_path / "run", report=False)
    fedloom.verify(tmp_path / "run")
    assert changes(stages, whole) == [{}] * 6


def test_server_data_and_the_hash_of_a_partition_are_added_before_data_are_loaded(
    stages: Stages, tmp_path: Path
) -> None:
    file = tmp_path / "parts.json"
    file.write_text(json.dumps([list(range(0, 60)), list(range(60, 100)), list(range(100, 150))]))
    given = {**TINY, "method": "feddf", "partition": f"file:{file}", "clients": None}
    build_run(resolve_run(make_config(given))).engine.close()
    pinned = {"partition_sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "server_data": "split:0.05"}
    for stage in changes(stages, given):
        stage.pop("options", None)
        assert stage == pinned
        pinned["clients"] = 3  # the data say how many


def test_all_runs_of_a_comparison_get_the_same_server_data(stages: Stages, tmp_path: Path) -> None:
    given = {**TINY, "options": {"feddf": {"steps": 1}}}
    fedloom.compare(["fedavg", "feddf"], seeds=2, **given, out=tmp_path / "compared", report=False)
    runs = changes(stages, TINY)
    assert runs == [run for run in runs[::3] for _ in STAGES]  # nothing is added later
    assert [(run.get("method", "fedavg"), run.get("seed", 0), run["server_data"]) for run in runs[::3]] == [
        (method, seed, "split:0.05") for method in ("fedavg", "feddf") for seed in (0, 1)
    ]
    assert [sorted(run["options"]) for run in runs[::3]] == [["fedavg"]] * 2 + [["fedavg", "feddf"]] * 2
    assert runs[-1]["options"]["feddf"]["steps"] == 1


def test_equal_weights_are_stated_for_a_private_mean(stages: Stages, tmp_path: Path) -> None:
    given = {**TINY, "clip_update": 1.0}
    fedloom.run(**given, out=tmp_path / "run", report=False)
    assert changes(stages, given) == [{"options": {"fedavg": {"weighting": "uniform", "server_lr": 1.0}}}] * 3


def test_a_site_trains_with_the_settings_that_it_received(tmp_path: Path) -> None:
    given = make_config({**TINY, "method": "feddf"})
    site = SiteHandler(flat(make_app_run_config(given, [])), {"client": 0}, tmp_path, tmp_path / "site")
    site.build()
    assert site.config == make_config({**given.model_dump(), "server_data": "split:0.05"})  # options as agreed to
