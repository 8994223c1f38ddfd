"""Tests of FedMR's secure exchange in one process."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom import ClientUpdate
from fedloom.core.layout import model_digest
from fedloom.errors import InputError
from fedloom.methods._support import layer_exchange
from fedloom.methods._support.layer_exchange import LayerExchangeClient, exchange_layers_until_mixed
from fedloom.methods.fedmr import FedMROptions, FedMRServer
from fedloom.testing import CHECKS
from fedloom.testing.fixtures import batch_norm_network, simple_network, small_run
from tests.support.fedmr_servers import GRANULARITIES, NETWORKS, ROUNDS, combined, gathered, make, quick
from tests.support.many_models import COUNTS, SEEDS, Network, random_rows


class Censor(LayerExchangeClient):
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
        patch.setattr(layer_exchange, "LayerExchangeClient", Censor)
        server.combine(0, v, w)
    for entry in server.context.layout.entries:
        assert bool((w[:, entry.columns] == 7).all()), f"{entry.name} went past the participants"


def test_after_the_exchange_the_uploaded_models_are_never_looked_at() -> None:
    """Neither dispatching, nor deploying, nor the state that is saved holds them."""
    server = make(4, secure=True)
    jobs = list(server.dispatch(0, [3, 1, 0, 2]))
    rows = random_rows(server, 0)
    server.aggregate(0, iter([ClientUpdate(job, rows[job.model_index], 1, 1.0, 1) for job in jobs]))
    deployed, models = model_digest(server.global_model()), model_digest(server.models())
    server._uploaded.rows.fill_(torch.nan)
    assert model_digest(server.global_model()) == deployed
    assert model_digest(server.models()) == models
    assert [model_digest(job.row) for job in server.dispatch(1, [0, 1, 2, 3])] == [
        model_digest(row) for row in server.models()
    ]
    assert list(server.state_dict()) == ["bank"]
    server.aggregate(1, iter([ClientUpdate(job, rows[job.model_index], 1, 1.0, 1) for job in jobs]))
    assert server.context.layout.is_finite(server.global_model())


def test_send_probability_zero_keeps_everything_and_one_does_not() -> None:
    kept, sent = make(4, secure=True, send_probability=0), make(4, secure=True, send_probability=1)
    v = random_rows(kept, 0)
    assert all(model_digest(combined(kept, round, v)) == model_digest(v) for round in range(10))
    assert any(model_digest(combined(sent, round, v)) != model_digest(v) for round in range(10))


def test_a_secure_run_that_never_sends_is_indep() -> None:
    options = {"fedmr": {"secure": True, "send_probability": 0}}
    assert small_run("fedmr", options).digest == small_run("indep", {}).digest


def test_a_lost_client_takes_no_part_in_the_exchange() -> None:
    """Nobody is there to send its layers, and nobody may send any to it."""
    server = make(4, secure=True, send_probability=0.9)
    server.bank.rows[:] = before = random_rows(server, 0)
    jobs, rows = list(server.dispatch(0, [0, 1, 2, 3])), random_rows(server, 1)
    server.aggregate(
        0, iter([ClientUpdate(job, rows[job.model_index], 1, 1.0, 1) for job in jobs if job.model_index != 1])
    )
    assert model_digest(server.bank.rows[1]) == model_digest(before[1])
    others = [0, 2, 3]
    for columns in server._layers:
        assert sorted(gathered(server.bank.rows[others], columns)) == sorted(gathered(rows[others], columns))
    server.aggregate(1, iter([ClientUpdate(job, rows[job.model_index], 1, 1.0, 1) for job in jobs]))
    assert not server.absent


@quick
@given(st.integers(3, 5), SEEDS, ROUNDS)
def test_mixed_models_are_nobody_s_whole(count: int, seed: int, round: int) -> None:
    server = make(count, batch_norm_network, seed, secure=True, mixed=True)
    v = random_rows(server, seed)
    w = combined(server, round, v)
    assert not {model_digest(row) for row in w} & {model_digest(row) for row in v}
    for columns in server._layers:
        assert sorted(gathered(w, columns)) == sorted(gathered(v, columns))


def test_mixed_changes_nothing_where_models_are_mixed_already() -> None:
    plain, mixed = make(4, secure=True), make(4, secure=True, mixed=True)
    v = random_rows(plain, 0)
    same = 0
    for round in range(20):
        once, again = combined(plain, round, v), combined(mixed, round, v)
        if {model_digest(row) for row in once} & {model_digest(row) for row in v}:
            assert model_digest(once) != model_digest(again)
        else:
            same += 1
            assert model_digest(once) == model_digest(again)
    assert 0 < same < 20


def test_where_twelve_exchanges_do_not_mix_two_layers_clients_begin_anew() -> None:
    """With five clients and two layers that is one round in twenty."""
    server = make(5, simple_network, secure=True, mixed=True)
    v, again = random_rows(server, 0), 0
    models = {i: [row[part].clone() for part in (slice(0, 1), slice(1, 2))] for i, row in enumerate(v)}
    for round in range(60):
        w = combined(server, round, v)
        assert not {model_digest(row) for row in w} & {model_digest(row) for row in v}
        again += (
            exchange_layers_until_mixed(models, partial(server.context.rng_streams.numpy, round=round), 0.5) is None
        )
    assert again, "in none of these rounds were twelve exchanges too few"


def test_models_that_are_never_mixed_are_not_handed_over() -> None:
    server = make(3, secure=True, mixed=True, send_probability=1e-9)
    server.bank.rows[:] = before = random_rows(server, 0)
    jobs, rows = list(server.dispatch(0, [0, 1, 2])), random_rows(server, 1)
    server.aggregate(0, iter([ClientUpdate(job, rows[job.model_index], 1, 1.0, 1) for job in jobs]))
    assert model_digest(server.models()) == model_digest(before)
    assert server.diagnostics() == {"exchange given up": 1.0}
    server.aggregate(1, iter(()))
    assert server.diagnostics() == {}
    server.aggregate(2, iter([ClientUpdate(jobs[1], rows[1], 1, 1.0, 1)]))  # alone it has nobody to mix with
    assert model_digest(server.models()[1]) == model_digest(rows[1])
    assert server.diagnostics() == {}


def test_options_of_an_exchange_that_is_off_are_told_to_do_nothing() -> None:
    for options in ({}, {"secure": True, "mixed": True, "send_probability": 0.9}):
        assert make(3, **options).notes() == []
    idle = {"mixed": True, "send_probability": 0.9, "exchange_before": "training"}
    assert make(3, **idle).notes() == [
        f"fedmr.{name} has no effect: it needs the secure exchange, and fedmr.secure is off."
        for name in ("send_probability", "mixed", "exchange_before")
    ]


def test_one_layer_cannot_be_mixed() -> None:
    with pytest.raises(InputError, match=r"fedmr.mixed needs at least two layers; with segment:1 this model has one"):
        make(3, secure=True, mixed=True, granularity="segment:1")


def test_what_clients_have_exchanged_is_taken_as_it_comes() -> None:
    server = make(4, secure=True)
    rows = random_rows(server, 0)
    for exchanged in (True, False):
        jobs = server.dispatch(0, [0, 1, 2, 3])
        server.aggregate(
            0, iter([ClientUpdate(job, rows[job.model_index], 1, 1.0, 1, exchanged=exchanged) for job in jobs])
        )
        assert (model_digest(server.models()) == model_digest(rows)) == exchanged


def test_clients_exchange_only_where_it_is_asked_for() -> None:
    server = make(4)
    assert FedMRServer.layer_exchange(server.context.layout, FedMROptions(), 5) is None
    staged = FedMROptions(secure=True, first_stage=2, send_probability=0.3, mixed=True)
    assert FedMRServer.layer_exchange(server.context.layout, staged, 1) is None
    plan = FedMRServer.layer_exchange(server.context.layout, staged, 2)
    assert plan is not None
    assert (plan.layers, plan.send_probability, plan.mixed) == (server._layers, 0.3, True)
    assert not plan.before_training


# The exchange before training


@quick
@given(COUNTS, NETWORKS, SEEDS, GRANULARITIES, ROUNDS)
def test_before_training_clients_exchange_what_they_received(
    count: int, network: Network, seed: int, granularity: str, round: int
) -> None:
    """The exchange that comes before the upload otherwise, of the server's models; what comes back is kept."""
    given_ = {"granularity": granularity, "secure": True}
    before, after = make(count, network, seed, **given_, exchange_before="training"), make(count, network, **given_)
    before.bank.rows[:] = v = random_rows(before, seed)
    jobs = list(before.dispatch(round, list(range(count))))
    assert model_digest(before.models()) == model_digest(v), "the server's own models stay until the updates come"
    sent = torch.stack([job.row for job in jobs])
    for columns in before._layers:
        assert sorted(gathered(sent, columns)) == sorted(gathered(v, columns))
    after.context = before.context  # the same draws
    assert model_digest(sent) == model_digest(combined(after, round, v))
    rows = random_rows(before, seed + 1)
    before.aggregate(round, iter([ClientUpdate(job, rows[job.model_index], 1, 1.0, 1) for job in jobs]))
    assert model_digest(before.models()) == model_digest(rows)


def test_before_training_a_lost_client_leaves_the_servers_model() -> None:
    server = make(3, secure=True, exchange_before="training")
    server.bank.rows[:] = before = random_rows(server, 0)
    jobs, rows = list(server.dispatch(0, [0, 1, 2])), random_rows(server, 1)
    server.aggregate(0, iter([ClientUpdate(job, rows[job.model_index], 1, 1.0, 1) for job in jobs[:2]]))
    assert model_digest(server.models()) == model_digest(torch.stack([rows[0], rows[1], before[2]]))


def test_before_training_nothing_is_exchanged_in_the_first_stage() -> None:
    server = make(4, secure=True, exchange_before="training", first_stage=2, send_probability=1)
    server.bank.rows[:] = before = random_rows(server, 0)
    for round in (0, 1):
        assert all(torch.equal(job.row, before[job.model_index]) for job in server.dispatch(round, [0, 1, 2, 3]))
    assert any(not torch.equal(job.row, before[job.model_index]) for job in server.dispatch(2, [0, 1, 2, 3]))


def test_before_training_models_that_are_not_mixed_are_sent_as_they_are() -> None:
    server = make(3, secure=True, mixed=True, send_probability=1e-9, exchange_before="training")
    server.bank.rows[:] = before = random_rows(server, 0)
    jobs = list(server.dispatch(0, [0, 1, 2]))
    assert all(torch.equal(job.row, before[job.model_index]) for job in jobs)
    server.aggregate(0, iter([ClientUpdate(job, job.row, 1, 1.0, 1) for job in jobs]))
    assert server.diagnostics() == {"exchange given up": 1.0}


def test_before_training_a_run_that_never_sends_is_indep() -> None:
    options = {"fedmr": {"secure": True, "send_probability": 0, "exchange_before": "training"}}
    assert small_run("fedmr", options).digest == small_run("indep", {}).digest


@pytest.mark.parametrize("check", ["engines agree", "resumes exactly"])
def test_before_training_runs_are_exact(check: str) -> None:
    CHECKS[check]("fedmr", {"fedmr": {"secure": True, "exchange_before": "training"}})
