"""FedMR: layers change their models and nothing else, and its place among the other methods."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom import Job, Layout, Update
from fedloom.banks import Bank
from fedloom.errors import InputError
from fedloom.methods import Context, compose, recombination
from fedloom.methods.fedmr import FedMROptions, FedMRServer, layers
from fedloom.methods.recombination import Participant
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


def ten_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(10)))


Network = Callable[[], nn.Module]
NETWORKS = st.sampled_from([plain_network, normed_network, Loose, ten_layers])
COUNTS = st.integers(1, 6)
ROUNDS = st.integers(0, 1000)
SEEDS = st.integers(0, 2**32 - 1)
GRANULARITIES = st.sampled_from(["module", "tensor", "segment:1", "segment:0.5", "segment:0.25", "segment:1/3"])
quick = settings(deadline=None, max_examples=30)


@lru_cache(maxsize=1)
def some_context() -> Context:
    with small_experiment("fedavg", {}).engine_closed() as experiment:
        return experiment.rounds.context


def make(count: int, network: Network = normed_network, seed: int = 0, **options: Any) -> FedMRServer:
    """A server of `count` models of a network."""
    with Streams(0).globally("init"):
        module = network()
    layout = Layout.of(module)
    own = {"layout": layout, "initial": layout.read(module), "per_round": count, "streams": Streams(seed)}
    context = replace(some_context(), **own, make_bank=partial(Bank.memory, dtype=layout.dtype))
    return FedMRServer(context, FedMROptions(**options))


def random_rows(server: FedMRServer, seed: int) -> Tensor:
    """Models as clients may return them, integers and all."""
    layout, generator = server.context.layout, torch.Generator().manual_seed(seed)
    rows = torch.zeros(server.context.per_round, layout.size)
    rows[:, : layout.floats] = torch.randn(len(rows), layout.floats, generator=generator)
    for row in rows:
        for integers in layout.views(row, Kind.INTEGER):
            integers.copy_(torch.randint(1000, integers.shape, generator=generator))
    return rows


def marked_rows(server: FedMRServer) -> Tensor:
    """Models that say in every number which of them it is."""
    layout = server.context.layout
    rows = torch.zeros(server.context.per_round, layout.size)
    for number, row in enumerate(rows):
        for entry in layout.entries:
            entry.view(row).fill_(number)
    return rows


def combined(server: FedMRServer, round: int, v: Tensor) -> Tensor:
    """The new models, with a look at whether the old ones stay and every number is written."""
    before = digest(v)
    w, other = torch.zeros_like(v), torch.full_like(v, torch.nan)
    server.combine(round, v, w)
    server.combine(round, v, other)
    assert digest(v) == before, "the uploaded models were changed"
    for entry in server.context.layout.entries:
        assert torch.equal(w[:, entry.columns], other[:, entry.columns]), "the same round gives the same, everywhere"
    return w


def sources(server: FedMRServer, round: int) -> list[list[int]]:
    """For each tensor, the model that each model has it from."""
    w = combined(server, round, marked_rows(server))
    found = []
    for entry in server.context.layout.entries:
        values = [entry.view(row).unique().tolist() for row in w]
        assert all(len(value) == 1 for value in values), f"{entry.name} was torn apart"
        found.append([int(value[0]) for value in values])
    return found


def gathered(rows: Tensor, columns: list[slice]) -> list[bytes]:
    return [torch.cat([row[part] for part in columns]).numpy().tobytes() for row in rows]


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
    for columns in server.layers:
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
            server.deploy()[:floats].double(), v[:, :floats].double().mean(0), atol=1e-6, rtol=1e-5
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
        by_unit.setdefault(entry.unit, set()).add(tuple(source))
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
    servers = [make(5, plain_network, seed, secure=secure) for seed in range(5)]
    draws = [[tuple(map(tuple, sources(server, round))) for round in range(4)] for server in servers]
    assert any(rows[0] != rows[2] for draw in draws for rows in draw), "the two modules have draws of their own"
    assert all(len(set(draw)) > 1 for draw in draws), "rounds differ"
    assert len({tuple(draw) for draw in draws}) == len(draws), "seeds differ"


def test_all_permutations_are_equally_likely() -> None:
    server = make(3, plain_network)
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
    assert digest(combined(server, round, v)) == digest(v)


# What a layer is


@quick
@given(COUNTS, NETWORKS, SEEDS, st.sampled_from(["segment:1", "segment:1.0", "segment:1/1"]), ROUNDS)
def test_one_segment_permutes_whole_models(
    count: int, network: Network, seed: int, granularity: str, round: int
) -> None:
    server = make(count, network, seed, granularity=granularity)
    v = random_rows(server, seed)
    assert sorted(digest(row) for row in combined(server, round, v)) == sorted(digest(row) for row in v)


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
    assert [len(columns) for columns in layers(Layout.of(ten_layers()), granularity)] == [2 * size for size in sizes]


@quick
@given(st.integers(1, 12), st.integers(1, 100))
def test_segments_are_consecutive_and_at_most_one_more_than_one_over_x(count: int, percent: int) -> None:
    layout = Layout.of(nn.Sequential(*(nn.Linear(1, 1) for _ in range(count))))
    found = layers(layout, f"segment:{percent / 100}")
    assert [part for columns in found for part in columns] == [
        part for unit in layout.units().values() for part in unit
    ]
    index = [ceil(100 * j / (percent * count)) for j in range(1, count + 1)]  # ceil(j / (x N)), in whole numbers
    assert [len(columns) // 2 for columns in found] == list(Counter(index).values())
    assert len(found) <= ceil(100 / percent)


@quick
@given(NETWORKS, GRANULARITIES)
def test_layers_cover_a_model_once(network: Network, granularity: str) -> None:
    layout = Layout.of(network())
    covered = Counter(
        column for columns in layers(layout, granularity) for part in columns for column in range(part.start, part.stop)
    )
    wanted = [column for entry in layout.entries for column in range(entry.columns.start, entry.columns.stop)]
    assert sorted(covered) == sorted(wanted)
    assert set(covered.values()) == {1}


def test_by_tensor_there_are_as_many_layers_as_entries() -> None:
    layout = Layout.of(normed_network())
    assert len(layers(layout, "tensor")) == len(normed_network().state_dict()) == 9
    assert len(layers(layout, "module")) == 3


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
        assert len({digest(row) for row in w}) == 1
        torch.testing.assert_close(w[0, :floats], v[:, :floats].mean(0), rtol=1e-5, atol=1e-6)
    assert sorted(gathered(combined(server, 2, v), server.layers[0])) == sorted(gathered(v, server.layers[0]))


@pytest.mark.parametrize("settings", [{}, {"model": plain_network, "per_round": 3}, {"rounds": 2, "seed": 5}])
def test_runs_within_the_first_stage_are_uniform_fedavg(settings: dict[str, Any]) -> None:
    """Bit for bit: the same clients, in the same order, through the same mean; equal models are their own mean."""
    staged = small_run("fedmr", {"fedmr": {"first_stage": 4}}, **settings)
    assert staged.digest == small_run("fedavg", {"fedavg": {"weighting": "uniform"}}, **settings).digest


def test_and_after_it_they_are_not() -> None:
    uniform = small_run("fedavg", {"fedavg": {"weighting": "uniform"}})
    assert small_run("fedmr", {"fedmr": {"first_stage": 2}}).digest != uniform.digest


# Models that never meet


def played(method: str, rounds: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The deployed model and all models after some rounds of training."""
    with small_experiment(
        method, {method: options} if options else {}, model=plain_network
    ).engine_closed() as experiment:
        for round in range(rounds):
            experiment.rounds.play(round)
        server, floats = experiment.rounds.parts.server, experiment.layout.floats
        return server.deploy()[:floats].clone(), server.models()[:, :floats].clone()


def test_whole_models_that_change_places_are_indep_for_one_round_only() -> None:
    """After the first round `segment:1` has indep's models in other slots, so the same mean.

    In the next round slot i goes to the same client in both, but holds another model: models meet clients they would
    not have met. Each alone it is a fair draw of indep, which draws clients at random itself; bit by bit it is not.
    """
    first, models = played("fedmr", 1, granularity="segment:1")
    alone, wanted = played("indep", 1)
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6)
    assert sorted(map(digest, models)) == sorted(map(digest, wanted))
    assert not torch.equal(models, wanted), "with this seed the places do change"
    later, _ = played("fedmr", 2, granularity="segment:1")
    assert not torch.allclose(later, played("indep", 2)[0], rtol=1e-3, atol=1e-3)


def test_indep_keeps_what_comes_back() -> None:
    with small_experiment("indep", {}).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        jobs = list(server.dispatch(0, server.select(0)))
        rows = [update.row.clone() for update in experiment.engine.train(0, jobs) if isinstance(update, Update)]
        server.collect(0, iter([Update(j, r, 1, 0.0, 1) for j, r in zip(jobs, rows, strict=True)]))
        assert [digest(row) for row in server.models()] == [digest(row) for row in rows]
        assert len({digest(row) for row in rows}) == len(rows)


def test_each_of_indeps_models_is_trained_by_the_clients_it_visits_one_after_the_other() -> None:
    with small_experiment("indep", {}, model=plain_network).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        alone = [experiment.rounds.context.initial.clone() for _ in range(4)]
        for round in range(3):
            for slot, client in enumerate(server.select(round)):
                (update,) = experiment.engine.train(round, [Job(client, alone[slot])])
                assert isinstance(update, Update)
                alone[slot] = update.row.clone()
        for round in range(3):
            experiment.rounds.play(round)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(server.models(), alone, strict=True))


# The secure exchange


class Censor(Participant):
    """Hands back sevens in place of every layer, so that whatever else reaches the server shows."""

    def assemble(self) -> list[Tensor]:
        return [torch.full_like(layer, 7.0) for layer in super().assemble()]


@quick
@given(COUNTS, NETWORKS, GRANULARITIES, SEEDS)
def test_what_the_server_gets_comes_from_the_participants_alone(
    count: int, network: Network, granularity: str, seed: int
) -> None:
    server = make(count, network, granularity=granularity, secure=True)
    v, w = random_rows(server, seed), torch.zeros(count, server.context.layout.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recombination, "Participant", Censor)
        server.combine(0, v, w)
    for entry in server.context.layout.entries:
        assert bool((w[:, entry.columns] == 7).all()), f"{entry.name} went past the participants"


def test_after_the_exchange_the_uploaded_models_are_never_looked_at() -> None:
    """Neither dispatching, nor deploying, nor the state that is saved holds them."""
    server = make(4, secure=True)
    jobs = list(server.dispatch(0, [3, 1, 0, 2]))
    rows = random_rows(server, 0)
    server.collect(0, iter([Update(job, rows[job.slot], 1, 1.0, 1) for job in jobs]))
    deployed, models = digest(server.deploy()), digest(server.models())
    server._uploaded.rows.fill_(torch.nan)
    assert digest(server.deploy()) == deployed
    assert digest(server.models()) == models
    assert [digest(job.row) for job in server.dispatch(1, [0, 1, 2, 3])] == [digest(row) for row in server.models()]
    assert list(server.state()) == ["bank"]
    server.collect(1, iter([Update(job, rows[job.slot], 1, 1.0, 1) for job in jobs]))
    assert server.context.layout.is_finite(server.deploy())


def test_send_probability_zero_keeps_everything_and_one_does_not() -> None:
    kept, sent = make(4, secure=True, send_probability=0), make(4, secure=True, send_probability=1)
    v = random_rows(kept, 0)
    assert all(digest(combined(kept, round, v)) == digest(v) for round in range(10))
    assert any(digest(combined(sent, round, v)) != digest(v) for round in range(10))


def test_a_secure_run_that_never_sends_is_indep() -> None:
    options = {"fedmr": {"secure": True, "send_probability": 0}}
    assert small_run("fedmr", options).digest == small_run("indep", {}).digest


def test_a_lost_client_takes_no_part_in_the_exchange() -> None:
    """Nobody is there to send its layers, and nobody may send any to it."""
    server = make(4, secure=True, send_probability=0.9)
    server.bank.rows[:] = before = random_rows(server, 0)
    jobs, rows = list(server.dispatch(0, [0, 1, 2, 3])), random_rows(server, 1)
    server.collect(0, iter([Update(job, rows[job.slot], 1, 1.0, 1) for job in jobs if job.slot != 1]))
    assert digest(server.bank.rows[1]) == digest(before[1])
    others = [0, 2, 3]
    for columns in server.layers:
        assert sorted(gathered(server.bank.rows[others], columns)) == sorted(gathered(rows[others], columns))
    server.collect(1, iter([Update(job, rows[job.slot], 1, 1.0, 1) for job in jobs]))
    assert not server.absent


@quick
@given(st.integers(3, 5), SEEDS, ROUNDS)
def test_mixed_models_are_nobody_s_whole(count: int, seed: int, round: int) -> None:
    server = make(count, normed_network, seed, secure=True, mixed=True)
    v = random_rows(server, seed)
    w = combined(server, round, v)
    assert not {digest(row) for row in w} & {digest(row) for row in v}
    for columns in server.layers:
        assert sorted(gathered(w, columns)) == sorted(gathered(v, columns))


def test_mixed_changes_nothing_where_models_are_mixed_already() -> None:
    plain, mixed = make(4, secure=True), make(4, secure=True, mixed=True)
    v = random_rows(plain, 0)
    same = 0
    for round in range(20):
        once, again = combined(plain, round, v), combined(mixed, round, v)
        if {digest(row) for row in once} & {digest(row) for row in v}:
            assert digest(once) != digest(again)
        else:
            same += 1
            assert digest(once) == digest(again)
    assert 0 < same < 20


def test_one_layer_cannot_be_mixed() -> None:
    with pytest.raises(InputError, match=r"fedmr.mixed needs two layers at least; by segment:1 this model has one"):
        make(3, secure=True, mixed=True, granularity="segment:1")


def test_what_clients_have_exchanged_is_taken_as_it_comes() -> None:
    server = make(4, secure=True)
    server.exchanged_by_clients = True
    v = random_rows(server, 0)
    assert digest(combined(server, 0, v)) == digest(v)


def test_clients_exchange_only_where_it_is_asked_for() -> None:
    server = make(4)
    assert FedMRServer.layer_exchange(server.context.layout, FedMROptions(), 5) is None
    staged = FedMROptions(secure=True, first_stage=2, send_probability=0.3, mixed=True)
    assert FedMRServer.layer_exchange(server.context.layout, staged, 1) is None
    plan = FedMRServer.layer_exchange(server.context.layout, staged, 2)
    assert plan is not None
    assert (plan.layers, plan.send_probability, plan.mixed) == (server.layers, 0.3, True)


# Whole runs


def test_the_options_do_something() -> None:
    runs = [{}, {"granularity": "tensor"}, {"granularity": "segment:0.5"}, {"first_stage": 1}, {"secure": True}]
    runs += [{"secure": True, "send_probability": 0.9}]
    assert len({small_run("fedmr", {"fedmr": options}).digest for options in runs}) == len(runs)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("check", ["engines agree", "resumes exactly"])
def test_with_the_clients_of_scaffold(check: str, secure: bool) -> None:
    CHECKS[check]("fedmr+scaffold", {"fedmr": {"secure": secure}})


def test_a_lost_client_leaves_its_model_to_be_recombined() -> None:
    server = make(3)
    server.bank.rows[:] = before = random_rows(server, 0)
    jobs, rows = list(server.dispatch(0, [0, 1, 2])), random_rows(server, 1)
    server.collect(0, iter([Update(job, rows[job.slot], 1, 1.0, 1) for job in jobs if job.slot != 1]))
    wanted = combined(server, 0, torch.stack([rows[0], before[1], rows[2]]))
    assert digest(server.bank.rows) == digest(wanted)
