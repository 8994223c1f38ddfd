"""Tests of FedMR: layers change models, and equality with other methods."""

from collections import Counter
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom import ClientTask, ClientUpdate, Layout
from fedloom.core.layout import model_digest
from fedloom.errors import InputError
from fedloom.methods import compose
from fedloom.methods.fedmr import fedmr_layer_columns
from fedloom.testing import CHECKS
from fedloom.testing.fixtures import batch_norm_network, build_small_run, simple_network, small_run
from tests.support.fedmr_servers import (
    GRANULARITIES,
    NETWORKS,
    ROUNDS,
    combined,
    gathered,
    make,
    marked_rows,
    quick,
    sources,
    ten_layers,
)
from tests.support.many_models import COUNTS, SEEDS, Network, random_rows
from tests.support.task_rounds import in_round

# What recombination keeps


@settings(deadline=None, max_examples=60)
@given(COUNTS, NETWORKS, SEEDS, GRANULARITIES, st.booleans(), ROUNDS)
def test_every_layer_instance_is_used_exactly_once(
    count: int, network: Network, seed: int, granularity: str, secure: bool, round: int
) -> None:
    """Bit for bit, and so the mean and the spread about any x stay as well, to rounding."""
    server = make(count, network, seed, granularity=granularity, secure=secure)
    v = random_rows(server, seed)
    w, floats = combined(server, round, v), server.context.layout.floats
    for columns in server._layers:
        assert sorted(gathered(w, columns)) == sorted(gathered(v, columns))
    old, new = v[:, :floats].double(), w[:, :floats].double()
    torch.testing.assert_close(new.mean(0), old.mean(0), rtol=1e-12, atol=1e-12)
    x = torch.randn(floats, generator=torch.Generator().manual_seed(seed + 1)).double()
    torch.testing.assert_close((new - x).square().sum(), (old - x).square().sum(), rtol=1e-12, atol=1e-9)


@quick
@given(COUNTS, NETWORKS, SEEDS, st.booleans())
def test_the_deployed_mean_stays_to_rounding(count: int, network: Network, seed: int, secure: bool) -> None:
    server = make(count, network, seed, secure=secure)
    v = random_rows(server, seed)
    floats = server.context.layout.floats
    for rows in (v, combined(server, 0, v)):
        server.bank.rows[:] = rows
        torch.testing.assert_close(
            server.global_model()[:floats].double(), v[:, :floats].double().mean(0), atol=1e-6, rtol=1e-5
        )


@quick
@given(COUNTS, NETWORKS, SEEDS, st.sampled_from(["module", "segment:0.5", "segment:0.3"]), st.booleans(), ROUNDS)
def test_tensors_of_one_module_have_one_source(
    count: int, network: Network, seed: int, granularity: str, secure: bool, round: int
) -> None:
    """A running mean stays with its variance, its counter and its weights."""
    server = make(count, network, seed, granularity=granularity, secure=secure)
    by_unit: dict[str, set[tuple[int, ...]]] = {}
    for entry, source in zip(server.context.layout.entries, sources(server, round), strict=True):
        assert sorted(source) == list(range(count))
        by_unit.setdefault(entry.layer, set()).add(tuple(source))
    assert all(len(found) == 1 for found in by_unit.values())


def test_by_tensor_even_those_of_one_module_part() -> None:
    """As in the authors' code, where a running mean can meet another client's variance."""
    server = make(4, granularity="tensor")
    names = [entry.name for entry in server.context.layout.entries]
    apart = Counter[str]()
    for round in range(30):
        found = dict(zip(names, sources(server, round), strict=True))
        apart["weight and bias"] += found["0.weight"] != found["0.bias"]
        apart["mean and variance"] += found["1.running_mean"] != found["1.running_var"]
        apart["mean and counter"] += found["1.running_mean"] != found["1.num_batches_tracked"]
    assert all(apart[pair] > 15 for pair in ("weight and bias", "mean and variance", "mean and counter")), apart


@pytest.mark.parametrize("secure", [False, True])
def test_each_layer_draws_for_itself_and_each_round_anew(secure: bool) -> None:
    servers = [make(5, simple_network, seed, secure=secure) for seed in range(5)]
    draws = [[tuple(map(tuple, sources(server, round))) for round in range(4)] for server in servers]
    assert any(rows[0] != rows[2] for draw in draws for rows in draw), "the two modules have draws of their own"
    assert all(len(set(draw)) > 1 for draw in draws), "rounds differ"
    assert len({tuple(draw) for draw in draws}) == len(draws), "seeds differ"


def test_all_permutations_are_equally_likely() -> None:
    server = make(3, simple_network)
    rounds, marked, w = 1200, marked_rows(server), torch.zeros(3, server.context.layout.size)
    pairs = Counter[tuple[tuple[float, ...], tuple[float, ...]]]()
    for round in range(rounds):
        server.combine(round, marked, w)
        pairs[tuple(w[:, 0].tolist()), tuple(w[:, server.context.layout.trainable - 1].tolist())] += 1
    singles = Counter[tuple[float, ...]]()
    for (first, _), times in pairs.items():
        singles[first] += times
    assert len(singles) == 6
    assert all(150 < times < 250 for times in singles.values()), "200 expected, with a deviation of 13"
    assert len(pairs) == 36, "each with each: the layers are independent"
    assert max(pairs.values()) < 65, "33 expected, with a deviation of 6"


@quick
@given(NETWORKS, SEEDS, GRANULARITIES, st.booleans(), ROUNDS)
def test_one_model_alone_stays_as_it_is(
    network: Network, seed: int, granularity: str, secure: bool, round: int
) -> None:
    server = make(1, network, seed, granularity=granularity, secure=secure)
    v = random_rows(server, seed)
    assert model_digest(combined(server, round, v)) == model_digest(v)


# What a layer is


@quick
@given(COUNTS, NETWORKS, SEEDS, st.sampled_from(["segment:1", "segment:1.0", "segment:1/1"]), ROUNDS)
def test_one_segment_permutes_whole_models(
    count: int, network: Network, seed: int, granularity: str, round: int
) -> None:
    server = make(count, network, seed, granularity=granularity)
    v = random_rows(server, seed)
    assert sorted(model_digest(row) for row in combined(server, round, v)) == sorted(model_digest(row) for row in v)


@pytest.mark.parametrize(
    ("granularity", "sizes"),
    [
        ("segment:0.25", [2, 3, 2, 3]),
        ("segment:0.5", [5, 5]),
        ("segment:0.1", [1] * 10),
        ("segment:0.7", [7, 3]),
        ("segment:0.3", [3, 3, 3, 1]),
        ("segment:1/3", [3, 3, 4]),
        ("segment:0.01", [1] * 10),
        ("segment:1", [10]),
        ("module", [1] * 10),
    ],
)
def test_segments_as_the_paper_counts_them(granularity: str, sizes: list[int]) -> None:
    """Ten layers, of a weight and a bias each."""
    assert [len(columns) for columns in fedmr_layer_columns(Layout.of(ten_layers()), granularity)] == [
        2 * size for size in sizes
    ]


def test_a_norm_without_weights_is_in_the_segment_of_its_neighbours() -> None:
    norms = [nn.BatchNorm1d(4, affine=False) for _ in range(2)]
    layout = Layout.of(nn.Sequential(nn.Linear(2, 4), norms[0], nn.Linear(4, 4), norms[1]))
    owners = {entry.columns.start: entry.layer for entry in layout.entries}
    found = [{owners[part.start] for part in columns} for columns in fedmr_layer_columns(layout, "segment:0.5")]
    assert found == [{"0", "1"}, {"2", "3"}]


@quick
@given(st.integers(1, 12), st.integers(1, 100))
def test_segments_are_consecutive_and_at_most_one_more_than_one_over_x(count: int, percent: int) -> None:
    layout = Layout.of(nn.Sequential(*(nn.Linear(1, 1) for _ in range(count))))
    found = fedmr_layer_columns(layout, f"segment:{percent / 100}")
    assert [part for columns in found for part in columns] == [
        part for unit in layout.layer_columns().values() for part in unit
    ]
    index = [ceil(100 * j / (percent * count)) for j in range(1, count + 1)]  # ceil(j / (x N)), in whole numbers
    assert [len(columns) // 2 for columns in found] == list(Counter(index).values())
    assert len(found) <= ceil(100 / percent)


@quick
@given(NETWORKS, GRANULARITIES)
def test_layers_cover_a_model_once(network: Network, granularity: str) -> None:
    layout = Layout.of(network())
    covered = Counter(
        column
        for columns in fedmr_layer_columns(layout, granularity)
        for part in columns
        for column in range(part.start, part.stop)
    )
    wanted = [column for entry in layout.entries for column in range(entry.columns.start, entry.columns.stop)]
    assert sorted(covered) == sorted(wanted)
    assert set(covered.values()) == {1}


def test_by_tensor_there_are_as_many_layers_as_entries() -> None:
    layout = Layout.of(batch_norm_network())
    assert len(fedmr_layer_columns(layout, "tensor")) == len(batch_norm_network().state_dict()) == 9
    assert len(fedmr_layer_columns(layout, "module")) == 3


@pytest.mark.parametrize(
    "granularity",
    [
        "modules",
        "Module",
        "layer",
        "segment",
        "segment:",
        "segment:0",
        "segment:-1",
        "segment:1.5",
        "segment:half",
        "segment:nan",
        "segment:inf",
        "segment:1/0",
        "segment:0.5:1",
        "tensor:0.5",
    ],
)
def test_other_granularities_are_refused(granularity: str) -> None:
    with pytest.raises(
        InputError, match=r"fedmr.granularity.*module, tensor or segment:x with x above 0 and at most 1"
    ):
        compose("fedmr", {"fedmr": {"granularity": granularity}})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"first_stage": -1}, "fedmr.first_stage must be greater than or equal to 0, not -1"),
        ({"send_probability": 1.5}, "fedmr.send_probability must be less than or equal to 1, not 1.5"),
        ({"send_probability": -0.5}, "fedmr.send_probability must be greater than or equal to 0, not -0.5"),
        ({"secure": "perhaps"}, "fedmr.secure must be"),
        ({"exchange_before": "testing"}, "fedmr.exchange_before must be 'upload' or 'training', not 'testing'"),
        ({"mixed": True, "send_probability": 0}, "fedmr.mixed.* where nothing is sent"),
        ({"granularty": "module"}, "did you mean 'granularity'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        compose("fedmr", {"fedmr": options})


def test_indep_has_no_options() -> None:
    with pytest.raises(InputError, match="indep has no options"):
        compose("indep", {"indep": {"first_stage": 1}})


# The first stage


@quick
@given(COUNTS, NETWORKS, SEEDS, st.booleans())
def test_in_the_first_stage_all_models_become_their_mean(count: int, network: Network, seed: int, secure: bool) -> None:
    server = make(count, network, first_stage=2, secure=secure)
    floats, v = server.context.layout.floats, random_rows(server, seed)
    for round in range(2):
        w = combined(server, round, v)
        assert len({model_digest(row) for row in w}) == 1
        torch.testing.assert_close(w[0, :floats], v[:, :floats].mean(0), rtol=1e-5, atol=1e-6)
    assert sorted(gathered(combined(server, 2, v), server._layers[0])) == sorted(gathered(v, server._layers[0]))


@pytest.mark.parametrize(
    "settings",
    [{}, {"failure_rate": 0.3}, {"model": simple_network, "clients_per_round": 3}, {"rounds": 2, "seed": 5}],
)
def test_runs_within_the_first_stage_are_uniform_fedavg(settings: dict[str, Any]) -> None:
    """Bit for bit: the same clients, in the same order, through the same mean; equal models are their own mean.

    Models of clients that failed have no part in it.
    """
    staged = small_run("fedmr", {"fedmr": {"first_stage": 4}}, **settings)
    assert staged.digest == small_run("fedavg", {"fedavg": {"weighting": "uniform"}}, **settings).digest


def test_and_after_it_they_are_not() -> None:
    uniform = small_run("fedavg", {"fedavg": {"weighting": "uniform"}})
    assert small_run("fedmr", {"fedmr": {"first_stage": 2}}).digest != uniform.digest


# Models that never meet


def played(method: str, rounds: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The deployed model and all models after some rounds of training."""
    with build_small_run(
        method, {method: options} if options else {}, model=simple_network
    ).engine_closed() as experiment:
        for round in range(rounds):
            experiment.rounds.run_round(round)
        server, floats = experiment.rounds.parts.server, experiment.layout.floats
        return server.global_model()[:floats].clone(), server.models()[:, :floats].clone()


def test_whole_models_that_change_places_are_indep_for_one_round_only() -> None:
    """After the first round `segment:1` has indep's models in other slots, so the same mean.

    In the next round slot i goes to the same client in both, but holds another model: models meet clients they would
    not have met. Each alone it is a fair draw of indep, which draws clients at random itself; bit by bit it is not.
    """
    first, models = played("fedmr", 1, granularity="segment:1")
    alone, wanted = played("indep", 1)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6)
    assert sorted(map(model_digest, models)) == sorted(map(model_digest, wanted))
    assert not torch.equal(models, wanted), "with this seed the places do change"
    later, _ = played("fedmr", 2, granularity="segment:1")
    assert not torch.allclose(later, played("indep", 2)[0], rtol=1e-3, atol=1e-3)


def test_indep_keeps_what_comes_back() -> None:
    with build_small_run("indep", {}).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        jobs = list(server.dispatch(0, server.sample_clients(0)))
        rows = [
            update.row.clone()
            for update in experiment.engine.train(in_round(0, jobs))
            if isinstance(update, ClientUpdate)
        ]
        server.aggregate(0, iter([ClientUpdate(j, r, 1, 0.0, 1) for j, r in zip(jobs, rows, strict=True)]))
        assert [model_digest(row) for row in server.models()] == [model_digest(row) for row in rows]
        assert len({model_digest(row) for row in rows}) == len(rows)


def test_each_of_indeps_models_is_trained_by_the_clients_it_visits_one_after_the_other() -> None:
    with build_small_run("indep", {}, model=simple_network).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        alone = [experiment.rounds.context.initial.clone() for _ in range(4)]
        for round in range(3):
            for slot, client in enumerate(server.sample_clients(round)):
                (update,) = experiment.engine.train(in_round(round, [ClientTask(client, alone[slot])]))
                assert isinstance(update, ClientUpdate)
                alone[slot] = update.row.clone()
        for round in range(3):
            experiment.rounds.run_round(round)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(server.models(), alone, strict=True))


# Whole runs


def test_the_options_do_something() -> None:
    runs = [{}, {"granularity": "tensor"}, {"granularity": "segment:0.5"}, {"first_stage": 1}, {"secure": True}]
    runs += [{"secure": True, "send_probability": 0.9}, {"secure": True, "exchange_before": "training"}]
    assert len({small_run("fedmr", {"fedmr": options}).digest for options in runs}) == len(runs)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("check", ["engines agree", "resumes exactly"])
def test_with_the_clients_of_scaffold(check: str, secure: bool) -> None:
    CHECKS[check]("fedmr+scaffold", {"fedmr": {"secure": secure}})


def test_a_lost_client_leaves_its_model_to_be_recombined() -> None:
    server = make(3)
    server.bank.rows[:] = before = random_rows(server, 0)
    jobs, rows = list(server.dispatch(0, [0, 1, 2])), random_rows(server, 1)
    server.aggregate(
        0, iter([ClientUpdate(job, rows[job.model_index], 1, 1.0, 1) for job in jobs if job.model_index != 1])
    )
    wanted = combined(server, 0, torch.stack([rows[0], before[1], rows[2]]))
    assert model_digest(server.bank.rows) == model_digest(wanted)
