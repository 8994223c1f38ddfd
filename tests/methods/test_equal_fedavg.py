"""Tests of the settings in which methods equal FedAvg or each other.

All methods of one seed see the same clients and batches, so most of them agree with FedAvg to the last bit where they
should agree at all. A method that has no such setting is listed with the reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom import ClientTask, ClientUpdate
from fedloom.config import make_config
from fedloom.core.layout import model_digest
from fedloom.methods import methods
from fedloom.methods.clusamp import clusamp_sampling_distributions
from fedloom.methods.registry import BUILT_IN
from fedloom.runs.build import BuiltRun, build_run
from fedloom.runs.resolve import UserObjects, resolve_run
from fedloom.testing.fixtures import (
    SETTINGS,
    SmallFederatedDataset,
    batch_norm_network,
    build_small_run,
    simple_network,
)
from tests.support.task_rounds import in_round

UNIFORM = {"weighting": "uniform"}
EVERYONE = 8


@dataclass(frozen=True)
class Equal:
    """A method, its options, and the settings of the run in which it must be FedAvg."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    fedavg: Mapping[str, Any] = field(default_factory=dict)
    """Options of FedAvg: the papers of some methods weight all clients alike."""
    bits: bool = True
    """Equal bit for bit, or to rounding."""
    networks: tuple[Callable[[], nn.Module], ...] = (simple_network, batch_norm_network)
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Of clients that have fewer samples than usual."""

    def __str__(self) -> str:
        return f"{self.method}-{'-'.join(f'{key}={value}' for key, value in self.options.items())}"


TABLE = [
    Equal("fedprox", {"mu": 0.0}),
    Equal("fedprox", {"mu": 3.0}, {"steps": 1}),  # the first step is not pulled
    Equal("fedsam", {"rho": 0.0}),
    Equal("fedasam", {"rho": 0.0}),
    Equal("fedasam-swa", {"rho": 0.0, "start": 1.0}),
    Equal("fedmix", {"lam": 0.0}),
    Equal("fedmix", {"lam": 0.3}, {"rounds": 1}),  # no means are known yet
    Equal("naivemix", {"lam": 0.0}),
    Equal("moon", {"mu": 0.0}),
    # Where a client has no past its two contrasts cancel: their gradient is exactly zero.
    Equal("moon", {"mu": 5.0}, {"rounds": 1}),
    Equal("fedmut", {"alpha": 0.0}, fedavg=UNIFORM),
    Equal("fedmut", {"alpha": 4.0}, {"rounds": 1}, fedavg=UNIFORM),  # the model has not moved yet
    Equal("feddf", {"steps": 0}),
    Equal("fedbe", {"epochs": 0}),
    Equal("fedlaw", {"epochs": 0}),
    Equal("fedgen", {"alpha": 0.0, "beta": 0.0}),
    Equal("fedgen", {"alpha": 10.0, "beta": 10.0}, {"rounds": 1}),  # nothing has been generated yet
    Equal("fedcluster", {"clusters": 1}),
    Equal("fedavgm", {"momentum": 0.0}),
    Equal("fedavgm", {"momentum": 0.9}, {"rounds": 1}, bits=False),  # there is no momentum yet
    # Where tau is large the step is m / tau, or m / 2 tau if v stays tau squared.
    Equal("fedadam", {"beta1": 0.0, "beta2": 0.0, "tau": 1e6, "server_lr": 1e6}, bits=False),
    Equal("fedadagrad", {"tau": 1e4, "server_lr": 2e4}, bits=False),
    Equal("fedyogi", {"beta1": 0.0, "tau": 1e4, "server_lr": 2e4}, bits=False),
    Equal("fednova", {}, {"steps": 3}, bits=False),
    Equal("fednova", {}, {"steps": 3, "nesterov": True}, bits=False),
    Equal("fednova", {}, {"clients_per_round": 1}, bits=False),
    Equal("scaffold", {"option": "II"}, {"rounds": 1, "momentum": 0.0, "weight_decay": 0.0}, fedavg=UNIFORM),
    Equal("scaffold", {"option": "I"}, {"rounds": 1, "momentum": 0.0, "weight_decay": 0.0}, fedavg=UNIFORM),
    Equal("fedexp", {"average": False}, {"clients_per_round": 1}),  # one client: the step is 1
    Equal("fedexp", {"average": False, "epsilon": 1e300}),
    Equal("fedbn", networks=(simple_network,)),
    Equal("swa", {"snapshots": 1}),
    Equal("swad", {"checks": 10**9, "optimum_patience": 10**9, "validation": 0.0}),
    Equal("soups", {"models": 1}),
    Equal("soups", {"models": 1, "selection": "greedy"}),
    Equal("diwa", {"models": 1, "keep": "last"}),
    # Models that have hardly moved are in order: nothing changes places.
    Equal("fedma", {}, {"lr": 1e-3, "momentum": 0.0}),
    Equal("gamf", {}, {"lr": 1e-3, "momentum": 0.0}),
    # Clients of one size, as many as are drawn: each has a distribution of its own. They come in another order.
    Equal("clusamp", {}, {"clients_per_round": EVERYONE}, UNIFORM, bits=False, sizes=dict.fromkeys(range(EVERYONE), 4)),
    Equal("indep", {}, {"clients_per_round": 1}),
    Equal("fedcross", {}, {"clients_per_round": 1}),
    Equal("fedmr", {}, {"clients_per_round": 1}),
    Equal("fedmr", {"first_stage": 9}, fedavg=UNIFORM),
    Equal("fedcda", {"K": 1, "warmup": 0}, {"clients_per_round": EVERYONE}, fedavg=UNIFORM, bits=False),
    Equal("fedcda", {"warmup": 9}),
    Equal("dynafed", {"refine_epochs": 0}),
    Equal("lss", dict(methods()["lss"].neutral or {})),
]
WITHOUT = {
    "fedavg": "it is FedAvg",
    "centralized": "it trains one model; with one client it is FedAvg (test_brackets.py)",
    "local": "it has no global model; with one client its row is FedAvg's (test_brackets.py)",
    "abavg": "its weights are accuracies; equal ones are the uniform mean (test_abavg.py)",
    "feddyn": "alpha is above 0; its clients begin as FedProx's (below), and its mean then runs ahead (test_feddyn.py)",
    "fedfomo": "every client has a model of its own, and nothing makes it one",
    "fedrep": "heads stay with the clients and are trained apart from the body",
    "fedbabu": "the head is never trained",
    "fedma-layers": "matched layers rest while the others train",
}
"""Methods that are FedAvg in no setting, and why."""


def rows_of(
    method: str, options: Mapping[str, Any], network: Callable[[], nn.Module], sizes: Mapping[int, int], **given: Any
) -> tuple[list[Tensor], int]:
    """The deployed model after each round, and how many of its numbers are floats."""
    federation = SmallFederatedDataset(sizes=sizes)
    settings = {**SETTINGS, "rounds": 3, "momentum": 0.9, "weight_decay": 0.01, **given}
    values = {**settings, "method": method, "options": {method: dict(options)}, "clients": len(federation)}
    config = make_config({**values, "data": "small", "partition": "own", "model": "small"})
    with build_run(resolve_run(config, UserObjects(federation, network))).engine_closed() as experiment:
        rows = []
        for round in range(config.rounds):
            experiment.rounds.run_round(round)
            rows.append(experiment.rounds.global_model().clone())
        return rows, experiment.layout.floats


@pytest.mark.parametrize(
    ("row", "network"),
    [(row, network) for row in TABLE for network in row.networks],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_it_is_fedavg(row: Equal, network: Callable[[], nn.Module]) -> None:
    ours, floats = rows_of(row.method, row.options, network, row.sizes, **row.settings)
    theirs, _ = rows_of("fedavg", row.fedavg, network, row.sizes, **row.settings)
    assert model_digest(theirs[0]) != model_digest(theirs[-1]) or len(theirs) == 1, "FedAvg itself stands still"
    for mine, other in zip(ours, theirs, strict=True):
        if row.bits:
            assert model_digest(mine) == model_digest(other)
        else:
            torch.testing.assert_close(mine[:floats], other[:floats], rtol=1e-5, atol=1e-6)
            assert torch.equal(mine[floats:], other[floats:])


@pytest.mark.parametrize("name", sorted({row.method for row in TABLE} - {"fedma", "gamf"}))
def test_and_with_its_own_options_it_is_not(name: str) -> None:
    """Or the table would prove nothing. That FedMA and GAMF move what is not in order is in test_matching.py."""
    options = {
        "feddf": {"steps": 20},
        "fedasam-swa": {"start": 0.0, "cycle": 1},
        "dynafed": {"L": 2, "s": 1, "inner_steps": 2, "iterations": 3, "images_per_class": 1},
        "fedcda": {"warmup": 1},
        "fedbe": {"epochs": 1, "lr": 0.1},
        "swa": {"start": 0.0},
        "fedexp": {"epsilon": 0.0},
    }.get(name, {})
    ours, _ = rows_of(name, options, batch_norm_network, {}, rounds=4)
    theirs, _ = rows_of("fedavg", {}, batch_norm_network, {}, rounds=4)
    assert model_digest(ours[-1]) != model_digest(theirs[-1])


def test_every_method_is_in_the_table_or_has_a_reason_not_to_be() -> None:
    there = {row.method for row in TABLE}
    assert there | set(WITHOUT) == set(BUILT_IN)
    assert there & set(WITHOUT) == set()
    declared = {name for name, method in methods().items() if method.neutral is not None and name in BUILT_IN}
    assert declared <= there


# What else the methods have to do with each other


def answers(experiment: BuiltRun, clients: list[int]) -> list[Tensor]:
    """What these clients make of the first model."""
    jobs = list(experiment.rounds.parts.server.dispatch(0, clients))
    found = []
    for update in experiment.engine.train(in_round(0, jobs)):
        assert isinstance(update, ClientUpdate), update
        found.append(update.row.clone())
    return found


@pytest.mark.parametrize("alpha", [0.01, 1.0])
def test_feddyns_clients_begin_as_fedproxs(alpha: float) -> None:
    found = []
    for method, options in (("feddyn", {"alpha": alpha}), ("fedprox", {"mu": alpha}), ("fedavg", {})):
        with build_small_run(method, {method: options}, epochs=2).engine_closed() as experiment:
            found.append(answers(experiment, [1, 4, 6]))
    for dyn, prox, plain in zip(*found, strict=True):
        torch.testing.assert_close(dyn, prox, rtol=1e-6, atol=1e-7)
        assert not torch.equal(prox, plain)


@pytest.mark.parametrize(("updates", "step"), [("equal", 1.0), ("orthogonal", 4.0)])
def test_fedexps_step_is_one_or_half_the_clients(updates: str, step: float) -> None:
    options = {"fedexp": {"epsilon": 0.0, "weighting": "uniform", "average": False}}
    with build_small_run("fedexp", options, clients_per_round=8).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        before, rows = server.global_model().clone(), []
        for client in range(8):
            row = before.clone()
            row[0 if updates == "equal" else client] += 2.0
            rows.append(ClientUpdate(ClientTask(client, before), row, num_examples=10, loss=1.0, steps=1))
        server.aggregate(0, iter(rows))
        assert server.diagnostics()["eta_g"] == pytest.approx(step, rel=1e-5)
        moved = 2.0 if updates == "equal" else step * 2.0 / 8
        assert float(server.global_model()[0] - before[0]) == pytest.approx(moved, rel=1e-4)


def test_clusamps_rows_and_columns_sum_up() -> None:
    draw = np.random.default_rng(0)
    for m in range(1, 9):
        n = draw.integers(0, 30, 12)
        apart = draw.random((12, 12))
        r = clusamp_sampling_distributions(n, m, apart + apart.T - np.diag(2 * apart.diagonal()))
        assert r.shape == (m, 12)
        assert (r.sum(1) == n.sum()).all()
        assert (r.sum(0) == m * n).all()
        assert (r >= 0).all()


@pytest.mark.parametrize(
    ("method", "away"),
    [("fedbn", {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"})]
    + [(method, {"3.weight", "3.bias"}) for method in ("fedrep", "fedbabu")],
)
def test_what_moves_on_the_server_and_what_stays(method: str, away: set[str]) -> None:
    quick = {"fedrep": {"fedrep": {"head_epochs": 1}}}.get(method, {})
    with build_small_run(method, quick, weight_decay=0.1, momentum=0.9).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        before = experiment.layout.state_dict(server.global_model())
        for round in range(3):
            experiment.rounds.run_round(round)
        after = experiment.layout.state_dict(server.global_model())
        assert {name for name in before if torch.equal(before[name], after[name])} == away
        if method == "fedbabu":  # and so in the model that is deployed
            deployed = experiment.layout.state_dict(experiment.rounds.global_model())
            assert all(torch.equal(deployed[name], before[name]) for name in away)


@pytest.mark.parametrize("method", ["fedma", "gamf"])
def test_a_permuted_network_is_put_back(method: str) -> None:
    """More kinds of networks: test_matching.py."""
    with build_small_run(method, {}).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        row = server.global_model().clone()
        orders = server._symmetries.random(torch.Generator().manual_seed(1))
        copy = server._symmetries.permuted(row, orders)
        assert not torch.equal(copy, row)
        updates = [ClientUpdate(ClientTask(k, row), each, n, 1.0, 1) for k, each, n in ((0, copy, 5), (1, row, 9))]
        server.aggregate(0, iter(updates))
        assert torch.equal(server.global_model(), row)
