"""Tests of FedCross's acceleration, and of which client gets which model."""

from functools import partial

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedloom.core.layout import model_digest
from tests.support.fedcross_servers import ALPHAS, NETWORKS, SELECTIONS, SEVERAL, answers, combined, make, quick
from tests.support.many_models import COUNTS, SEEDS, Loose, Network, random_rows

# Acceleration


def test_propellers_by_hand() -> None:
    server = make(5, partial(nn.Linear, 1, 1, bias=False), alpha=0.9, propellers=3, propeller_rounds=4)
    v = torch.tensor([[1.0], [10.0], [100.0], [1000.0], [10000.0]])
    assert server.collaborators(0, v)[0] == [1, 2, 3]
    assert server.collaborators(2, v)[0] == [3, 4, 1]
    assert server.collaborators(2, v)[4] == [2, 3, 0]
    wanted = 0.9 * 1 + 0.1 / 3 * (1000 + 10000 + 10)
    torch.testing.assert_close(combined(server, 2, v)[0], torch.tensor([wanted]))


@quick
@given(SEVERAL, NETWORKS, SEEDS, ALPHAS, st.integers(1, 8), st.integers(0, 9))
def test_propellers_share_the_weight_of_the_others(
    count: int, network: Network, seed: int, alpha: float, propellers: int, round: int
) -> None:
    server = make(count, network, alpha=alpha, propellers=propellers, propeller_rounds=10)
    floats, v = server.context.layout.floats, random_rows(server, seed)
    w, number = combined(server, round, v), min(propellers, count - 1)
    for i in range(count):
        offsets = [(round + step) % (count - 1) + 1 for step in range(number)]
        assert len(set(offsets)) == number
        others = sum(v[(i + offset) % count, :floats].double() for offset in offsets)
        wanted = alpha * v[i, :floats].double() + (1 - alpha) / number * others
        torch.testing.assert_close(w[i, :floats].double(), wanted, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(w[:, :floats].mean(0), v[:, :floats].mean(0), rtol=1e-5, atol=2e-6)
    assert model_digest(w[:, floats:]) == model_digest(v[:, floats:])


def test_after_their_rounds_the_collaborator_is_one_again() -> None:
    server = make(4, propellers=2, propeller_rounds=3, selection="in-order")
    v = random_rows(server, 0)
    assert [len(server.collaborators(r, v)[0]) for r in range(5)] == [2, 2, 2, 1, 1]


def test_one_propeller_is_the_collaborator_in_order() -> None:
    single, plain = make(4, propellers=1, propeller_rounds=9), make(4, selection="in-order")
    v = random_rows(plain, 0)
    assert all(model_digest(combined(single, r, v)) == model_digest(combined(plain, r, v)) for r in range(9))


@quick
@given(ALPHAS, st.integers(2, 100), st.integers(0, 100))
def test_alpha_rises_in_a_line_from_a_half(alpha: float, rounds: int, propeller_rounds: int) -> None:
    server = make(2, Loose, alpha=alpha, dynamic_rounds=rounds, propeller_rounds=propeller_rounds)
    course = [server.alpha(propeller_rounds + r) for r in range(rounds)]
    assert course[0] == 0.5
    assert course[-1] == server.alpha(propeller_rounds + rounds) == server.alpha(9999) == alpha
    np.testing.assert_allclose(np.diff(course), (alpha - 0.5) / (rounds - 1), atol=1e-12)
    assert all(server.alpha(r) == alpha for r in range(propeller_rounds)), "propellers come first, with alpha itself"


def test_a_rise_within_one_round_is_none() -> None:
    assert [make(2, Loose, alpha=0.9, dynamic_rounds=1).alpha(r) for r in (0, 1)] == [0.9, 0.9]


def test_first_stage_then_propellers_then_rising_alpha() -> None:
    """All three in turn; each counts from the end of the one before, and mixing in order starts anew."""
    later = {"alpha": 0.9, "propellers": 2, "propeller_rounds": 2, "dynamic_rounds": 3, "selection": "in-order"}
    staged, plain = make(4, first_stage=5, **later), make(4, **later)
    v = random_rows(plain, 0)
    for round in range(5):
        w = combined(staged, round, v)
        assert all(torch.equal(row, staged.mean(v)) for row in w)
    for r in range(9):
        assert model_digest(combined(staged, 5 + r, v)) == model_digest(combined(plain, r, v))


@quick
@given(COUNTS, NETWORKS, SEEDS)
def test_the_first_stage_makes_all_models_their_uniform_mean(count: int, network: Network, seed: int) -> None:
    server = make(count, network, first_stage=1)
    layout, v = server.context.layout, random_rows(server, seed)
    w = combined(server, 0, v)
    assert len({model_digest(row) for row in w}) == 1
    torch.testing.assert_close(w[0, : layout.floats], v[:, : layout.floats].mean(0), rtol=1e-5, atol=1e-6)


# Slots and clients


def test_models_start_equal_and_each_client_gets_its_slots() -> None:
    server = make(4)
    jobs = list(server.dispatch(0, [7, 2, 5, 0]))
    assert [(job.client_id, job.model_index) for job in jobs] == [(7, 0), (2, 1), (5, 2), (0, 3)]
    assert all(torch.equal(job.row, server.context.initial) for job in jobs)


@quick
@given(SEVERAL, NETWORKS, SEEDS, SELECTIONS, st.data())
def test_the_model_of_a_lost_client_takes_part_as_it_is(
    count: int, network: Network, seed: int, selection: str, data: st.DataObject
) -> None:
    server = make(count, network, alpha=0.6, selection=selection)
    server.bank.rows[:] = before = random_rows(server, seed)
    jobs = list(server.dispatch(1, list(range(count))))
    updates = answers(server, jobs, seed + 1)
    lost = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    v = torch.stack([before[i] if i in lost else update.row for i, update in enumerate(updates)])
    server.aggregate(1, iter(update for i, update in enumerate(updates) if i not in lost))
    assert model_digest(server.bank.rows) == model_digest(combined(server, 1, v))


@quick
@given(COUNTS, NETWORKS, SEEDS)
def test_with_no_answer_at_all_nothing_changes(count: int, network: Network, seed: int) -> None:
    server = make(count, network, alpha=0.5, first_stage=1)
    server.bank.rows[:] = random_rows(server, seed)
    before = model_digest(server.bank.rows)
    for round in range(3):
        server.aggregate(round, iter(()))
    assert model_digest(server.bank.rows) == before


@quick
@given(SEEDS, st.integers(1, 4))
def test_fewer_clients_than_models_take_some_of_them(seed: int, clients: int) -> None:
    server = make(5, alpha=0.6)
    server.bank.rows[:] = before = random_rows(server, seed)
    jobs = list(server.dispatch(2, list(range(clients))))
    slots = [job.model_index for job in jobs]
    assert len(set(slots)) == clients
    assert slots == sorted(slots)
    assert all(torch.equal(job.row, before[job.model_index]) for job in jobs)
    updates = answers(server, jobs, seed + 1)
    v = before.clone()
    for update in updates:
        v[update.model_index] = update.row
    server.aggregate(2, iter(updates))
    assert model_digest(server.bank.rows) == model_digest(combined(server, 2, v))


def test_then_all_models_have_their_turn() -> None:
    server = make(5, Loose)
    slots = {job.model_index for round in range(30) for job in server.dispatch(round, [1, 2])}
    assert slots == set(range(5))


@quick
@given(COUNTS, NETWORKS, SEEDS)
def test_deploying_is_the_uniform_mean_and_leaves_the_models(count: int, network: Network, seed: int) -> None:
    server = make(count, network)
    server.bank.rows[:] = random_rows(server, seed)
    layout, before = server.context.layout, model_digest(server.bank.rows)
    deployed = server.global_model()
    mean = server.bank.rows[:, : layout.floats].double().mean(0)
    torch.testing.assert_close(deployed[: layout.floats].double(), mean, rtol=1e-5, atol=1e-6)
    deployed.fill_(9)
    assert model_digest(server.bank.rows) == before
