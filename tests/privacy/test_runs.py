"""Tests of private runs: model, epsilon in records, resume, rejections, output."""

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

import fedloom
from fedloom.cli.options import PANELS
from fedloom.config import Config
from fedloom.errors import InputError, RunStopped
from fedloom.privacy import PrivacyAccountant, PrivacyMechanism
from fedloom.privacy.mechanism import _default_delta
from fedloom.runs.callback import Callback
from fedloom.runs.checkpoints import Checkpoints
from fedloom.testing.fixtures import (
    SmallFederatedDataset,
    batch_norm_network,
    build_small_run,
    simple_network,
    small_run,
)
from fedloom.utils.storage import read_safetensors
from tests.support.task_rounds import in_round

PRIVATE: dict[str, Any] = {"clip_update": 0.5, "noise": 0.8}
CHOICES = {
    name: get_args(kind)
    for name in PANELS["Privacy"]
    if get_origin(kind := Config.model_fields[name].annotation) is Literal
}
PRIVATE_CHOICES = [dict(zip(CHOICES, values, strict=True)) for values in product(*CHOICES.values())]
"""Every combination of the options that take one of several words."""
FEW = (
    "--clients",
    12,
    "--clients-per-round",
    4,
    "--rounds",
    4,
    "--epochs",
    1,
    "--model",
    "logreg",
    "--engine",
    "sequential",
)


def models(folder: Path) -> dict[str, torch.Tensor]:
    return read_safetensors(folder / "model.safetensors")


# The model


def test_with_a_clip_that_nothing_reaches_it_is_fedavg_with_uniform_weights(tmp_path: Path) -> None:
    """To rounding: the private mean is taken in float64 and rounded once."""
    rows = {}
    for name, settings in {
        "plain": {"options": {"fedavg": {"weighting": "uniform"}}},
        "clipped": {"clip_update": 1e6},
    }.items():
        run = fedloom.run(
            "fedavg", SmallFederatedDataset(), simple_network, out=tmp_path / name, report=False, rounds=4,
            clients_per_round=4,
            engine="sequential", **settings,
        )  # fmt: skip
        rows[name] = models(run.path)
        assert [record["clients"] for record in run.history[1:]] == [4] * 4
    assert all(torch.allclose(rows["plain"][key], rows["clipped"][key], rtol=1e-4, atol=1e-6) for key in rows["plain"])


def test_one_round_is_the_mean_worked_out_by_hand() -> None:
    """The engine's own answers, clipped and averaged in the plainest way, are what the server has afterwards."""
    with build_small_run("fedavg", {}, model=simple_network, clip_update=0.05).engine_closed() as experiment:
        rounds = experiment.rounds
        server, w = rounds.parts.server, rounds.context.initial.double()
        total = torch.zeros_like(w)
        for update in rounds.engine.train(in_round(0, list(server.dispatch(0, server.sample_clients(0))))):
            way = update.row.double() - w
            total += way * min(1.0, 0.05 / float(way.norm()))
        rounds.run_round(0)
        assert torch.equal(server.global_model(), (w + total / 4).float())


def test_clients_that_do_not_answer_make_the_step_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    for lost in (set[int](), {0, 1, 2, 3, 4, 5}):
        with build_small_run(
            "fedavg", {}, model=simple_network, clip_update=0.01, clients_per_round=8, rounds=1
        ).engine_closed() as experiment:
            rounds, gone = experiment.rounds, lost
            monkeypatch.setattr(rounds, "_simulates_failure", lambda round, job, gone=gone: job.client_id in gone)
            rounds.run_round(0)
            steps.append(float((rounds.parts.server.global_model() - rounds.context.initial).norm()))
    assert steps[1] <= 2 * 0.01 / 8 + 1e-6  # two answers of eight, divided by eight
    assert steps[1] < 0.5 * steps[0]


def test_engines_and_workers_give_the_same_bits() -> None:
    settings = {**PRIVATE, "model": simple_network}
    plain = small_run("fedavg", {}, **settings).digest
    for workers in (1, 3):
        assert small_run("fedavg", {}, engine="multiprocess", workers=workers, **settings).digest == plain
    assert small_run("fedavg", {}, **settings, seed=1).digest != plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_draws_the_same_noise_as_a_cpu() -> None:
    rows = []
    for given in ({"device": "cpu"}, {"device": "cuda", "engine": "sequential"}, {"device": "cuda", "engine": "cuda"}):
        settings = {**PRIVATE, **given, "precision": "fp32", "model": simple_network}
        with build_small_run("fedavg", {}, **settings).engine_closed() as experiment:
            experiment.rounds.run_round(0)
            rows.append(experiment.rounds.parts.server.global_model().cpu())
    for row in rows[1:]:
        torch.testing.assert_close(row, rows[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("choices", PRIVATE_CHOICES, ids=str)
def test_the_noise_of_a_round_does_not_tell_how_many_took_part(
    choices: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With clients that change nothing, the noise alone is left. This holds for every choice that a user has."""
    drawn = {}
    for taking_part in (0, 1, 2, 8):
        monkeypatch.setattr(
            PrivacyMechanism, "sample_clients", lambda self, round, count=taking_part: list(range(count))
        )
        settings = {**PRIVATE, **choices, "clients_per_round": 2, "clients": 8, "lr": 1e-30}
        with build_small_run("fedavg", {}, model=simple_network, **settings).engine_closed() as experiment:
            assert experiment.rounds.run_round(0)["clients"] == taking_part
            drawn[taking_part] = experiment.rounds.parts.server.global_model() - experiment.rounds.context.initial
    for taking_part, noise in drawn.items():
        assert float(noise.std()) == pytest.approx(0.8 * 0.5 / 2, rel=0.15), taking_part  # of 1210 numbers
        if choices["noise_source"] == "seed":
            assert torch.equal(noise, drawn[0]), taking_part


def test_a_round_that_nobody_takes_part_in_is_as_noisy_as_any() -> None:
    with build_small_run(
        "fedavg", {}, model=simple_network, **PRIVATE, clients_per_round=1, rounds=40
    ).engine_closed() as experiment:
        rounds = experiment.rounds
        assert rounds.privacy is not None
        empty = next(round for round in range(40) if not rounds.privacy.sample_clients(round))
        before = rounds.parts.server.global_model().clone()
        record = rounds.run_round(empty)
        assert record["clients"] == 0
        assert "note" not in record  # it would say that the model was kept
        assert float((rounds.parts.server.global_model() - before).std()) == pytest.approx(0.8 * 0.5, rel=0.1)


@pytest.mark.parametrize(
    "method", ["fedprox", "feddyn", "moon", "fedsam", "fedasam-swa", "swa", "soups", "lss", "dynafed+fedprox"]
)
def test_methods_that_need_a_mean_alone_run(method: str) -> None:
    finished = small_run(method, {}, model=simple_network, **PRIVATE, failure_rate=0.3)
    assert [record["epsilon"] for record in finished.records] == sorted(
        record["epsilon"] for record in finished.records
    )
    assert (
        small_run(method, {}, model=simple_network, **PRIVATE, failure_rate=0.3, engine="multiprocess").digest
        == finished.digest
    )


def test_an_update_that_is_not_finite_does_not_reach_the_mean() -> None:
    finished = small_run(
        "fedavg",
        {},
        federated_data=SmallFederatedDataset(poisoned=3),
        model=simple_network,
        clients_per_round=8,
        **PRIVATE,
    )
    assert all("rejected" in record["failed_clients"]["3"] for record in finished.records)


# The account


def test_every_record_tells_what_is_spent_so_far(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", clients=12, clients_per_round=3, rounds=5, out=tmp_path / "run", delta=1e-3, **PRIVATE)
    account = PrivacyAccountant(0.8, 3 / 12, 1e-3)
    assert [record["epsilon"] for record in run.history] == [account.epsilon(rounds) for rounds in range(6)]
    assert {record["delta"] for record in run.history} == {1e-3}
    assert run.summary["epsilon"] == account.epsilon(5)
    page = (run.path / "report.html").read_text()
    assert f"ε {account.epsilon(5):.2f}, δ 0.001" in page
    assert "privacy spent, epsilon" in page  # the curve


def test_without_noise_nothing_is_guaranteed_and_the_records_say_so(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", clients=12, rounds=2, out=tmp_path / "run", clip_update=1.0)
    assert [record["epsilon"] for record in run.history] == [0.0, None, None]
    assert run.summary["delta"] == _default_delta(12)
    assert re.search(r"<td[^>]*privacy spent[^>]*>none</td>", (run.path / "report.html").read_text())


def test_runs_that_are_not_private_say_nothing_of_it(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", clients=12, rounds=1, out=tmp_path / "run")
    assert not {"epsilon", "delta"} & {*run.summary, *run.history[-1]}
    assert "privacy" not in (run.path / "report.html").read_text().split("<script", 1)[0].split("Settings", 1)[0]


class StopAfter(Callback):
    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def on_round_end(self, record: Any) -> None:
        self.left -= record["round"] > 0

    def should_stop(self) -> bool:
        return self.left <= 0


def test_a_resumed_run_has_the_same_bits_and_the_same_account(tmp_path: Path) -> None:
    settings = {"rounds": 5, "clients_per_round": 3, "clients": 12, "report": False, **PRIVATE}
    whole = fedloom.run("fedavg", out=tmp_path / "whole", **settings)
    with pytest.raises(RunStopped):
        fedloom.run("fedavg", out=tmp_path / "run", callbacks=[StopAfter(2)], **settings)
    resumed = fedloom.resume(tmp_path / "run", report=False)
    assert resumed.digest == whole.digest
    assert [(r["round"], r["epsilon"]) for r in resumed.history] == [(r["round"], r["epsilon"]) for r in whole.history]
    assert fedloom.verify(tmp_path / "run") == (whole.digest, whole.digest)


def test_a_run_ends_before_it_spends_too_much(tmp_path: Path) -> None:
    settings = {"clients_per_round": 3, "clients": 12, "report": False, **PRIVATE}
    account = PrivacyAccountant(0.8, 3 / 12, _default_delta(12))
    most = (account.epsilon(3) + account.epsilon(4)) / 2
    run = fedloom.run("fedavg", out=tmp_path / "run", rounds=30, max_epsilon=most, **settings)
    assert [record["round"] for record in run.history] == [0, 1, 2, 3]
    assert run.summary["epsilon"] == account.epsilon(3) <= most
    assert run.config.rounds == 30
    assert run.digest == fedloom.run("fedavg", out=tmp_path / "three", rounds=3, **settings).digest
    with pytest.raises(RunStopped):
        fedloom.run("fedavg", out=tmp_path / "cut", rounds=30, max_epsilon=most, callbacks=[StopAfter(2)], **settings)
    assert fedloom.resume(tmp_path / "cut", report=False).digest == run.digest


# Draws of the system


def test_noise_of_the_system_differs_from_run_to_run_and_cannot_be_verified(tmp_path: Path) -> None:
    settings = {**PRIVATE, "noise_source": "system", "clients": 12, "rounds": 3, "report": False}
    runs = [fedloom.run("fedavg", out=tmp_path / name, **settings) for name in ("a", "b")]
    assert runs[0].digest != runs[1].digest
    assert runs[0].summary["epsilon"] == runs[1].summary["epsilon"]
    with pytest.raises(InputError, match="cannot be verified: its noise came from the operating system"):
        fedloom.verify(runs[0].path)


def test_what_cannot_be_drawn_again_is_saved_in_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = Checkpoints.save

    def noted(self: Checkpoints, round: int, *rest: Any, background_device: object) -> None:
        assert background_device is None, "it is on the disk before the next round is played"
        saved.append(round)
        save(self, round, *rest)

    monkeypatch.setattr(Checkpoints, "save", noted)
    monkeypatch.setattr("fedloom.runs.loop._beside", lambda _: torch.device("cpu"))  # as on a GPU
    settings = {**PRIVATE, "clients": 12, "rounds": 3, "report": False}
    fedloom.run("fedavg", out=tmp_path / "seed", **settings)
    assert saved == [3]
    fedloom.run("fedavg", out=tmp_path / "system", noise_source="system", **settings)
    assert saved == [3, 1, 2, 3]


def test_a_damaged_checkpoint_is_not_gone_behind_where_rounds_would_be_revealed_twice(tmp_path: Path) -> None:
    settings = {**PRIVATE, "noise_source": "system", "clients": 12, "rounds": 5, "report": False}
    with pytest.raises(RunStopped):
        fedloom.run("fedavg", out=tmp_path / "run", callbacks=[StopAfter(3)], **settings)
    newest = sorted((tmp_path / "run" / "checkpoints").glob("round-*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match="would reveal more than epsilon accounts for"):
        fedloom.resume(tmp_path / "run", report=False)


# The command


def test_the_command_tells_what_was_spent(command: Callable[..., Any], tmp_path: Path) -> None:
    done = command("run", "fedprox", *FEW, "--clip-update", 0.5, "--noise", 1.1, "--delta", 0.01, "--out", "a")
    spent = PrivacyAccountant(1.1, 4 / 12, 0.01).epsilon(4)
    assert done.code == 0
    line = (
        f"privacy   epsilon {spent:.2f} at delta 0.01, for one client more or less (simulated: the noise is the seed's)"
    )
    assert line in done.out.splitlines()
    assert re.search(rf"epsilon +{spent:.2f}", done.err)
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["epsilon"] == spent
    again = command(
        "run", "fedprox", *FEW, "--clip-update", 0.5, "--noise", 1.1, "--delta", 0.01, "--json", "--out", "b"
    )
    assert again.result["epsilon"] == spent
    assert command("verify", "a").code == 0
    for words in (("--noise", 1, "--noise-source", "system"), ("--noise", 0)):
        told = command("run", "fedavg", *FEW, "--clip-update", 0.5, *words)
        assert told.code == 0
        assert "simulated" not in told.out
    assert "privacy   none guaranteed: updates were clipped, but no noise was added" in told.out.splitlines()


def test_the_command_says_that_the_budget_ends_the_run(command: Callable[..., Any]) -> None:
    done = command("run", "fedavg", *FEW, "--clip-update", 0.5, "--noise", 1, "--max-epsilon", 0.69)
    assert done.code == 0
    assert "note: max_epsilon 0.69 is enough for 2 of 4 rounds." in done.err
    assert "after round 2 " in done.out
    refused = command("run", "fedavg", *FEW, "--clip-update", 0.5, "--noise", 0.5, "--max-epsilon", 0.1, "--out", "no")
    assert refused.code == 2
    assert refused.err.startswith("fedloom: max_epsilon is 0.1, but one round with noise 0.5 spends ")
    assert not Path("no").exists()


def test_a_comparison_tells_it_and_can_be_gone_on_with(command: Callable[..., Any]) -> None:
    words = (
        "compare",
        "fedavg",
        "fedprox",
        *FEW,
        "--clip-update",
        0.5,
        "--noise",
        1,
        "--max-epsilon",
        2.5,
        "--out",
        "c",
    )
    first = command(*words)
    assert first.code == 0
    assert "privacy spent" in first.out
    assert "ε" in first.out
    again = command(*words)
    assert (again.code, again.out) == (0, first.out)


def test_a_grid_leaves_out_what_cannot_be_private(command: Callable[..., Any]) -> None:
    done = command("compare", "--grid", "fedavg,fedcross x sgd,fedprox", *FEW, "--clip-update", 0.5, "--noise", 1)
    assert done.code == 0
    assert "left out: 'fedcross' cannot be run: fedcross cannot be run with clip_update" in done.out


BAD = [
    ("--clip-update 0", "clip_update must be greater than 0, not '0'"),
    ("--clip-update -1", "clip_update must be greater than 0"),
    ("--clip-update nan", "clip_update must be"),
    ("--clip-update inf", "clip_update must be"),
    ("--clip-update 1 --noise -0.1", "noise must be greater than or equal to 0"),
    ("--clip-update 1 --noise much", "noise must be a number, not 'much'"),
    ("--clip-update 1 --noise inf", "noise must be"),
    ("--noise 1", "noise is 1 times clip_update, but no clip_update is given."),
    ("--clip-update 1 --noise 1 --noise-by client", "No such option: --noise-by"),
    ("--clip-update 1 --noise 1 --noise-source dice", "noise_source must be 'seed' or 'system', not 'dice'"),
    ("--clip-update 1 --noise 1 --delta 0", "delta must be greater than 0"),
    ("--clip-update 1 --noise 1 --delta 1", "delta must be less than 1"),
    ("--clip-update 1 --noise 1 --max-epsilon 0", "max_epsilon must be greater than 0"),
    ("--clip-update 1 --delta 0.1", "delta needs noise, but no noise is given."),
    ("--max-epsilon 3", "max_epsilon needs noise, but no noise is given."),
    ("--noise-source system", "noise_source needs noise, but no noise is given."),
    (
        "--clip-update 1 --set fedavg.weighting=samples",
        "fedavg.weighting is 'samples', but with clip_update all clients",
    ),
]


@pytest.mark.parametrize(("words", "sentence"), BAD)
def test_bad_values_are_refused_in_one_sentence(command: Callable[..., Any], words: str, sentence: str) -> None:
    done = command("run", "fedavg", *words.split(), "--out", "no")
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert sentence in done.err
    assert not Path("no").exists()


def test_without_the_accountant_nothing_is_written(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    done = command("run", "fedavg", *FEW, "--clip-update", 1, "--noise", 1, "--out", "no")
    assert done.code == 2
    assert "pip install 'fedloom[privacy]'" in done.err
    assert not (tmp_path / "no").exists()


def test_the_weighting_that_a_private_run_has_is_noted_down(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", clients=12, rounds=1, out=tmp_path / "run", report=False, clip_update=1.0)
    assert run.config.options == {"fedavg": {"weighting": "uniform", "server_lr": 1.0}}


def test_a_network_with_statistics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"1\.running_mean is a statistic and not a weight"):
        fedloom.run("fedavg", SmallFederatedDataset(), batch_norm_network, out=tmp_path / "run", clip_update=1.0)
    assert not (tmp_path / "run").exists()
