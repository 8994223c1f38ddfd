"""FedAvgM, FedAdagrad, FedAdam and FedYogi: first steps worked out by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods import methods
from fedloom.testing.fixtures import build_small_run, small_run

HALF = {"beta1": 0.5}
STEPS: list[tuple[str, Mapping[str, Any], list[float], list[float]]] = [
    # method, options, Delta in each round, and how far the model moves in each round
    ("fedavgm", {"momentum": 0.5}, [0.4, 0.4, 0.0], [0.4, 0.6, 0.3]),
    ("fedavgm", {"momentum": 0.5, "server_lr": 0.5}, [0.4, 0.4, 0.0], [0.2, 0.3, 0.15]),
    ("fedavgm", {"momentum": 0.0, "server_lr": 0.5}, [0.4, 0.2], [0.2, 0.1]),
    # v = 0.09 + 0.16 = 0.25, m = 0.2: 0.8 x 0.2 / (0.5 + 0.3); then m = 0.1 and v stays
    ("fedadagrad", {**HALF, "tau": 0.3, "server_lr": 0.8}, [0.4, 0.0], [0.2, 0.1]),
    # without a first moment m is Delta itself
    ("fedadagrad", {"tau": 0.3, "server_lr": 0.8}, [0.4, 0.0], [0.4, 0.0]),
    # v = 0.01 / 2 + 0.49 / 2 = 0.25, m = 0.35: 0.6 x 0.35 / (0.5 + 0.1); then m = 0.175, v = 0.125
    ("fedadam", {**HALF, "beta2": 0.5, "tau": 0.1, "server_lr": 0.6}, [0.7, 0.0], [0.35, 0.105 / (0.125**0.5 + 0.1)]),
    # v = 0.04 + 0.09 / 4 = 0.0625, m = 0.15: 0.3 x 0.15 / (0.25 + 0.2); then Delta^2 is below v, so v = 0.0625 - 0.0025
    ("fedyogi", {**HALF, "beta2": 0.75, "tau": 0.2, "server_lr": 0.3}, [0.3, 0.1], [0.1, 0.0375 / (0.06**0.5 + 0.2)]),
]


def moves(method: str, options: Mapping[str, Any], deltas: Sequence[float]) -> list[float]:
    """How far a model's first weight moves in each round in which the mean of two clients moves it by a Delta."""
    with build_small_run(method, {method: dict(options)}).engine_closed() as built_run:
        server, found = built_run.rounds.parts.server, []
        with torch.no_grad():
            built_run.rounds.parts.server.bank.rows[0, 0] = 0.0  # so that float32 rounds little
        for round, delta in enumerate(deltas):
            sent, updates = server.global_model().clone(), []
            for client_id, share in enumerate((0.5, 1.5)):
                row = sent.clone()
                row[0] += share * delta
                updates.append(ClientUpdate(ClientTask(client_id, sent), row, num_examples=4, loss=1.0, steps=2))
            server.aggregate(round, iter(updates))
            found.append(float(server.global_model()[0] - sent[0]))
            assert torch.equal(server.global_model()[1:], sent[1:]), "a weight without an update moved"
        return found


@pytest.mark.parametrize(("method", "options", "deltas", "expected"), STEPS)
def test_the_first_steps(method: str, options: Mapping[str, Any], deltas: list[float], expected: list[float]) -> None:
    assert moves(method, options, deltas) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
def test_clients_count_as_in_fedavg(name: str) -> None:
    uniform = small_run(name, {name: {"weighting": "uniform"}}).digest
    assert uniform != small_run(name, {}).digest


def test_yogi_remembers_large_steps_longer_than_adam() -> None:
    """After a large step, a small one moves the model less if v is still large."""
    options = {"beta1": 0.0, "beta2": 0.5}
    adam, yogi = (moves(name, options, [1.0, 0.01, 0.01, 0.01])[-1] for name in ("fedadam", "fedyogi"))
    assert 0 < yogi < adam


def test_the_server_learning_rate_of_fedavgm_is_fedavgs() -> None:
    options = {"server_lr": 0.7, "weighting": "uniform"}
    neutral = methods()["fedavgm"].neutral or {}
    momentum = small_run("fedavgm", {"fedavgm": {**options, **neutral}}).digest
    assert momentum == small_run("fedavg", {"fedavg": options}).digest
