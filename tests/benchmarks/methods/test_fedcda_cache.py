"""The comparison of FedCDA's selections agrees with the run and with the models."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.runs.directory import RunDirectory
from fedloom.training.local_training import ClientStates

ROOT = Path(__file__).parents[3]


def look(*words: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", "fedcda-cache", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def play(out: Path, **settings: Any) -> fedloom.RunResult:
    few = {"data": "digits", "partition": "dirichlet:0.1", "model": "logreg", "clients": 5, "clients_per_round": 5}
    return fedloom.run(
        **{**few, "rounds": 6, "epochs": 1, "engine": "sequential", "out": out, "report": False, **settings}
    )


def test_choices_are_those_of_the_run_and_their_figures_follow_from_the_models(tmp_path: Path) -> None:
    options = {"fedcda": {"warmup": 3, "selection": "optimal", "L": 4.0}}
    run = play(tmp_path / "run", method="fedcda", options=options)
    assert look(run.path, "--out", tmp_path / "told.json").returncode == 0
    told = json.loads((tmp_path / "told.json").read_text())[f"{tmp_path.name}/run"]
    choices = told["choices"]

    # All clients take part in each round, so the run has chosen for all of them together.
    assert choices["chosen by the run"] == choices["least J"]
    assert choices["chosen by the run"]["accuracy"] == pytest.approx(run.last_accuracy, abs=1e-4)
    assert choices["newest"]["older models"] == choices["newest"]["distance of the mean from that of the newest"] == 0
    assert choices["oldest"]["older models"] == 1

    loaded = RunDirectory.open(run.path).checkpoints.load_latest(ClientStates({}, torch.float32))
    assert loaded is not None
    server = loaded[1]["parts"]["server"]
    rows = server["store"]["rows"]
    assert told["rounds"] == 6
    assert told["models of each"] == 3
    for name, place in (("newest", -1), ("oldest", 0)):
        models = [server["cache"][client][place] for client in range(5)]
        w = np.stack([rows[number].double().numpy() for number, _ in models])
        divergence = ((w - w.mean(0)) ** 2).sum(1).mean()
        assert choices[name]["half the divergence"] == pytest.approx(divergence / 2, abs=1e-4)
        assert choices[name]["mean loss"] == pytest.approx(np.mean([loss for _, loss in models]), abs=1e-4)


@pytest.mark.exhaustive
def test_a_run_of_another_method_is_refused(tmp_path: Path) -> None:
    run = play(tmp_path / "run", method="fedavg", rounds=1)
    for path in (run.path, tmp_path / "nothing"):
        refused = look(path, "--out", tmp_path / "told.json")
        assert refused.returncode == 2
        assert str(path) in refused.stderr
        assert "Traceback" not in refused.stderr
        assert not (tmp_path / "told.json").exists()


@pytest.mark.exhaustive
def test_models_without_losses_are_nothing_to_choose_from(tmp_path: Path) -> None:
    run = play(tmp_path / "run", method="fedcda", rounds=1, epochs=0)  # without training there are no losses
    refused = look(run.path)
    assert refused.returncode == 2
    assert "nothing to select" in refused.stderr
    assert "Traceback" not in refused.stderr
