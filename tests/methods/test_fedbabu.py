"""Tests of FedBABU: the head is fixed, and clients fine-tune for evaluation."""

from typing import Any

import pytest
import torch

from fedloom.core.layout import model_digest
from fedloom.core.tasks import ClientTask, TaskMemory
from fedloom.testing.fixtures import build_small_run, small_run


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1, "clip": 1.0, "nesterov": True},
        {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
        {"failure_rate": 0.4},
        {"steps": 3},
    ],
)
def test_the_head_is_its_start_to_the_bit(settings: dict[str, Any]) -> None:
    with build_small_run("fedbabu", {}, **settings).engine_closed() as experiment:
        head = experiment.rounds.parts.client.head(experiment.layout)
        start = experiment.rounds.context.initial.clone()
        for number in range(4):
            experiment.rounds.run_round(number)
        end = experiment.rounds.global_model()
        assert model_digest(end[head]) == model_digest(start[head])
        body = slice(0, head.start)
        assert not torch.equal(end[body], start[body])


def test_the_head_does_not_travel() -> None:
    (ours,), (fedavg,) = (small_run(name, {}, rounds=1).records for name in ("fedbabu", "fedavg"))
    for key in ("bytes_down", "bytes_up"):
        assert fedavg[key] - ours[key] == 4 * 4 * (16 * 10 + 10)


def test_bodies_are_averaged_uniformly() -> None:
    uniform = small_run("fedbabu", {}).digest
    assert uniform == small_run("fedbabu", {"fedavg": {"weighting": "uniform"}}).digest
    assert uniform != small_run("fedbabu", {"fedavg": {"weighting": "samples"}}).digest


def personal(**options: Any) -> tuple[list[float], str]:
    run = small_run("fedbabu", {"fedbabu": options}, clients_per_round=8)
    return [record["personal_accuracy_mean"] for record in run.records], run.digest


def test_fine_tuning_is_for_scoring_and_helps() -> None:
    as_it_is, before = personal(finetune_epochs=0)
    tuned = {part: personal(finetune=part) for part in ("all", "head", "body")}
    assert {digest for _, digest in tuned.values()} == {before}, "it never reaches the model"
    assert tuned["all"][0][-1] > as_it_is[-1] + 0.05
    assert len({tuple(curve) for curve, _ in tuned.values()}) == 3


@pytest.mark.parametrize("part", ["head", "body", "all"])
def test_only_the_named_part_is_fine_tuned(part: str) -> None:
    with build_small_run("fedbabu", {"fedbabu": {"finetune": part}}).engine_closed() as experiment:
        bench, row = experiment.engine._trainer, experiment.layout.empty()
        local, start = experiment.rounds.parts.client, experiment.rounds.global_model()
        home = experiment.engine.client_states.copy_for(2, torch.device("cpu"))
        samples = experiment.data.federated_data.client_samples(2)
        bench.start_task(ClientTask(2, start, round=0), TaskMemory(row, home), samples)
        for piece in local.personalize(bench):
            assert (piece.epochs, piece.steps) == (5, None)
            bench.run_steps(piece)
        head = local.head(experiment.layout)
        assert torch.equal(row[head], start[head]) == (part == "body")
        rest = torch.ones(len(row), dtype=torch.bool)
        rest[head] = False
        assert torch.equal(row[rest], start[rest]) == (part == "head"), "batch norm's statistics too"
