"""FedCross: the properties of its mixing, against brute force, and its place among the other methods."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom import Job, Layout, Update
from fedloom.banks import Bank
from fedloom.errors import InputError
from fedloom.methods import Context, compose
from fedloom.methods.fedcross import FedCrossOptions, FedCrossServer
from fedloom.rows import Kind, digest
from fedloom.small_runs import normed_network, plain_network, small_experiment, small_run
from fedloom.streams import Streams
from fedloom.testing import CHECKS


class Loose(nn.Module):
    """A parameter of its own beside a child, an odd number of floats, and an integer that is no counter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.child = nn.Linear(3, 2)
        self.register_buffer("steps", torch.tensor([3, 5, 7], dtype=torch.int32))


Network = Callable[[], nn.Module]
NETWORKS = st.sampled_from([plain_network, normed_network, Loose, lambda: nn.Linear(2, 1)])
COUNTS = st.integers(1, 6)
SEVERAL = st.integers(2, 6)
ROUNDS = st.integers(0, 40)
SEEDS = st.integers(0, 2**32 - 1)
ALPHAS = st.floats(0.5, 1)
SELECTIONS = st.sampled_from(["in-order", "lowest", "highest"])
SIMILARITIES = st.sampled_from(["global", "layerwise"])
quick = settings(deadline=None, max_examples=25)


@lru_cache(maxsize=1)
def some_context() -> Context:
    with small_experiment("fedavg", {}).engine_closed() as experiment:
        return experiment.rounds.context


def make(count: int, network: Network = normed_network, **options: Any) -> FedCrossServer:
    """A server of `count` models of a network."""
    with Streams(0).globally("init"):
        module = network()
    layout = Layout.of(module)
    bank = partial(Bank.memory, dtype=layout.dtype)
    context = replace(some_context(), layout=layout, initial=layout.read(module), per_round=count, make_bank=bank)
    return FedCrossServer(context, FedCrossOptions(**options))


def random_rows(server: FedCrossServer, seed: int) -> Tensor:
    """Models as clients may return them, integers and all."""
    layout, generator = server.context.layout, torch.Generator().manual_seed(seed)
    rows = torch.zeros(server.context.per_round, layout.size)
    rows[:, : layout.floats] = torch.randn(len(rows), layout.floats, generator=generator)
    for row in rows:
        for integers in layout.views(row, Kind.INTEGER):
            integers.copy_(torch.randint(1000, integers.shape, generator=generator))
    return rows


def combined(server: FedCrossServer, round: int, v: Tensor) -> Tensor:
    """The new models, with a look at whether the old ones stay."""
    w, before = torch.full_like(v, torch.nan), digest(v)
    server.combine(round, v, w)
    assert digest(v) == before, "the uploaded models were changed"
    return w


def answers(server: FedCrossServer, jobs: list[Job], seed: int) -> list[Update]:
    rows = random_rows(server, seed)
    return [Update(job, rows[job.slot], samples=1, loss=1.0, steps=1) for job in jobs]


def plain_gaps(server: FedCrossServer, v: Tensor) -> np.ndarray:
    """1 - similarity by the definition, in float64."""
    layout, wide = server.context.layout, v.numpy().astype(np.float64)
    columns = {"": list(range(layout.trainable))}
    if server.options.similarity == "layerwise":
        columns = {}
        for entry in layout.entries:
            if entry.kind is Kind.PARAMETER:
                columns.setdefault(entry.unit, []).extend(range(entry.columns.start, entry.columns.stop))
    cosines = []
    for part in columns.values():
        unit = wide[:, part] / np.linalg.norm(wide[:, part], axis=1, keepdims=True)
        cosines.append(unit @ unit.T)
    return 1 - np.mean(cosines, axis=0)


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


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 6), NETWORKS, SEEDS, st.sampled_from(["lowest", "highest"]), SIMILARITIES, ROUNDS)
def test_by_similarity_it_takes_what_brute_force_takes(
    count: int, network: Network, seed: int, selection: str, similarity: str, r: int
) -> None:
    server = make(count, network, selection=selection, similarity=similarity)
    v = random_rows(server, seed)
    gaps, found = plain_gaps(server, v), server.collaborators(r, v)
    np.testing.assert_allclose(server.gaps(v).numpy(), gaps, atol=1e-7)
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
    server = make(5, plain_network)
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
    gaps = torch.tensor([[-9.0, 5.0, 1.0, 1.0], [2.0, 0.0, 3.0, 4.0], [1.0, 5.0, 0.0, 1.0], [1.0, 5.0, 1.0, 0.0]])
    server = make(4, partial(nn.Linear, 4, 1, bias=False))
    tied = [0, 2, 3]  # those that are looked at again
    server.quick_gaps = lambda v: (gaps, torch.zeros(4, 4))
    server.gaps = lambda v: gaps if len(v) == 4 else gaps[tied][:, tied]
    assert server.extremes(torch.eye(4), 1) == [2, 0, 3, 0]
    unit = torch.eye(4)
    assert make(4, partial(nn.Linear, 4, 1, bias=False)).collaborators(0, unit) == [[1], [2], [3], [0]]


@quick
@given(SEVERAL, SEEDS, SELECTIONS, SIMILARITIES)
def test_buffers_do_not_decide(count: int, seed: int, selection: str, similarity: str) -> None:
    server = make(count, normed_network, selection=selection, similarity=similarity)
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
    assert digest(w[:, floats:]) == digest(v[:, floats:])


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
    server = make(count, network, alpha=1, selection=selection, similarity=similarity, propeller_rounds=3)
    v = random_rows(server, seed)
    v[0, 0], v[-1, 1] = -0.0, 3e38  # a sum with 0 times another model would keep neither
    v[-1, 0], v[0, 1] = 1.0, -3e38
    assert digest(combined(server, round, v)) == digest(v)


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
    assert digest(combined(server, round, v)) == digest(v)


@pytest.mark.parametrize("propellers", range(1, 9))
def test_equal_models_stay_as_they_are_with_any_number_of_propellers(propellers: int) -> None:
    """A sum divided by five, seven or eight is not always what was summed; half the error would show at 0.5."""
    server = make(9, plain_network, alpha=0.5, propellers=propellers, propeller_rounds=1)
    v = random_rows(server, 0)[:1].repeat(9, 1)
    assert digest(combined(server, 0, v)) == digest(v)


@quick
@given(SEVERAL, NETWORKS, SEEDS, SELECTIONS, ROUNDS)
def test_all_new_models_are_made_of_one_snapshot(
    count: int, network: Network, seed: int, selection: str, round: int
) -> None:
    """Numbering the models differently by a rotation only renames the result: nothing is read after being written."""
    server = make(count, network, alpha=0.7, selection=selection)
    v = random_rows(server, seed)
    turned = combined(server, round, v.roll(1, 0)).roll(-1, 0)
    assert digest(turned) == digest(combined(server, round, v))


def test_one_model_alone_is_not_mixed() -> None:
    for selection in ("in-order", "lowest", "highest"):
        server = make(1, selection=selection, propeller_rounds=2, dynamic_rounds=2)
        v = random_rows(server, 0)
        assert all(digest(combined(server, round, v)) == digest(v) for round in range(5))


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
    assert digest(w[:, floats:]) == digest(v[:, floats:])


def test_after_their_rounds_the_collaborator_is_one_again() -> None:
    server = make(4, propellers=2, propeller_rounds=3, selection="in-order")
    v = random_rows(server, 0)
    assert [len(server.collaborators(r, v)[0]) for r in range(5)] == [2, 2, 2, 1, 1]


def test_one_propeller_is_the_collaborator_in_order() -> None:
    single, plain = make(4, propellers=1, propeller_rounds=9), make(4, selection="in-order")
    v = random_rows(plain, 0)
    assert all(digest(combined(single, r, v)) == digest(combined(plain, r, v)) for r in range(9))


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
        assert digest(combined(staged, 5 + r, v)) == digest(combined(plain, r, v))


@quick
@given(COUNTS, NETWORKS, SEEDS)
def test_the_first_stage_makes_all_models_their_uniform_mean(count: int, network: Network, seed: int) -> None:
    server = make(count, network, first_stage=1)
    layout, v = server.context.layout, random_rows(server, seed)
    w = combined(server, 0, v)
    assert len({digest(row) for row in w}) == 1
    torch.testing.assert_close(w[0, : layout.floats], v[:, : layout.floats].mean(0), rtol=1e-5, atol=1e-6)


# Slots and clients


def test_models_start_equal_and_each_client_gets_its_slots() -> None:
    server = make(4)
    jobs = list(server.dispatch(0, [7, 2, 5, 0]))
    assert [(job.client, job.slot) for job in jobs] == [(7, 0), (2, 1), (5, 2), (0, 3)]
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
    server.collect(1, iter(update for i, update in enumerate(updates) if i not in lost))
    assert digest(server.bank.rows) == digest(combined(server, 1, v))


@quick
@given(COUNTS, NETWORKS, SEEDS)
def test_with_no_answer_at_all_nothing_changes(count: int, network: Network, seed: int) -> None:
    server = make(count, network, alpha=0.5, first_stage=1)
    server.bank.rows[:] = random_rows(server, seed)
    before = digest(server.bank.rows)
    for round in range(3):
        server.collect(round, iter(()))
    assert digest(server.bank.rows) == before


@quick
@given(SEEDS, st.integers(1, 4))
def test_fewer_clients_than_models_take_some_of_them(seed: int, clients: int) -> None:
    server = make(5, alpha=0.6)
    server.bank.rows[:] = before = random_rows(server, seed)
    jobs = list(server.dispatch(2, list(range(clients))))
    slots = [job.slot for job in jobs]
    assert len(set(slots)) == clients
    assert slots == sorted(slots)
    assert all(torch.equal(job.row, before[job.slot]) for job in jobs)
    updates = answers(server, jobs, seed + 1)
    v = before.clone()
    for update in updates:
        v[update.slot] = update.row
    server.collect(2, iter(updates))
    assert digest(server.bank.rows) == digest(combined(server, 2, v))


def test_then_all_models_have_their_turn() -> None:
    server = make(5, Loose)
    slots = {job.slot for round in range(30) for job in server.dispatch(round, [1, 2])}
    assert slots == set(range(5))


@quick
@given(COUNTS, NETWORKS, SEEDS)
def test_deploying_is_the_uniform_mean_and_leaves_the_models(count: int, network: Network, seed: int) -> None:
    server = make(count, network)
    server.bank.rows[:] = random_rows(server, seed)
    layout, before = server.context.layout, digest(server.bank.rows)
    deployed = server.deploy()
    mean = server.bank.rows[:, : layout.floats].double().mean(0)
    torch.testing.assert_close(deployed[: layout.floats].double(), mean, rtol=1e-5, atol=1e-6)
    deployed.fill_(9)
    assert digest(server.bank.rows) == before


# Whole runs


@pytest.mark.parametrize("settings", [{}, {"lost": 0.3}, {"model": plain_network, "per_round": 3}])
def test_runs_with_alpha_1_are_those_of_models_that_never_meet(settings: dict[str, Any]) -> None:
    given = {"fedcross": {"alpha": 1.0}}
    assert small_run("fedcross", given, **settings).digest == small_run("indep", {}, **settings).digest


def test_runs_with_all_rounds_in_the_first_stage_are_uniform_fedavg() -> None:
    staged = small_run("fedcross", {"fedcross": {"first_stage": 4}})
    assert staged.digest == small_run("fedavg", {"fedavg": {"weighting": "uniform"}}).digest


def test_how_often_a_run_is_evaluated_changes_nothing() -> None:
    assert small_run("fedcross", {}, eval_every=1).digest == small_run("fedcross", {}, eval_every=4).digest


def test_the_options_do_something() -> None:
    runs = [{}, {"alpha": 0.7}, {"selection": "in-order"}, {"selection": "highest"}, {"propeller_rounds": 2}]
    runs += [{"dynamic_rounds": 3}, {"first_stage": 1}, {"propeller_rounds": 2, "propellers": 2}]
    assert len({small_run("fedcross", {"fedcross": options}).digest for options in runs}) == len(runs)


@pytest.mark.parametrize("check", ["engines agree", "resumes exactly"])
def test_with_the_clients_of_fedprox(check: str) -> None:
    CHECKS[check]("fedcross+fedprox", {"fedcross": {"alpha": 0.8}, "fedprox": {"mu": 0.1}})


def test_two_servers_are_one_too_many() -> None:
    with pytest.raises(InputError, match="fedcross and fedmr both bring a server, and a run has one server"):
        compose("fedcross+fedmr")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alpha": 0.4}, "fedcross.alpha must be greater than or equal to 0.5, not 0.4"),
        ({"alpha": 1.1}, "fedcross.alpha must be less than or equal to 1, not 1.1"),
        ({"alpha": "most"}, "fedcross.alpha must be a number, not 'most'"),
        ({"selection": "low"}, "fedcross.selection must be 'in-order', 'lowest' or 'highest', not 'low'"),
        ({"similarity": "euclid"}, "fedcross.similarity must be 'global' or 'layerwise', not 'euclid'"),
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
