"""Tests of FedCross's acceleration, and of which client gets which model."""

import math
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedloom.core.averaging import average_models
from fedloom.core.layout import model_digest
from fedloom.testing.fixtures import simple_network
from tests.support.fedcross_servers import ALPHAS, NETWORKS, SELECTIONS, SEVERAL, answers, combined, make, quick
from tests.support.many_models import COUNTS, SEEDS, Loose, Network, random_rows

# Acceleration


def test_propellers_by_hand() -> None:
    server = make(5, partial(nn.Linear, 1, 1, bias=False), alpha=0.9, propellers=3, propeller_rounds=4)
    v = torch.tensor([[1.0], [10.0], [100.0], [1000.0], [10000.0]])
    assert server.collaborators(0, v)[0] == [1, 2, 3]
    assert server.collaborators(2, v)[0] == [3, 4, 1]
    assert server.collaborators(2, v)[4] == [2, 3, 0]
    torch.testing.assert_close(combined(server, 2, v)[0], torch.tensor([(1 + 1000 + 10000 + 10) / 4]))


def test_propellers_that_share_a_weight_by_hand() -> None:
    network = partial(nn.Linear, 1, 1, bias=False)
    server = make(5, network, alpha=0.9, propellers=3, propeller_rounds=4, propeller_weights="shared")
    v = torch.tensor([[1.0], [10.0], [100.0], [1000.0], [10000.0]])
    wanted = 0.9 * 1 + 0.1 / 3 * (1000 + 10000 + 10)
    torch.testing.assert_close(combined(server, 2, v)[0], torch.tensor([wanted]))


@quick
@given(SEVERAL, NETWORKS, SEEDS, ALPHAS, st.integers(1, 8), st.integers(0, 9), st.sampled_from(["equal", "shared"]))
def test_a_model_is_mixed_with_its_propellers(
    count: int, network: Network, seed: int, alpha: float, propellers: int, round: int, weights: str
) -> None:
    """The plain mean of a model and its propellers, whatever alpha is; or they share the weight 1 - alpha."""
    server = make(count, network, alpha=alpha, propellers=propellers, propeller_rounds=10, propeller_weights=weights)
    floats, v = server.context.layout.floats, random_rows(server, seed)
    if weights == "equal":
        alpha = 1 / (1 + min(propellers, count - 1))
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
    """With the weight of a collaborator, bit for bit; a plain mean of the two is that with alpha = 1/2."""
    single, plain = make(4, propellers=1, propeller_rounds=9, propeller_weights="shared"), make(4, selection="in-order")
    v = random_rows(plain, 0)
    assert all(model_digest(combined(single, r, v)) == model_digest(combined(plain, r, v)) for r in range(9))
    equal, half = make(4, propellers=1, propeller_rounds=9), make(4, selection="in-order", alpha=0.5)
    assert all(model_digest(combined(equal, r, v)) == model_digest(combined(half, r, v)) for r in range(9))


def test_propellers_from_all_other_models_make_all_models_their_mean() -> None:
    server = make(4, propellers=3, propeller_rounds=1)
    floats, v = server.context.layout.floats, random_rows(server, 0)
    for row in combined(server, 0, v):
        torch.testing.assert_close(row[:floats], v[:, :floats].mean(0), rtol=1e-5, atol=1e-6)


def test_propellers_bring_the_models_closer_than_one_collaborator_does() -> None:
    """The paper's reason for them: a model learns more of the others. With a shared weight it learned as little."""
    v = random_rows(make(6, simple_network), 0)

    def spread(**options: Any) -> float:
        rows = combined(make(6, simple_network, selection="in-order", **options), 0, v).double()
        return float((rows - rows.mean(0)).square().sum())

    plain, before = spread(), float((v.double() - v.double().mean(0)).square().sum())
    assert spread(propeller_rounds=1) < 0.5 * before < plain < before
    assert spread(propeller_rounds=1, propeller_weights="shared") > 0.9 * plain


@quick
@given(ALPHAS, st.integers(2, 100), st.integers(0, 100))
def test_alpha_rises_in_a_line_from_a_half(alpha: float, rounds: int, propeller_rounds: int) -> None:
    server = make(
        2, Loose, alpha=alpha, dynamic_rounds=rounds, propeller_rounds=propeller_rounds, propeller_weights="shared"
    )
    course = [server.alpha(propeller_rounds + r) for r in range(rounds)]
    assert course[0] == 0.5
    assert course[-1] == server.alpha(propeller_rounds + rounds) == server.alpha(9999) == alpha
    np.testing.assert_allclose(np.diff(course), (alpha - 0.5) / (rounds - 1), atol=1e-12)
    assert all(server.alpha(r) == alpha for r in range(propeller_rounds)), "propellers come first, with alpha itself"


@quick
@given(ALPHAS, st.floats(0, 1), st.integers(2, 100), st.sampled_from(["linear", "cosine"]))
def test_alpha_rises_from_its_start_to_its_value(alpha: float, part: float, rounds: int, schedule: str) -> None:
    start = 0.5 + part * (alpha - 0.5)
    server = make(2, Loose, alpha=alpha, dynamic_rounds=rounds, dynamic_start=start, dynamic_schedule=schedule)
    course = [server.alpha(r) for r in range(rounds)]
    assert course[0] == start
    assert course[-1] == server.alpha(rounds) == alpha
    assert all(here <= after for here, after in pairwise(course))


def test_the_schedules_by_hand() -> None:
    """Over five rounds: in equal steps, or along half a cosine, which is level at both ends."""
    linear = make(2, Loose, alpha=0.9, dynamic_rounds=5, dynamic_start=0.7)
    assert [linear.alpha(r) for r in range(6)] == pytest.approx([0.7, 0.75, 0.8, 0.85, 0.9, 0.9])
    cosine = make(2, Loose, alpha=0.9, dynamic_rounds=5, dynamic_start=0.7, dynamic_schedule="cosine")
    wanted = [0.7, 0.8 - 0.1 * math.sqrt(0.5), 0.8, 0.8 + 0.1 * math.sqrt(0.5), 0.9, 0.9]
    assert [cosine.alpha(r) for r in range(6)] == pytest.approx(wanted)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_rise_from_alpha_itself_is_none(schedule: str) -> None:
    level = make(4, alpha=0.93, dynamic_rounds=7, dynamic_start=0.93, dynamic_schedule=schedule)
    plain = make(4, alpha=0.93)
    v = random_rows(plain, 0)
    assert all(model_digest(combined(level, r, v)) == model_digest(combined(plain, r, v)) for r in range(9))


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


@quick
@given(SEVERAL, NETWORKS, SEEDS, st.data())
def test_the_first_stage_averages_only_the_models_that_were_returned(
    count: int, network: Network, seed: int, data: st.DataObject
) -> None:
    server = make(count, network, first_stage=1)
    server.bank.rows[:] = random_rows(server, seed)
    updates = answers(server, list(server.dispatch(0, list(range(count)))), seed + 1)
    kept = data.draw(st.lists(st.sampled_from(updates), min_size=1, unique_by=lambda update: update.model_index))
    server.aggregate(0, iter(kept))
    wanted = average_models(server.context.layout, [u.row for u in sorted(kept, key=lambda u: u.model_index)])
    assert all(torch.equal(row, wanted) for row in server.bank.rows)


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
