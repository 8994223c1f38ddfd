"""FedNova: how an update is normalized, by hand and by the optimizer itself."""

from collections.abc import Sequence
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.config import TrainingConfig
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.errors import InputError
from fedloom.methods.fednova import fednova_gradient_weight
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run
from fedloom.training.optimizers import make_optimizer


def move(built_run: BuiltRun, changes: Sequence[float], samples: Sequence[int], steps: Sequence[int]) -> float:
    """How far the first weight moves in a round in which the clients change theirs so."""
    server = built_run.rounds.parts.server
    server.bank.rows[0, 0] = 0.0
    sent, updates = server.global_model().clone(), []
    for client_id, (change, n, tau) in enumerate(zip(changes, samples, steps, strict=True)):
        row = sent.clone()
        row[0] += change
        updates.append(ClientUpdate(ClientTask(client_id, sent), row, num_examples=n, loss=1.0, steps=tau))
    server.aggregate(0, iter(updates))
    return float(server.global_model()[0])


@pytest.mark.parametrize(
    ("training", "changes", "samples", "steps", "expected"),
    [
        # p = 1/4, 3/4 and tau = 2, 6, so tau_eff = 5 and the step is 5 (1/4 x 1/2); FedAvg's is 1/4
        ({}, [1.0, 0.0], [1, 3], [2, 6], 0.625),
        ({}, [0.0, 1.0], [1, 3], [2, 6], 0.625),
        # |a| = 1 + 1.5 and 1 + 1.5 + 1.75, so tau_eff = 3.375 and the step is 3.375 (1/2 x 5 / 2.5)
        ({"momentum": 0.5}, [5.0, 0.0], [4, 4], [2, 3], 3.375),
        # |a| = 2 + 2.5 / 2 and 3 + 4.25 / 2, so tau_eff = 4.1875
        ({"momentum": 0.5, "nesterov": True}, [6.5, 0.0], [4, 4], [2, 3], 4.1875),
        # equally many steps: FedAvg's mean
        ({"momentum": 0.9}, [1.0, 0.5], [1, 3], [7, 7], 0.625),
        # a client without a step returns what it got, and counts with its samples
        ({}, [0.0, 1.0], [1, 1], [0, 1], 0.5),
    ],
)
def test_the_step_by_hand(
    training: dict[str, Any], changes: list[float], samples: list[int], steps: list[int], expected: float
) -> None:
    with build_small_run("fednova", {}, **training).engine_closed() as built_run:
        for _ in range(2):  # nothing of a round is left in the next one
            assert move(built_run, changes, samples, steps) == pytest.approx(expected, rel=1e-5)


@given(st.integers(1, 60), st.floats(0, 0.99), st.booleans())
@settings(deadline=None, max_examples=40)
def test_the_weight_of_the_gradients_is_what_the_optimizer_gives_them(steps: int, rho: float, nesterov: bool) -> None:
    config = TrainingConfig(momentum=rho, nesterov=nesterov)
    optimizer, weight = make_optimizer(config), torch.zeros(1, dtype=torch.float64)
    for _ in range(steps):
        optimizer.step(weight, torch.ones(1, dtype=torch.float64), 1.0)
    assert fednova_gradient_weight(steps, config) == pytest.approx(-float(weight), rel=1e-9)


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_the_steps_are_those_that_clients_took(engine: str) -> None:
    data = SmallFederatedDataset(sizes={0: 3, 1: 7, 2: 12})
    given_settings = {"clients_per_round": 8, "batch_size": 4, "epochs": 3, "engine": engine, "workers": 2}
    with build_small_run("fednova", {}, federated_data=data, **given_settings).engine_closed() as built_run:
        record = built_run.rounds.run_round(0)
        sizes = [data.num_examples(client_id) for client_id in range(8)]
        assert len({ceil(n / 4) for n in sizes}) > 1
        expected = sum(n * 3 * ceil(n / 4) for n in sizes) / sum(sizes)
        assert record["diagnostics"]["server.tau_eff"] == pytest.approx(expected)


def test_adam_is_refused() -> None:
    with pytest.raises(InputError, match="fednova needs optimizer sgd, not adam"):
        build_small_run("fednova", {}, optimizer="adam")
