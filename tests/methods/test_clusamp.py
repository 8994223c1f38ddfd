"""Tests of CluSamp: its distributions, its draws, clients drawn twice."""

from math import pi

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.averaging import WeightedMean
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.methods.clusamp import _groups, clusamp_sampling_distributions, clusamp_update_distances
from fedloom.testing import check_method
from fedloom.testing.fixtures import SmallFederatedDataset, build_small_run, small_run
from tests.support.task_rounds import in_round


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 8), st.integers(0, 100))
@settings(deadline=None)
def test_distributions_are_full_and_fair_in_integers(sizes: list[int], m: int, seed: int) -> None:
    """Every row sums to M and every column to m n_i exactly, whoever has more than a share or nothing at all."""
    n = np.array(sizes)
    if not n.sum():
        return
    points = np.random.default_rng(seed).normal(size=(len(n), 3))
    between = np.linalg.norm(points[:, None] - points, axis=2)
    r = clusamp_sampling_distributions(n, m, between)
    assert r.shape == (m, len(n))
    assert (r >= 0).all()
    assert (r.sum(1) == n.sum()).all()
    assert (r.sum(0) == m * n).all()


def test_two_groups_of_one_mass_give_one_client_each() -> None:
    n = np.array([3, 5, 2, 6])
    between = np.array([[0, 0.1, 3, 3], [0.1, 0, 3, 3], [3, 3, 0, 0.1], [3, 3, 0.1, 0]], dtype=float)
    r = clusamp_sampling_distributions(n, 2, between)
    assert sorted(tuple(np.flatnonzero(row)) for row in r) == [(0, 1), (2, 3)]


def test_the_heaviest_groups_begin_the_distributions_and_the_others_are_poured_in() -> None:
    points = np.array([0.0, 0.1, 10.0, 10.1, 20.0])
    r = clusamp_sampling_distributions(np.array([3, 3, 2, 4, 4]), 2, np.abs(points[:, None] - points))
    assert sorted(r.tolist()) == [[0, 0, 4, 8, 4], [6, 6, 0, 0, 4]]


def test_a_client_with_more_than_a_share_gets_distributions_of_its_own() -> None:
    r = clusamp_sampling_distributions(np.array([70, 10, 20]), 4, np.zeros((3, 3)))
    assert (r[:2] == [100, 0, 0]).all()
    assert (r[2:].sum(0) == [80, 40, 80]).all()


def wards(between: np.ndarray) -> list[list[set[int]]]:
    """The groups of each level of Ward's tree, from one for each client to one for all (Lance and Williams)."""
    groups, d = [{i} for i in range(len(between))], {frozenset({i}): {} for i in range(len(between))}
    for i, j in np.argwhere(between >= 0):
        d[frozenset({i})][frozenset({j})] = float(between[i, j])
    levels = [list(groups)]
    while len(groups) > 1:
        pairs = [(d[frozenset(u)][frozenset(v)], a, b) for a, u in enumerate(groups) for b, v in enumerate(groups[:a])]
        apart, a, b = min(pairs)
        u, v = groups[a], groups[b]
        new, rest = u | v, [w for w in groups if w not in (u, v)]
        d[frozenset(new)] = {}
        for w in rest:
            to_u, to_v = d[frozenset(u)][frozenset(w)], d[frozenset(v)][frozenset(w)]
            squares = (len(u) + len(w)) * to_u**2 + (len(v) + len(w)) * to_v**2 - len(w) * apart**2
            d[frozenset(new)][frozenset(w)] = d[frozenset(w)][frozenset(new)] = (squares / (len(new) + len(w))) ** 0.5
        groups = [*rest, new]
        levels.append(list(groups))
    return levels


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_the_fewest_of_wards_tree_that_are_light_enough(seed: int) -> None:
    draw = np.random.default_rng(seed)
    points, mass = draw.normal(size=(9, 2)), draw.integers(1, 20, 9)
    between, full = np.linalg.norm(points[:, None] - points, axis=2), int(mass.sum()) // 2
    fits = [level for level in wards(between) if all(mass[list(group)].sum() <= full for group in level)]
    found = [set(group.tolist()) for group in _groups(mass, full, between)]
    assert sorted(map(sorted, found)) == sorted(map(sorted, min(fits, key=len)))


def test_distances_are_what_they_say_and_zero_rows_lie_at_no_angle() -> None:
    rows = [
        torch.tensor([1.0, 0.0, 0.0]),
        torch.tensor([0.0, 2.0, 0.0]),
        torch.zeros(3),
        torch.tensor([-3.0, 0.0, 0.0]),
    ]
    angle = clusamp_update_distances(rows, [0, 2], "angle")
    torch.testing.assert_close(angle[:, 0], torch.tensor([0.0, pi / 2, 0.0, pi, 0.0], dtype=torch.float64))
    assert not angle[:, 1].any()
    l2, l1 = (clusamp_update_distances(rows, [1], kind)[:, 0] for kind in ("l2", "l1"))
    torch.testing.assert_close(l2, torch.tensor([5**0.5, 0, 2, 13**0.5, 2], dtype=torch.float64))
    torch.testing.assert_close(l1, torch.tensor([3.0, 0, 2, 5, 2], dtype=torch.float64))


def test_nearly_parallel_updates_give_an_angle_and_not_nan() -> None:
    row = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    angles = clusamp_update_distances([row, row * 3, -row], [0], "angle")[:, 0]
    assert torch.isfinite(angles).all()
    torch.testing.assert_close(angles[:3], torch.tensor([0, 0, pi], dtype=torch.float64), atol=1e-6, rtol=0)


def test_clients_without_samples_are_never_drawn_and_others_by_their_samples() -> None:
    with build_small_run("clusamp", {}).engine_closed() as experiment:
        server, context = experiment.rounds.parts.server, experiment.rounds.context
        sizes = [0, 5, 40, 1, 10, 0, 12, 4]
        object.__setattr__(context, "num_examples", sizes.__getitem__)
        drawn = np.zeros(8)
        for number in range(800):
            for client in server.sample_clients(number):
                drawn[client] += 1
        assert not drawn[[0, 5]].any()
        np.testing.assert_allclose(drawn / 800, 4 * np.array(sizes) / sum(sizes), atol=0.09)


def test_similar_clients_are_not_drawn_together() -> None:
    """Four kinds of clients, two of each, all of one size: every round asks one of each kind."""
    with build_small_run("clusamp", {}).engine_closed() as experiment:
        server, layout = experiment.rounds.parts.server, experiment.layout
        object.__setattr__(experiment.rounds.context, "num_examples", lambda client: 10)
        row = server.bank.rows[0].clone()
        updates = []
        for client in range(8):
            answer = row.clone()
            answer[client % 4] += 1.0 + 0.1 * client
            updates.append(ClientUpdate(ClientTask(client, row), answer, num_examples=10, loss=1.0, steps=1))
        server.dispatch(0, list(range(8)))
        server.aggregate(0, iter(updates))
        assert layout.trainable > 4
        groups = {tuple(sorted(client % 4 for client in server.sample_clients(number))) for number in range(1, 30)}
        assert groups == {(0, 1, 2, 3)}
        assert len({tuple(sorted(server.sample_clients(number))) for number in range(1, 30)}) > 4, (
            "which of a kind is random"
        )


def test_a_client_drawn_twice_is_asked_once_and_counts_twice() -> None:
    with build_small_run("clusamp", {}).engine_closed() as experiment:
        server, engine = experiment.rounds.parts.server, experiment.engine
        jobs = list(server.dispatch(0, [2, 5, 2]))
        assert [job.client_id for job in jobs] == [2, 5]
        mean, rows = WeightedMean(experiment.layout), [update.row.clone() for update in engine.train(in_round(0, jobs))]
        mean.add(rows[0], 2)
        mean.add(rows[1], 1)
        expected = rows[0].clone()
        mean.write_to(expected)
        server.aggregate(0, engine.train(in_round(0, jobs)))
        torch.testing.assert_close(server.global_model(), expected, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_control_variates_stay_true_where_a_client_is_drawn_twice() -> None:
    federation = SmallFederatedDataset(sizes=dict.fromkeys(range(1, 8), 4))
    with build_small_run("clusamp+scaffold", {}).engine_closed() as experiment:
        object.__setattr__(experiment.rounds.context, "num_examples", federation.num_examples)
        asked = []
        for number in range(4):
            asked.append(experiment.rounds.run_round(number)["clients"])
            homes = experiment.engine.client_states
            total = sum(homes.get(client)["c"].double() for client in homes.client_ids())
            c = experiment.rounds.parts.extras.c.double()
            torch.testing.assert_close(c, total / 8, rtol=1e-5, atol=1e-7)
        assert min(asked) < 4, "nobody was drawn twice in this test"


def test_what_it_knows_of_clients_is_kept() -> None:
    """Client by client: the updates of a saved server are those of the one that goes on from it."""
    with build_small_run("clusamp", {}).engine_closed() as experiment:
        for number in range(3):
            experiment.rounds.run_round(number)
        state = experiment.state_dict()
        with build_small_run("clusamp", {}).engine_closed() as other:
            other.load_state_dict(state)
            mine, theirs = experiment.rounds.parts.server, other.rounds.parts.server
            assert sorted(mine.G) == sorted(theirs.G) != []
            assert torch.equal(mine.distances, theirs.distances)
            assert [mine.sample_clients(n) for n in range(3, 20)] == [theirs.sample_clients(n) for n in range(3, 20)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("distance", ["l1", "l2"])
def test_it_keeps_the_contract_with_other_distances(distance: str) -> None:
    check_method("clusamp", {"clusamp": {"distance": distance}})


def test_a_round_of_all_clients_may_still_leave_some_out() -> None:
    finished = small_run("clusamp", {}, clients_per_round=8)
    assert all(1 <= record["clients"] <= 8 for record in finished.records)
    assert {record["clients"] for record in finished.records} != {8}
