"""Tests of FedCDA: cache, selection, and equality with simpler methods."""

import json
import math
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.bank import RowStore
from fedloom.core.layout import TensorKind
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.errors import InputError
from fedloom.methods._support.model_selection import MOST
from fedloom.methods.fedcda import FedCDAOptions, FedCDAServer
from fedloom.runs.build import BuiltRun
from fedloom.testing import check_method
from fedloom.testing.fixtures import build_small_run, simple_network, small_run
from fedloom.utils.storage import join_stored_tensors, split_stored_tensors
from tests.support.many_models import context_of


@pytest.fixture
def experiment() -> Iterator[BuiltRun]:
    with build_small_run("fedcda", {"fedcda": {"warmup": 0, "B": 2}}).engine_closed() as made:
        yield made


def server_of(experiment: BuiltRun) -> FedCDAServer:
    server = experiment.rounds.parts.server
    assert isinstance(server, FedCDAServer)
    return server


def answers(experiment: BuiltRun, clients: list[int], seed: int = 0) -> list[ClientUpdate]:
    """Made-up answers of these clients."""
    layout, server = experiment.layout, server_of(experiment)
    updates = []
    for client in clients:
        generator = torch.Generator().manual_seed(1000 * seed + client)
        row = server.global_model().clone()
        row[: layout.floats] += 0.1 * torch.randn(layout.floats, generator=generator).abs()
        loss = float(torch.rand((), generator=generator))
        updates.append(ClientUpdate(ClientTask(client, server.global_model()), row, 5, loss, 1))
    return updates


def chosen_rows(server: FedCDAServer) -> torch.Tensor:
    return torch.stack([server.store.read(number) for _, number in sorted(server.chosen.items())])


def objective(server: FedCDAServer, rows: torch.Tensor, losses: list[float], L: float) -> float:
    """Eq. 5, on the models themselves."""
    w = rows[:, : server.context.layout.trainable].double()
    return float(np.mean(losses) + L / 2 * (w - w.mean(0)).square().sum(1).mean())


def test_the_global_model_is_the_mean_of_the_chosen_models_of_all_clients_seen(experiment: BuiltRun) -> None:
    server, floats = server_of(experiment), experiment.layout.floats
    for number, clients in enumerate(([0, 1, 2], [2, 3], [1, 4, 0], [3, 2, 1])):
        server.aggregate(number, iter(answers(experiment, clients, number)))
        mean = chosen_rows(server)[:, :floats].double().mean(0)
        torch.testing.assert_close(server.global_model()[:floats].double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(server.total, chosen_rows(server)[:, :floats].double().sum(0), rtol=1e-9, atol=1e-9)
        cached = {number for models in server.cache.values() for number, _ in models}
        assert set(server.chosen.values()) <= cached
        assert all(len(models) <= 3 for models in server.cache.values())


@pytest.mark.parametrize("selection", ["approximate", "newest", "random"])
@pytest.mark.parametrize("warmup", [0, 9])
def test_the_cache_is_the_last_k_answers_of_each_client_oldest_first(selection: str, warmup: int) -> None:
    given = {"fedcda": {"warmup": warmup, "selection": selection, "K": 2}}
    answered: dict[int, list[tuple[torch.Tensor, float]]] = {}
    with build_small_run("fedcda", given).engine_closed() as experiment:
        server = server_of(experiment)
        for number, clients in enumerate(([0, 1], [0, 2], [1, 0], [0, 1], [2, 0])):
            for update in (updates := answers(experiment, clients, number)):
                answered.setdefault(update.client_id, []).append((update.row.clone(), update.loss))
            server.aggregate(number, iter(updates))
        assert set(server.cache) == set(answered)
        for client, models in server.cache.items():
            for (number, loss), (row, wanted) in zip(models, answered[client][-2:], strict=True):
                assert torch.equal(server.store.read(number), row)
                assert loss == wanted


def test_who_does_not_take_part_keeps_cache_and_choice(experiment: BuiltRun) -> None:
    server = server_of(experiment)
    server.aggregate(0, iter(answers(experiment, [0, 1, 2])))
    before = {client: (list(server.cache[client]), server.chosen[client]) for client in (0, 1)}
    server.aggregate(1, iter(answers(experiment, [2, 5], 1)))
    assert {client: (server.cache[client], server.chosen[client]) for client in (0, 1)} == before
    assert 7 not in server.cache, "clients never seen have no part in it"


@pytest.mark.parametrize("selection", ["optimal", "approximate"])
def test_the_choice_is_what_trying_everything_finds(selection: str) -> None:
    """B = 1 against brute force over all combinations, on the models; the approximation is never better."""
    options = {"fedcda": {"warmup": 0, "selection": selection, "B": 3, "L": 5.0}}
    with build_small_run("fedcda", options).engine_closed() as experiment:
        server = server_of(experiment)
        for number in range(3):
            server.aggregate(number, iter(answers(experiment, [0, 1, 2, 3], number)))
        participants = [3, 1, 0]
        for update in answers(experiment, participants, 9):
            server._leave(update.client_id)
            server._cache(update)
        picks = server.choose(3, participants)
        fixed = [server.store.read(number) for number in server.chosen.values()]
        fixed_losses = [dict(server.cache[c])[number] for c, number in server.chosen.items()]

        def value(chosen: tuple[int, ...]) -> float:
            models = [server.cache[c][i] for c, i in zip(participants, chosen, strict=True)]
            rows = torch.stack([*fixed, *(server.store.read(number) for number, _ in models)])
            return objective(server, rows, [*fixed_losses, *(loss for _, loss in models)], 5.0)

        everything = {combination: value(combination) for combination in np.ndindex(3, 3, 3)}
        found = value(tuple(picks[client] for client in participants))
        best = min(everything.values())
        assert found >= best - 1e-9
        if selection == "optimal":
            assert found == pytest.approx(best, rel=1e-9)
        assert best <= value((2, 2, 2)) + 1e-12, "the newest models are one of the combinations"


@given(
    asked=st.integers(1, 80),
    K=st.integers(1, 6),
    B=st.integers(1, 8),
    selection=st.sampled_from(["optimal", "approximate", "newest", "random"]),
    rounds=st.integers(1, 6),
    warmup=st.integers(0, 5),
)
def test_no_batch_has_too_many_combinations(
    asked: int, K: int, B: int, selection: Any, rounds: int, warmup: int
) -> None:
    """`optimal` is refused if it would have; `approximate` takes as few batches as are enough, but at least B."""
    context = context_of(simple_network, asked, rounds=rounds)
    options = FedCDAOptions(K=K, B=B, selection=selection, warmup=warmup)
    models, selects = min(K, rounds), rounds > warmup
    if selection == "optimal" and selects and models**asked > MOST:
        with pytest.raises(InputError, match=rf"would try up to {models}\^{asked} combinations"):
            FedCDAServer(context, options)
        return
    server = FedCDAServer(context, options)
    if selection != "approximate" or not selects:
        return
    batches, enough = server._batches(asked), lambda count: models ** math.ceil(asked / count) <= MOST
    assert enough(batches)
    assert batches == min(B, asked) or (batches > B and not enough(batches - 1))
    assert (f"in {batches} batches instead of {B}" in " ".join(server.notes())) is (batches > B)


def test_it_says_how_far_a_clients_models_lie_apart(experiment: BuiltRun) -> None:
    server, trainable = server_of(experiment), experiment.layout.trainable
    for number in range(2):
        server.aggregate(number, iter(answers(experiment, [0, 1, 2], number)))
    received = server.global_model().clone()
    server.aggregate(2, iter(answers(experiment, [0, 2, 4], 2)))
    shares = []
    for client in (0, 2):  # the other one has a single model
        rows = torch.stack([server.store.read(number) for number, _ in server.cache[client]])[:, :trainable].double()
        variance = (rows - rows.mean(0)).square().sum(1).mean()
        shares.append(float(variance / (rows - received[:trainable]).square().sum(1).mean()))
    assert server.diagnostics()["spread of a client's models"] == pytest.approx(np.mean(shares), rel=1e-6)
    assert 0.0 < np.mean(shares) < 1.0


def test_models_of_a_client_that_are_all_alike_have_no_spread(experiment: BuiltRun) -> None:
    server = server_of(experiment)
    for number in range(2):
        same = answers(experiment, [0, 1])
        for update in same:
            update.row[: experiment.layout.floats] = 0.5 + update.client_id
        server.aggregate(number, iter(same))
    assert server.diagnostics()["spread of a client's models"] == pytest.approx(0.0, abs=1e-9)


@given(L=st.floats(0, 100), shift=st.floats(-5, 5), extra=st.floats(-3, 3), seed=st.integers(0, 50))
@settings(max_examples=15, deadline=None)
def test_moving_all_models_or_the_losses_of_one_client_changes_no_choice(
    L: float, shift: float, extra: float, seed: int
) -> None:
    picks = []
    for moved in (False, True):
        options = {"fedcda": {"warmup": 0, "selection": "optimal", "L": L}}
        with build_small_run("fedcda", options).engine_closed() as experiment:
            server, layout = server_of(experiment), experiment.layout
            generator = torch.Generator().manual_seed(seed)
            rows = torch.rand(12, layout.size, generator=generator, dtype=torch.float64)
            losses = torch.rand(12, generator=generator).tolist()
            offset = torch.full((layout.size,), shift, dtype=torch.float64) if moved else torch.zeros(layout.size)
            for i in range(12):
                client, loss = i % 4, losses[i] + (extra if moved and i % 4 == 2 else 0.0)
                row = (rows[i] + offset).float()
                server._cache(ClientUpdate(ClientTask(client, row), row, 1, loss, 1))
            server.bank.rows[0] = offset.float()
            picks.append(server.choose(0, [0, 1, 2, 3]))
    assert picks[0] == picks[1]


def test_random_takes_any_cached_model_alike() -> None:
    with build_small_run("fedcda", {"fedcda": {"warmup": 0, "selection": "random"}}).engine_closed() as experiment:
        server = server_of(experiment)
        for number in range(3):
            server.aggregate(number, iter(answers(experiment, [0, 1], number)))
        server.aggregate(3, iter(answers(experiment, [2], 3)))
        drawn = [server.choose(round, [0, 1, 2]) for round in range(900)]
        assert drawn[:5] == [server.choose(round, [0, 1, 2]) for round in range(5)]
    assert {picks[2] for picks in drawn} == {0}, "of a client seen once there is one"
    pairs = Counter((picks[0], picks[1]) for picks in drawn)
    assert len(pairs) == 9
    assert all(60 < times < 140 for times in pairs.values()), "100 expected, with a deviation of 9"


def test_without_divergence_the_lowest_loss_wins() -> None:
    with build_small_run("fedcda", {"fedcda": {"warmup": 0, "L": 0.0}}).engine_closed() as experiment:
        server = server_of(experiment)
        for number in range(3):
            server.aggregate(number, iter(answers(experiment, [0, 1, 2], number)))
        for update in answers(experiment, [0, 1, 2], 8):
            server._leave(update.client_id)
            server._cache(update)
        picks = server.choose(3, [0, 1, 2])
        for client, pick in picks.items():
            losses = [loss for _, loss in server.cache[client]]
            assert losses[pick] == min(losses)


@pytest.mark.parametrize("L", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_model_whose_loss_is_not_finite_is_the_last_resort(bad: float, L: float) -> None:
    """An overflow is no low loss; and where all have overflowed the models alone decide."""
    options = {"fedcda": {"warmup": 0, "L": L, "selection": "optimal"}}
    with build_small_run("fedcda", options).engine_closed() as experiment:
        server = server_of(experiment)
        losses = {0: [bad, 2.0, 3.0], 1: [2.0, bad, 3.0], 2: [3.0, 2.0, bad], 3: [bad, bad, bad]}
        for number in range(3):
            for update in answers(experiment, [0, 1, 2, 3], number):
                server._cache(replace(update, loss=losses[update.client_id][number]))
        picks = server.choose(0, [0, 1, 2, 3])
        assert all(np.isfinite(losses[client][picks[client]]) for client in (0, 1, 2))
        if L == 0:
            assert picks == {0: 1, 1: 0, 2: 1, 3: 2}, "the lowest finite loss, or the newest of equals"
        assert json.loads(json.dumps(split_stored_tensors(server.state_dict())[0])), "it can be saved"


def test_one_cached_model_and_everyone_taking_part_is_uniform_fedavg() -> None:
    settings_ = {"clients_per_round": 8}
    ours = small_run("fedcda", {"fedcda": {"K": 1, "warmup": 0}}, **settings_).digest
    assert ours == small_run("fedavg", {"fedavg": {"weighting": "uniform"}}, **settings_).digest


def test_one_cached_model_is_the_newest() -> None:
    one = small_run("fedcda", {"fedcda": {"K": 1, "warmup": 0}}).digest
    assert one == small_run("fedcda", {"fedcda": {"K": 1, "warmup": 0, "selection": "newest"}}).digest
    assert one == small_run("fedcda", {"fedcda": {"K": 3, "warmup": 0, "selection": "newest"}}).digest


def test_warming_up_is_fedavg_or_the_mean_of_the_newest() -> None:
    assert small_run("fedcda", {"fedcda": {"warmup": 4}}).digest == small_run("fedavg", {}).digest
    newest = small_run("fedcda", {"fedcda": {"warmup": 4, "warmup_mode": "newest"}}).digest
    assert newest == small_run("fedcda", {"fedcda": {"warmup": 0, "selection": "newest"}}).digest


@pytest.mark.exhaustive
@pytest.mark.parametrize("selection", ["approximate", "optimal", "newest", "random"])
def test_conformance(selection: str) -> None:
    check_method("fedcda", {"fedcda": {"warmup": 1, "selection": selection}})


def test_a_cache_in_a_file_gives_the_same_bits_and_resumes(tmp_path: Path) -> None:
    options = {"fedcda": {"warmup": 0}}
    in_memory = small_run("fedcda", options, rounds=8).digest
    assert small_run("fedcda", options, rounds=8, cache_dir=str(tmp_path / "cache")).digest == in_memory
    with build_small_run("fedcda", options, rounds=8, cache_dir=str(tmp_path / "other")).engine_closed() as first:
        for number in range(4):
            first.rounds.run_round(number)
        saved = first.state_dict()
        tree, tensors = split_stored_tensors(saved)
        stored = json.loads(json.dumps(tree)), {name: tensor.clone() for name, tensor in tensors.items()}
        size = server_of(first).store.path.stat().st_size
        assert not any(isinstance(value, torch.Tensor) for value in saved["server"]["store"].values())
        for number in range(4, 8):  # goes on, and is thrown away: the rows of the saved state must survive that
            first.rounds.run_round(number)
        expected = first.rounds.parts.server.global_model().clone()
        assert size > 0
    with build_small_run("fedcda", options, rounds=8, cache_dir=str(tmp_path / "other")).engine_closed() as second:
        second.load_state_dict(join_stored_tensors(*stored))
        for number in range(4, 8):
            second.rounds.run_round(number)
        assert torch.equal(second.rounds.parts.server.global_model(), expected)


def test_rows_in_a_file_are_not_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice needs K rows a participant beside each other; what is read for it must be gone once it is there."""
    options, held, most = {"fedcda": {"warmup": 0, "selection": "optimal"}}, weakref.WeakSet[torch.Tensor](), 0
    read = RowStore.read

    def watched(self: RowStore, number: int) -> torch.Tensor:
        nonlocal most
        row = read(self, number)
        most = max(most, len(held) + 1)
        held.add(row)
        return row

    monkeypatch.setattr(RowStore, "read", watched)
    with build_small_run("fedcda", options, cache_dir=str(tmp_path / "cache")).engine_closed() as experiment:
        for number in range(4):
            server_of(experiment).aggregate(number, iter(answers(experiment, [0, 1, 2, 3], number)))
    assert 1 <= most <= 2, "of 12 candidates: one that is read, and one that is about to go"


def test_integer_buffers_are_those_of_a_model(experiment: BuiltRun) -> None:
    server = server_of(experiment)
    updates = answers(experiment, [0, 1])
    for update in updates:
        for counter in experiment.layout.views(update.row, TensorKind.INTEGER):
            counter.fill_(7 + update.client_id)
    server.aggregate(0, iter(updates))
    assert [int(c) for c in experiment.layout.views(server.global_model(), TensorKind.INTEGER)] == [8]


@pytest.mark.parametrize("L", [0.01, 3.0, 1000.0])
@pytest.mark.parametrize("B", [1, 2, 3, 4, 9])
def test_batches_are_decided_one_after_the_other_beside_those_before_them(B: int, L: float) -> None:
    """Eq. 8 on the models themselves: all combinations of a batch, with earlier ones fixed and later ones left out.

    With B = 1 that is brute force over everyone, with B = P one participant at a time; more batches than that are P.
    """
    participants = [0, 1, 2, 3]
    with build_small_run("fedcda", {"fedcda": {"warmup": 0, "B": B, "L": L}}).engine_closed() as experiment:
        server, found = server_of(experiment), Counter[int]()
        for number in range(3):
            server.aggregate(number, iter(answers(experiment, [0, 1, 2, 3, 4, 5], number)))
        for round in range(5, 17):
            for update in answers(experiment, participants, round):
                server._leave(update.client_id)
                server._cache(update)
            picks = server.choose(round, participants)
            order = [participants[i] for i in server.context.rng_streams.numpy("fedcda", round).permutation(4)]
            rows = [server.store.read(number) for number in server.chosen.values()]
            losses = [dict(server.cache[c])[number] for c, number in server.chosen.items()]
            for batch in np.array_split(order, min(B, 4)):
                values = {}
                for combination in np.ndindex(*(len(server.cache[c]) for c in batch)):
                    models = [server.cache[c][pick] for c, pick in zip(batch, combination, strict=True)]
                    chosen = torch.stack([*rows, *(server.store.read(number) for number, _ in models)])
                    values[combination] = objective(server, chosen, [*losses, *(loss for _, loss in models)], L)
                best = min(values, key=lambda each: values[each])
                assert tuple(picks[c] for c in batch) == best
                found.update(best)
                rows += [server.store.read(server.cache[c][pick][0]) for c, pick in zip(batch, best, strict=True)]
                losses += [server.cache[c][pick][1] for c, pick in zip(batch, best, strict=True)]
        assert min(found[place] for place in range(3)) > 2, "each of the three is chosen now and then"


@pytest.mark.parametrize(("warmup", "told"), [(2, False), (3, True)])
def test_a_run_that_is_all_warm_up_is_told_so(warmup: int, told: bool) -> None:
    with build_small_run(
        "fedcda", {"fedcda": {"warmup": warmup}}, rounds=3, engine="sequential"
    ).engine_closed() as experiment:
        said = [note for note in experiment.notes if f"warm-up of {warmup} rounds" in note and "this run has 3" in note]
        assert bool(said) == told
