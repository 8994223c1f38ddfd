"""Tests of FedCross: mixing against brute force, and equal methods."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedloom.core import similarity as gram
from fedloom.core.layout import model_digest
from fedloom.errors import InputError
from fedloom.methods import compose
from fedloom.methods.fedcross import cross_aggregate_batched, cross_aggregate_by_row
from fedloom.testing import CHECKS
from fedloom.testing.fixtures import batch_norm_network, simple_network, small_run
from tests.support.fedcross_servers import (
    ALPHAS,
    NETWORKS,
    ROUNDS,
    SELECTIONS,
    SEVERAL,
    SIMILARITIES,
    combined,
    make,
    plain_gaps,
    quick,
)
from tests.support.many_models import COUNTS, SEEDS, Loose, Network, random_rows

# Who is mixed with whom


@quick
@given(SEVERAL, ROUNDS)
def test_in_order_is_a_cyclic_permutation_without_fixed_point(count: int, r: int) -> None:
    server = make(count, Loose, selection="in-order")
    partners = [group[0] for group in server.collaborators(r, random_rows(server, 0))]
    assert partners == [(i + r % (count - 1) + 1) % count for i in range(count)], "the paper's formula"
    assert sorted(partners) == list(range(count))
    assert all(partner != i for i, partner in enumerate(partners))
    assert len({(partner - i) % count for i, partner in enumerate(partners)}) == 1


@quick
@given(SEVERAL, ROUNDS)
def test_in_order_meets_every_other_model_once_in_k_minus_1_rounds(count: int, start: int) -> None:
    server = make(count, Loose, selection="in-order")
    v = random_rows(server, 0)
    for i in range(count):
        met = [server.collaborators(r, v)[i][0] for r in range(start, start + count - 1)]
        assert sorted(met) == [j for j in range(count) if j != i]


def test_euclidean_by_hand() -> None:
    """Points at 0, 1, 3 and 10 on a line from the origin: all parallel, so only the distance tells them apart."""
    v = torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0], [11.0, 11.0]])
    network = partial(nn.Linear, 2, 1, bias=False)
    assert make(4, network, similarity="euclidean", selection="lowest").collaborators(0, v) == [[3], [3], [3], [0]]
    assert make(4, network, similarity="euclidean", selection="highest").collaborators(0, v) == [[1], [0], [1], [2]]


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 6), NETWORKS, SEEDS, st.sampled_from(["lowest", "highest"]), SIMILARITIES, ROUNDS)
def test_by_similarity_it_takes_what_brute_force_takes(
    count: int, network: Network, seed: int, selection: str, similarity: str, r: int
) -> None:
    server = make(count, network, selection=selection, similarity=similarity)
    v = random_rows(server, seed)
    gaps, found = plain_gaps(server, v), server.collaborators(r, v)
    np.testing.assert_allclose(server.gaps(v), gaps, atol=1e-7)
    for i, (partner,) in enumerate(found):
        assert partner != i
        others = [gaps[i, j] for j in range(count) if j != i]
        wanted = max(others) if selection == "lowest" else min(others)
        assert abs(gaps[i, partner] - wanted) < 1e-7


def test_lowest_and_highest_by_hand() -> None:
    """Directions at 0, 10, 100 and 260 degrees, of different lengths. Then the mean moves: it need not stay."""
    degrees, lengths = torch.tensor([0.0, 10.0, 100.0, 260.0]), torch.tensor([1.0, 5.0, 0.5, 2.0])
    angles = torch.deg2rad(degrees)
    v = lengths[:, None] * torch.stack([angles.cos(), angles.sin()], dim=1)
    network = partial(nn.Linear, 2, 1, bias=False)
    lowest, highest = make(4, network, selection="lowest"), make(4, network, selection="highest")
    assert lowest.collaborators(0, v) == [[2], [3], [3], [2]]
    assert highest.collaborators(0, v) == [[1], [0], [1], [0]]
    for server in (lowest, highest):
        assert not torch.allclose(combined(server, 0, v).mean(0), v.mean(0), atol=1e-3)


def test_nearly_parallel_models_are_ranked_rightly() -> None:
    """As far apart as after a round of careful training: 1e-5 of their length, where float32 cosines are all 1."""
    server = make(5, simple_network)
    trainable = server.context.layout.trainable
    naive_fails = 0
    for seed in range(10):
        v = random_rows(server, seed)[:1] + 1e-5 * random_rows(server, seed + 100)
        wide = v[:, :trainable].numpy().astype(np.longdouble)
        units = wide / np.sqrt((wide**2).sum(1, keepdims=True))
        gaps = ((units[:, None] - units[None]) ** 2).sum(2)
        assert [group[0] for group in server.collaborators(0, v)] == gaps.argmax(1).tolist()
        short = v[:, :trainable] / v[:, :trainable].norm(dim=1, keepdim=True)
        naive_fails += int((1 - short @ short.T).argmax(1).tolist() != gaps.argmax(1).tolist())
    assert naive_fails >= 5


@quick
@given(SEVERAL, NETWORKS, SEEDS, st.sampled_from(["lowest", "highest"]), SIMILARITIES)
def test_ties_go_to_the_successor(count: int, network: Network, seed: int, selection: str, similarity: str) -> None:
    server = make(count, network, selection=selection, similarity=similarity)
    v = random_rows(server, seed)[:1].repeat(count, 1)
    assert server.collaborators(0, v) == [[(i + 1) % count] for i in range(count)]


def test_ties_of_some_go_to_the_first_of_them_after_the_model() -> None:
    gaps = np.array([[-9.0, 5.0, 1.0, 1.0], [2.0, 0.0, 3.0, 4.0], [1.0, 5.0, 0.0, 1.0], [1.0, 5.0, 1.0, 0.0]])
    server = make(4, partial(nn.Linear, 4, 1, bias=False))
    server.gaps = lambda v: gaps
    assert server.extremes(torch.eye(4), 1) == [2, 0, 3, 0]
    unit = torch.eye(4)
    assert make(4, partial(nn.Linear, 4, 1, bias=False)).collaborators(0, unit) == [[1], [2], [3], [0]]


@quick
@given(SEVERAL, SEEDS, SELECTIONS, SIMILARITIES)
def test_buffers_do_not_decide(count: int, seed: int, selection: str, similarity: str) -> None:
    server = make(count, batch_norm_network, selection=selection, similarity=similarity)
    v = random_rows(server, seed)
    changed = v.clone()
    changed[:, server.context.layout.trainable :] = 0
    assert server.collaborators(3, v) == server.collaborators(3, changed)


@quick
@given(SEVERAL, SEEDS, SELECTIONS, SIMILARITIES)
def test_with_two_models_all_selections_are_one(count: int, seed: int, selection: str, similarity: str) -> None:
    server = make(2, selection=selection, similarity=similarity)
    assert server.collaborators(count, random_rows(server, seed)) == [[1], [0]]


# What the mixing does


@settings(deadline=None, max_examples=60)
@given(COUNTS, NETWORKS, SEEDS, ALPHAS, SELECTIONS, SIMILARITIES, ROUNDS)
def test_it_is_the_papers_formula_for_floats_and_a_copy_for_integers(
    count: int, network: Network, seed: int, alpha: float, selection: str, similarity: str, round: int
) -> None:
    """Buffers are mixed like weights; a model's integers stay its own."""
    server = make(count, network, alpha=alpha, selection=selection, similarity=similarity)
    v = random_rows(server, seed)
    w, floats = combined(server, round, v), server.context.layout.floats
    for i, partners in enumerate(server.collaborators(round, v)):
        other = v[partners[0]] if partners else v[i]
        wanted = alpha * v[i, :floats].double() + (1 - alpha) * other[:floats].double()
        torch.testing.assert_close(w[i, :floats].double(), wanted, rtol=1e-6, atol=1e-6)
    assert model_digest(w[:, floats:]) == model_digest(v[:, floats:])


@settings(deadline=None, max_examples=40)
@given(COUNTS, NETWORKS, SEEDS, ALPHAS, ROUNDS)
def test_in_order_keeps_the_mean_and_loses_the_known_share_of_the_spread(
    count: int, network: Network, seed: int, alpha: float, round: int
) -> None:
    """For any x: sum |w_i - x|^2 = sum |v_i - x|^2 - alpha (1 - alpha) sum |v_i - v_co(i)|^2."""
    server = make(count, network, alpha=alpha, selection="in-order")
    floats, v = server.context.layout.floats, random_rows(server, seed)
    w, v_floats = combined(server, round, v)[:, :floats].double(), v[:, :floats].double()
    torch.testing.assert_close(w.mean(0), v_floats.mean(0), rtol=1e-6, atol=1e-6)
    partners = [group[0] if group else i for i, group in enumerate(server.collaborators(round, v))]
    x = torch.randn(floats, generator=torch.Generator().manual_seed(seed + 1)).double()
    lost = alpha * (1 - alpha) * (v_floats - v_floats[partners]).square().sum()
    wanted = (v_floats - x).square().sum() - lost
    torch.testing.assert_close((w - x).square().sum(), wanted, rtol=1e-5, atol=1e-5)


@quick
@given(COUNTS, NETWORKS, SEEDS, SELECTIONS, SIMILARITIES, ROUNDS)
def test_alpha_1_never_mixes(
    count: int, network: Network, seed: int, selection: str, similarity: str, round: int
) -> None:
    options = {"propeller_rounds": 3, "propeller_weights": "shared"}
    server = make(count, network, alpha=1, selection=selection, similarity=similarity, **options)
    v = random_rows(server, seed)
    v[0, 0], v[-1, 1] = -0.0, 3e38  # a sum with 0 times another model would keep neither
    v[-1, 0], v[0, 1] = 1.0, -3e38
    assert model_digest(combined(server, round, v)) == model_digest(v)


@quick
@given(NETWORKS, SEEDS, SELECTIONS, ROUNDS)
def test_two_models_mixed_half_and_half_are_both_their_mean(
    network: Network, seed: int, selection: str, round: int
) -> None:
    server = make(2, network, alpha=0.5, selection=selection)
    floats, v = server.context.layout.floats, random_rows(server, seed)
    w = combined(server, round, v)
    for i in range(2):
        torch.testing.assert_close(w[i, :floats], v[:, :floats].mean(0), rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 9), NETWORKS, SEEDS, ALPHAS, SELECTIONS, st.integers(0, 5), st.integers(1, 8))
def test_equal_models_stay_as_they_are(
    count: int, network: Network, seed: int, alpha: float, selection: str, round: int, propellers: int
) -> None:
    """Bit for bit: with propellers, in the rounds of the rising alpha, and in the first stage, too."""
    options = {"alpha": alpha, "selection": selection, "propellers": propellers}
    server = make(count, network, **options, first_stage=1, propeller_rounds=2, dynamic_rounds=2)
    v = random_rows(server, seed)[:1].repeat(count, 1)
    assert model_digest(combined(server, round, v)) == model_digest(v)


@pytest.mark.parametrize("propellers", range(1, 9))
def test_equal_models_stay_as_they_are_with_any_number_of_propellers(propellers: int) -> None:
    """A sum divided by five, seven or eight is not always what was summed; half the error would show at 0.5."""
    server = make(9, simple_network, alpha=0.5, propellers=propellers, propeller_rounds=1)
    v = random_rows(server, 0)[:1].repeat(9, 1)
    assert model_digest(combined(server, 0, v)) == model_digest(v)


@quick
@given(SEVERAL, NETWORKS, SEEDS, SELECTIONS, ROUNDS)
def test_all_new_models_are_made_of_one_snapshot(
    count: int, network: Network, seed: int, selection: str, round: int
) -> None:
    """Numbering the models differently by a rotation only renames the result: nothing is read after being written."""
    server = make(count, network, alpha=0.7, selection=selection)
    v = random_rows(server, seed)
    turned = combined(server, round, v.roll(1, 0)).roll(-1, 0)
    assert model_digest(turned) == model_digest(combined(server, round, v))


@quick
@given(SEVERAL, SEEDS, ALPHAS, st.integers(1, 3), st.integers(1, 700), st.integers(0, 40))
def test_mixed_together_they_have_the_bits_of_those_mixed_singly(
    count: int, seed: int, alpha: float, partners: int, width: int, aside: int
) -> None:
    """In several blocks of columns, with others behind them that stay as they are."""
    draw = torch.Generator().manual_seed(seed)
    v, columns = torch.randn(count, width + aside, generator=draw), slice(0, width)
    theirs = torch.randint(0, count, (count, partners), generator=draw).tolist()
    singly, together = torch.zeros(2, count, width + aside)
    cross_aggregate_by_row(v, theirs, alpha, singly, columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gram.BLOCK_BYTES, "cpu", 0)  # as little as it ever takes
        cross_aggregate_batched(v, theirs, alpha, together, columns)
    assert model_digest(together) == model_digest(singly)
    assert not together[:, width:].any()


def test_one_model_alone_is_not_mixed() -> None:
    for selection in ("in-order", "lowest", "highest"):
        server = make(1, selection=selection, propeller_rounds=2, dynamic_rounds=2)
        v = random_rows(server, 0)
        assert all(model_digest(combined(server, round, v)) == model_digest(v) for round in range(5))


# Whole runs


@pytest.mark.parametrize("settings", [{}, {"failure_rate": 0.3}, {"model": simple_network, "clients_per_round": 3}])
def test_runs_with_alpha_1_are_those_of_models_that_never_meet(settings: dict[str, Any]) -> None:
    given = {"fedcross": {"alpha": 1.0}}
    assert small_run("fedcross", given, **settings).digest == small_run("indep", {}, **settings).digest


@pytest.mark.parametrize("settings", [{}, {"failure_rate": 0.3}])
def test_runs_with_all_rounds_in_the_first_stage_are_uniform_fedavg(settings: dict[str, Any]) -> None:
    """Bit for bit, also if clients fail: their models have no part in the mean."""
    staged = small_run("fedcross", {"fedcross": {"first_stage": 4}}, **settings)
    assert staged.digest == small_run("fedavg", {"fedavg": {"weighting": "uniform"}}, **settings).digest


def test_how_often_a_run_is_evaluated_changes_nothing() -> None:
    assert small_run("fedcross", {}, eval_every=1).digest == small_run("fedcross", {}, eval_every=4).digest


def test_the_options_do_something() -> None:
    runs = [{}, {"alpha": 0.7}, {"selection": "in-order"}, {"selection": "highest"}, {"propeller_rounds": 2}]
    runs += [{"dynamic_rounds": 3}, {"first_stage": 1}, {"propeller_rounds": 2, "propellers": 2}]
    runs += [{"dynamic_rounds": 3, "dynamic_start": 0.6}, {"dynamic_rounds": 4, "dynamic_schedule": "cosine"}]
    runs += [
        {"propeller_rounds": 2, "propeller_weights": "shared"},
        {"similarity": "euclidean", "selection": "highest"},
    ]
    assert len({small_run("fedcross", {"fedcross": options}).digest for options in runs}) == len(runs)


@pytest.mark.parametrize("check", ["engines agree", "resumes exactly"])
def test_with_the_clients_of_fedprox(check: str) -> None:
    CHECKS[check]("fedcross+fedprox", {"fedcross": {"alpha": 0.8}, "fedprox": {"mu": 0.1}})


def test_two_servers_are_one_too_many() -> None:
    with pytest.raises(InputError, match="fedcross and fedmr both provide the part 'server', and a run has only one"):
        compose("fedcross+fedmr")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alpha": 0.4}, "fedcross.alpha must be greater than or equal to 0.5, not 0.4"),
        ({"alpha": 1.1}, "fedcross.alpha must be less than or equal to 1, not 1.1"),
        ({"alpha": "most"}, "fedcross.alpha must be a number, not 'most'"),
        ({"selection": "low"}, "fedcross.selection must be 'in-order', 'lowest' or 'highest', not 'low'"),
        ({"similarity": "l1"}, "fedcross.similarity must be 'global', 'layerwise' or 'euclidean', not 'l1'"),
        ({"propeller_weights": "mean"}, "fedcross.propeller_weights must be 'equal' or 'shared', not 'mean'"),
        ({"dynamic_start": 0.4}, "fedcross.dynamic_start must be greater than or equal to 0.5, not 0.4"),
        ({"alpha": 0.9, "dynamic_start": 0.95}, "dynamic_start must be at most alpha, 0.9, not 0.95"),
        ({"dynamic_schedule": "step"}, "fedcross.dynamic_schedule must be 'linear' or 'cosine', not 'step'"),
        ({"propellers": 0}, "fedcross.propellers must be greater than or equal to 1, not 0"),
        ({"propeller_rounds": -1}, "fedcross.propeller_rounds must be greater than or equal to 0, not -1"),
        ({"dynamic_rounds": 1.5}, "fedcross.dynamic_rounds must be"),
        ({"first_stage": -1}, "fedcross.first_stage must be greater than or equal to 0, not -1"),
        ({"aplha": 0.9}, "did you mean 'alpha'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        compose("fedcross", {"fedcross": options})
