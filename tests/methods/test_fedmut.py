"""Tests of FedMut: positions of the mutants, and equality with FedAvg."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core.layout import TensorKind
from fedloom.core.tasks import ClientUpdate
from fedloom.methods.fedmut import fedmut_coefficients
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run, small_run


@given(st.integers(1, 30), st.floats(0, 1), st.integers(0, 1000))
def test_coefficients_are_pairs_and_an_odd_one_is_zero(count: int, lean: float, seed: int) -> None:
    v = fedmut_coefficients(count, lean, np.random.default_rng(seed))
    pairs = count // 2
    assert sorted(v) == sorted([1.0] * pairs + [lean - 1.0] * pairs + [0.0] * (count % 2))
    if count % 2:
        assert v[-1] == 0


def mutants(experiment: BuiltRun, round: int) -> tuple[Tensor, Tensor, Tensor]:
    """The models sent in a round, the global model and its last change."""
    server = experiment.rounds.parts.server
    w, before = server.bank.rows
    rows = torch.stack([job.row for job in server.dispatch(round, server.sample_clients(round))])
    return rows, w.clone(), (w - before)


@pytest.mark.parametrize(("a0", "ahead"), [(0.0, 0.0), (0.3, 4.0 * 0.3 * 0.5 / 2)])
def test_their_mean_is_the_model_or_ahead_of_it(a0: float, ahead: float) -> None:
    """T_a is 2, so after one round half of a0 is left."""
    with build_small_run("fedmut", {"fedmut": {"a0": a0, "T_a": 2}}).engine_closed() as experiment:
        experiment.rounds.run_round(0)
        rows, w, delta = mutants(experiment, 1)
        trainable = experiment.layout.trainable
        expected = (w + ahead * delta)[:trainable]
        torch.testing.assert_close(rows[:, :trainable].mean(0), expected, rtol=1e-4, atol=1e-5)
        assert (rows[0] - w)[:trainable].norm() > 0


def test_each_layer_of_each_mutant_goes_forth_or_back_as_a_whole_and_buffers_stay() -> None:
    with build_small_run("fedmut", {"fedmut": {"T_a": 0}}, clients_per_round=5).engine_closed() as experiment:
        experiment.rounds.run_round(0)
        rows, w, delta = mutants(experiment, 1)
        layout = experiment.layout
        signs: dict[str, list[tuple[float, ...]]] = {}
        for entry in layout.entries:
            ways = torch.stack([entry.view(row) - entry.view(w) for row in rows]).view(len(rows), -1)
            if entry.kind is not TensorKind.PARAMETER:
                assert not ways.any(), f"{entry.name} mutated"
                continue
            step = 4.0 * entry.view(delta).flatten().float()
            factors = (ways @ step / (step @ step)).tolist()
            assert [round(f) for f in factors] == pytest.approx(factors, abs=1e-2)
            signs.setdefault(entry.layer, []).append(tuple(float(round(f)) for f in factors))
        assert all(len(set(of_unit)) == 1 for of_unit in signs.values()), "a module mutates as one"
        assert all(of_unit[0][-1] == 0 and sum(of_unit[0]) == 0 for of_unit in signs.values()), "the fifth is the model"
        assert len({of_unit[0] for of_unit in signs.values()}) > 1, "layers are shuffled each on its own"


def test_in_the_first_round_all_get_the_same_model() -> None:
    with build_small_run("fedmut", {}).engine_closed() as experiment:
        rows, w, _ = mutants(experiment, 0)
        assert all(torch.equal(row, w) for row in rows)


def test_running_variances_stay_positive() -> None:
    with build_small_run("fedmut", {"fedmut": {"alpha": 50.0}}, clients_per_round=8).engine_closed() as experiment:
        for number in range(3):
            experiment.rounds.run_round(number)
        layout, rows = experiment.layout, mutants(experiment, 3)[0]
        variances = [e.view(row) for e in layout.entries if "running_var" in e.name for row in rows]
        assert variances
        assert all(bool((variance > 0).all()) for variance in variances)


def test_without_alpha_it_is_fedavg_with_uniform_weights() -> None:
    federation = SmallFederatedDataset(sizes={0: 0})
    uniform = {"fedavg": {"weighting": "uniform"}}
    settings = {"federated_data": federation, "clients_per_round": 7}
    own = small_run("fedmut", {"fedmut": {"alpha": 0.0}}, **settings)
    assert own.digest == small_run("fedavg", uniform, **settings).digest
    assert own.digest != small_run("fedavg", {}, **settings).digest


def test_tensors_may_mutate_each_on_its_own() -> None:
    digests = {g: small_run("fedmut", {"fedmut": {"granularity": g}}).digest for g in ("module", "tensor")}
    assert digests["module"] != digests["tensor"]


@pytest.mark.parametrize("lost", [(), (0,), (1, 2, 5), tuple(range(1, 8))])
def test_lost_clients_do_not_drag_the_model_along_its_last_update(lost: tuple[int, ...]) -> None:
    """Every client moves its mutant by the same step: so does the model, and it leans ahead as with all of them."""
    with build_small_run("fedmut", {}, clients_per_round=8).engine_closed() as experiment:
        server, layout = experiment.rounds.parts.server, experiment.layout
        experiment.rounds.run_round(0)
        w, before = (row.clone() for row in server.bank.rows)
        step = 0.01 * torch.randn(layout.floats, generator=torch.Generator().manual_seed(0)).abs()
        updates = []
        for job in server.dispatch(1, list(range(8))):
            row = job.row.clone()
            row[: layout.floats] += step
            if job.client_id not in lost:
                updates.append(ClientUpdate(job, row, num_examples=1 + job.client_id, loss=1.0, steps=1))
        server.aggregate(1, iter(updates))
        ahead = w + 4.0 * server.a_t(1) / 2 * (w - before)
        ahead[layout.trainable :] = w[layout.trainable :]
        expected = ahead[: layout.floats] + step
        torch.testing.assert_close(server.global_model()[: layout.floats], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(server.bank.rows[1], w)
