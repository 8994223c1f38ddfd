"""FedCDA: the cache, the choice, and where it must equal simpler methods."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.exchange import Job, Update
from fedloom.experiment import Experiment
from fedloom.methods.fedcda import FedCDAServer
from fedloom.rows import Kind
from fedloom.storage import join, split
from fedloom.testing import check_method, small_experiment, small_run


@pytest.fixture
def experiment() -> Iterator[Experiment]:
    with small_experiment("fedcda", {"fedcda": {"warmup": 0, "B": 2}}).engine_closed() as made:
        yield made


def server_of(experiment: Experiment) -> FedCDAServer:
    server = experiment.rounds.parts.server
    assert isinstance(server, FedCDAServer)
    return server


def answers(experiment: Experiment, clients: list[int], seed: int = 0) -> list[Update]:
    """Made-up answers of these clients."""
    layout, server = experiment.layout, server_of(experiment)
    updates = []
    for client in clients:
        generator = torch.Generator().manual_seed(1000 * seed + client)
        row = server.deploy().clone()
        row[: layout.floats] += 0.1 * torch.randn(layout.floats, generator=generator).abs()
        loss = float(torch.rand((), generator=generator))
        updates.append(Update(Job(client, server.deploy()), row, 5, loss, 1))
    return updates


def chosen_rows(server: FedCDAServer) -> torch.Tensor:
    return torch.stack([server.store.read(number) for _, number in sorted(server.chosen.items())])


def objective(server: FedCDAServer, rows: torch.Tensor, losses: list[float], L: float) -> float:
    """Eq. 5, on the models themselves."""
    w = rows[:, : server.context.layout.trainable].double()
    return float(np.mean(losses) + L / 2 * (w - w.mean(0)).square().sum(1).mean())


def test_the_global_model_is_the_mean_of_the_chosen_models_of_all_clients_seen(experiment: Experiment) -> None:
    server, floats = server_of(experiment), experiment.layout.floats
    for number, clients in enumerate(([0, 1, 2], [2, 3], [1, 4, 0], [3, 2, 1])):
        server.collect(number, iter(answers(experiment, clients, number)))
        mean = chosen_rows(server)[:, :floats].double().mean(0)
        torch.testing.assert_close(server.deploy()[:floats].double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(server.total, chosen_rows(server)[:, :floats].double().sum(0), rtol=1e-9, atol=1e-9)
        cached = {number for models in server.cache.values() for number, _ in models}
        assert set(server.chosen.values()) <= cached
        assert all(len(models) <= 3 for models in server.cache.values())


def test_who_does_not_take_part_keeps_cache_and_choice(experiment: Experiment) -> None:
    server = server_of(experiment)
    server.collect(0, iter(answers(experiment, [0, 1, 2])))
    before = {client: (list(server.cache[client]), server.chosen[client]) for client in (0, 1)}
    server.collect(1, iter(answers(experiment, [2, 5], 1)))
    assert {client: (server.cache[client], server.chosen[client]) for client in (0, 1)} == before
    assert 7 not in server.cache, "clients never seen have no part in it"


@pytest.mark.parametrize("selection", ["optimal", "approximate"])
def test_the_choice_is_what_trying_everything_finds(selection: str) -> None:
    """B = 1 against brute force over all combinations, on the models; the approximation is never better."""
    options = {"fedcda": {"warmup": 0, "selection": selection, "B": 3, "L": 5.0}}
    with small_experiment("fedcda", options).engine_closed() as experiment:
        server = server_of(experiment)
        for number in range(3):
            server.collect(number, iter(answers(experiment, [0, 1, 2, 3], number)))
        participants = [3, 1, 0]
        for update in answers(experiment, participants, 9):
            server._leave(update.client)
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


@given(L=st.floats(0, 100), shift=st.floats(-5, 5), extra=st.floats(-3, 3), seed=st.integers(0, 50))
@settings(max_examples=15, deadline=None)
def test_moving_all_models_or_the_losses_of_one_client_changes_no_choice(
    L: float, shift: float, extra: float, seed: int
) -> None:
    picks = []
    for moved in (False, True):
        options = {"fedcda": {"warmup": 0, "selection": "optimal", "L": L}}
        with small_experiment("fedcda", options).engine_closed() as experiment:
            server, layout = server_of(experiment), experiment.layout
            generator = torch.Generator().manual_seed(seed)
            rows = torch.rand(12, layout.size, generator=generator, dtype=torch.float64)
            losses = torch.rand(12, generator=generator).tolist()
            offset = torch.full((layout.size,), shift, dtype=torch.float64) if moved else torch.zeros(layout.size)
            for i in range(12):
                client, loss = i % 4, losses[i] + (extra if moved and i % 4 == 2 else 0.0)
                row = (rows[i] + offset).float()
                server._cache(Update(Job(client, row), row, 1, loss, 1))
            server.bank.rows[0] = offset.float()
            picks.append(server.choose(0, [0, 1, 2, 3]))
    assert picks[0] == picks[1]


def test_without_divergence_the_lowest_loss_wins() -> None:
    with small_experiment("fedcda", {"fedcda": {"warmup": 0, "L": 0.0}}).engine_closed() as experiment:
        server = server_of(experiment)
        for number in range(3):
            server.collect(number, iter(answers(experiment, [0, 1, 2], number)))
        for update in answers(experiment, [0, 1, 2], 8):
            server._leave(update.client)
            server._cache(update)
        picks = server.choose(3, [0, 1, 2])
        for client, pick in picks.items():
            losses = [loss for _, loss in server.cache[client]]
            assert losses[pick] == min(losses)


def test_one_cached_model_and_everyone_taking_part_is_uniform_fedavg() -> None:
    settings_ = {"per_round": 8}
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


@pytest.mark.parametrize("selection", ["approximate", "optimal", "newest", "random"])
def test_conformance(selection: str) -> None:
    check_method("fedcda", {"fedcda": {"warmup": 1, "selection": selection}})


def test_a_cache_in_a_file_gives_the_same_bits_and_resumes(tmp_path: Path) -> None:
    options = {"fedcda": {"warmup": 0}}
    in_memory = small_run("fedcda", options, rounds=8).digest
    assert small_run("fedcda", options, rounds=8, cache_dir=str(tmp_path / "cache")).digest == in_memory
    with small_experiment("fedcda", options, rounds=8, cache_dir=str(tmp_path / "other")).engine_closed() as first:
        for number in range(4):
            first.rounds.play(number)
        saved = first.state()
        tree, tensors = split(saved)
        stored = json.loads(json.dumps(tree)), {name: tensor.clone() for name, tensor in tensors.items()}
        size = server_of(first).store.path.stat().st_size
        assert not any(isinstance(value, torch.Tensor) for value in saved["server"]["store"].values())
        for number in range(4, 8):  # goes on, and is thrown away: the rows of the saved state must survive that
            first.rounds.play(number)
        expected = first.rounds.parts.server.deploy().clone()
        assert size > 0
    with small_experiment("fedcda", options, rounds=8, cache_dir=str(tmp_path / "other")).engine_closed() as second:
        second.load(join(*stored))
        for number in range(4, 8):
            second.rounds.play(number)
        assert torch.equal(second.rounds.parts.server.deploy(), expected)


def test_integer_buffers_are_those_of_a_model(experiment: Experiment) -> None:
    server = server_of(experiment)
    updates = answers(experiment, [0, 1])
    for update in updates:
        for counter in experiment.layout.views(update.row, Kind.INTEGER):
            counter.fill_(7 + update.client)
    server.collect(0, iter(updates))
    assert [int(c) for c in experiment.layout.views(server.deploy(), Kind.INTEGER)] == [8]


def test_as_many_batches_as_participants_is_one_at_a_time() -> None:
    """B = P: each participant in the shuffled order takes what is best beside those before it; later ones are out."""
    participants, L = [0, 1, 2, 3], 3.0
    options = {"fedcda": {"warmup": 0, "B": 4, "L": L}}
    with small_experiment("fedcda", options).engine_closed() as experiment:
        server = server_of(experiment)
        for number in range(3):
            server.collect(number, iter(answers(experiment, [0, 1, 2, 3, 4, 5], number)))
        for update in answers(experiment, participants, 7):
            server._leave(update.client)
            server._cache(update)
        picks = server.choose(5, participants)
        order = [participants[i] for i in server.context.streams.numpy("fedcda", 5).permutation(4)]
        rows = [server.store.read(number) for number in server.chosen.values()]
        losses = [dict(server.cache[c])[number] for c, number in server.chosen.items()]
        for client in order:
            values = [
                objective(server, torch.stack([*rows, server.store.read(number)]), [*losses, loss], L)
                for number, loss in server.cache[client]
            ]
            assert values[picks[client]] == pytest.approx(min(values), rel=1e-9)
            number, loss = server.cache[client][picks[client]]
            rows.append(server.store.read(number))
            losses.append(loss)


@pytest.mark.parametrize(("warmup", "told"), [(2, False), (3, True)])
def test_a_run_that_is_all_warm_up_is_told_so(warmup: int, told: bool) -> None:
    with small_experiment(
        "fedcda", {"fedcda": {"warmup": warmup}}, rounds=3, engine="plain"
    ).engine_closed() as experiment:
        said = [note for note in experiment.notes if f"warm-up of {warmup} rounds" in note and "this run has 3" in note]
        assert bool(said) == told
