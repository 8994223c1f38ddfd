"""Tests of common errors of public code, on every method.

They are odd clients, batches, buffers and draws.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.cli.catalog import read_catalog_entries
from fedloom.core.layout import TensorKind
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.data import Samples
from fedloom.errors import FedloomError, RunStopped
from fedloom.methods import methods
from fedloom.methods.registry import BUILT_IN
from fedloom.runs.build import BuiltRun
from fedloom.runs.callback import Callback
from fedloom.runs.checkpoints import Checkpoints
from fedloom.runs.execute import resume, run
from fedloom.testing.fixtures import SETTINGS, SmallFederatedDataset, batch_norm_network, build_small_run, small_run
from fedloom.training.local_training import ClientStates
from tests.support.core_methods import CORE_METHODS

NAMES = sorted(BUILT_IN)
QUICK: dict[str, dict[str, Any]] = {
    "feddf": {"steps": 5},
    "fedbe": {"epochs": 1},
    "fedlaw": {"epochs": 2},
    "fedcda": {"warmup": 1},
    "dynafed": {"L": 2, "s": 1, "inner_steps": 2, "iterations": 2, "images_per_class": 1, "refine_epochs": 1},
    "fedasam-swa": {"start": 0.0, "cycle": 1},
    "fedrep": {"head_epochs": 1, "final_epochs": 1},
    "fedbabu": {"finetune_epochs": 1},
    "fedgen": {"steps": 5, "alpha": 1.0, "beta": 1.0},
}
"""Options that save time, or let a method do in a few rounds what it does later."""


def given(name: str) -> dict[str, dict[str, Any]]:
    return {part: QUICK[part] for part in name.split("+") if part in QUICK}


class Branched(nn.Module):
    """A residual network: batch norm inside the branch and, under a name that does not say so, in the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 16)
        self.branch = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
        self.downsample = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        out: Tensor = self.head((self.downsample(x) + self.branch(x)).relu())
        return out


def assert_sound(experiment: BuiltRun, row: Tensor) -> None:
    """A model may be anything but this."""
    assert experiment.layout.is_finite(row)
    for entry in experiment.layout.entries:
        if entry.name.endswith("running_var"):
            assert float(entry.view(row).min()) >= 0, f"{entry.name} is negative"
        if entry.kind is TensorKind.INTEGER:
            assert entry.view(row).dtype is torch.int64


def played(name: str, rounds: int = 2, **settings: Any) -> tuple[BuiltRun, list[dict[str, Any]]]:
    """A few rounds of a method; every model that it deployed or keeps is sound."""
    with build_small_run(name, given(name), rounds=rounds, **settings).engine_closed() as experiment:
        records = []
        for round in range(rounds):
            records.append(experiment.rounds.run_round(round))
            for row in (experiment.rounds.global_model(), *experiment.rounds.parts.server.models()):
                assert_sound(experiment, row)
        return experiment, records


def shrunken(experiment: BuiltRun, job: ClientTask) -> ClientUpdate:
    """An answer whose variances have all but gone, of a client that went a way of its own; it has counted to 7 + k."""
    layout, row = experiment.layout, job.row.clone()
    row[: layout.trainable] += torch.randn(layout.trainable, generator=torch.Generator().manual_seed(job.client_id))
    for entry in layout.entries:
        if entry.name.endswith("running_var"):
            entry.view(row).mul_(0.01)
        if entry.kind is TensorKind.INTEGER:
            entry.view(row).fill_(7 + job.client_id)
    extras = {key: torch.zeros(shape) for key, shape in experiment.rounds.parts.client.upload_shapes(layout).items()}
    return ClientUpdate(job, row, num_examples=10, loss=1.0, steps=3, extras=extras)


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_running_variances_stay_positive_and_counters_are_not_averaged(name: str) -> None:
    """Whoever goes beyond the mean, or spreads models around it, must leave statistics out of it."""
    with build_small_run(name, given(name), rounds=4, clients_per_round=8).engine_closed() as experiment:
        parts = experiment.rounds.parts
        server, beside = parts.server, [part for part in (parts.extras, parts.refiner) if part is not None]
        for round in range(3):
            jobs = list(server.dispatch(round, server.sample_clients(round)))
            for job in jobs:
                assert_sound(experiment, job.row)
            updates = [shrunken(experiment, job) for job in jobs]
            for part in beside:
                for update in updates:
                    part.receive_update(round, update)
            server.aggregate(round, iter(updates))
            if parts.extras is not None:
                parts.extras.end_round(round)
            if parts.refiner is not None:
                parts.refiner.refine(round, server)
            assert_sound(experiment, server.global_model())
            for entry in experiment.layout.entries:
                if entry.kind is TensorKind.INTEGER:
                    assert int(entry.view(server.global_model())) in {0, *range(7, 15)}, "a count that no client has"


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_steps_that_are_far_too_long_break_nothing(name: str) -> None:
    _, records = played(name, rounds=3, lr=0.5, momentum=0.9, batch_size=4)
    assert not any(record["failed"] for record in records)


MANY_MODELS = {
    "fedcross": "the model that went to it is mixed as it was sent",
    "fedmr": "the model that went to it takes part as it was sent",
    "indep": "the model that went to it stays in the mean",
    "fedmut": "an odd number of mutants has another one that is not moved",
}
"""Servers for which a client without samples is not nobody, and why."""


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in MANY_MODELS])
def test_a_client_without_samples_changes_nothing(name: str) -> None:
    rows = []
    for clients in ([1, 5, 6], [1, 0, 5, 6]):
        made = build_small_run(name, given(name), federated_data=SmallFederatedDataset(sizes={0: 0}), rounds=3)
        with made.engine_closed() as experiment:
            experiment.rounds.parts.server.sample_clients = lambda round, clients=clients: list(clients)
            for round in range(3):
                record = experiment.rounds.run_round(round)
                assert (record["idle"], record["failed"]) == (0 if name == "centralized" else len(clients) - 3, 0)
            rows.append(experiment.rounds.global_model().clone())
    assert torch.equal(*rows)


@pytest.mark.parametrize("name", MANY_MODELS)
def test_where_models_travel_one_that_met_no_samples_comes_back_as_it_went(name: str) -> None:
    made = build_small_run(name, given(name), federated_data=SmallFederatedDataset(sizes={0: 0}), rounds=3)
    with made.engine_closed() as experiment:
        experiment.rounds.parts.server.sample_clients = lambda _: [1, 0, 5, 6]
        for round in range(3):
            assert experiment.rounds.run_round(round)["idle"] == 1
        assert experiment.layout.is_finite(experiment.rounds.global_model())


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_nobody_has_samples(name: str) -> None:
    """No weights to divide by, and nothing to learn from: the model stays as it is."""
    made = build_small_run(
        name, given(name), federated_data=SmallFederatedDataset(sizes=dict.fromkeys(range(8), 0)), rounds=2
    )
    with made.engine_closed() as experiment:
        before = experiment.rounds.global_model().clone()
        for round in range(2):
            assert "note" in experiment.rounds.run_round(round)
        trainable = experiment.layout.trainable
        assert torch.equal(experiment.rounds.global_model()[:trainable], before[:trainable])


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_a_round_without_an_answer_does_not_tell_the_numbers_of_an_earlier_one(name: str) -> None:
    """Nor would a run that was resumed before it have them."""
    with build_small_run(name, given(name), rounds=4).engine_closed() as experiment:
        for round in range(3):
            experiment.rounds.run_round(round)
        saved = deepcopy(experiment.state_dict())
        experiment.engine.train = lambda jobs: iter(())  # type: ignore[method-assign]
        told = experiment.rounds.run_round(3).get("diagnostics", {})
    with build_small_run(name, given(name), rounds=4).engine_closed() as experiment:
        experiment.load_state_dict(saved)
        experiment.engine.train = lambda jobs: iter(())  # type: ignore[method-assign]
        assert experiment.rounds.run_round(3).get("diagnostics", {}) == told
        assert all(isfinite(value) for value in told.values())


class WithoutClasses(SmallFederatedDataset):
    """Nobody, the server included, has a sample of classes 3 and 7; there are ten classes all the same."""

    def __init__(self) -> None:
        super().__init__()
        self._clients = [without(samples) for samples in self._clients]
        self.server_data = without(self.server_data)


def without(samples: Samples) -> Samples:
    kept = (samples.y != 3) & (samples.y != 7)
    return Samples(samples.x[kept], samples.y[kept])


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_classes_that_nobody_owns_are_no_trouble(name: str) -> None:
    experiment, records = played(name, federated_data=WithoutClasses(), clients_per_round=8)
    assert not any(record["failed"] for record in records)
    score = experiment.engine.evaluate(experiment.rounds.global_model())
    assert score is not None
    assert isfinite(score.loss)


LEARN_ON_THE_SERVER = {"fedbe", "fedlaw", "dynafed"}
"""Methods whose server goes on from models that have not moved."""


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_updates_of_zero_leave_the_model_as_it_is(name: str) -> None:
    """No norm, angle, spread or mean update may be divided by."""
    experiment, records = played(name, lr=0.0)
    assert not any(record["failed"] for record in records)
    trainable = experiment.layout.trainable
    after, before = experiment.rounds.global_model()[:trainable], experiment.rounds.context.initial[:trainable]
    if name not in LEARN_ON_THE_SERVER:
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_batches_of_one_are_no_trouble(name: str) -> None:
    """All batches, and the last one of a client, and all that a client has."""
    for size in (1, 8):
        federation = SmallFederatedDataset(sizes={0: 1, 1: 9, 2: 9, 3: 2})
        _, records = played(name, federated_data=federation, clients_per_round=8, batch_size=size)
        assert not any(record["failed"] or record["idle"] for record in records)


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_batch_norm_in_residual_branches_is_batch_norm(name: str) -> None:
    experiment, records = played(name, model=Branched, clients_per_round=8)
    assert not any(record["failed"] for record in records)
    if name == "fedbn":
        columns = experiment.rounds.parts.client.personal_columns(experiment.layout)
        away = [e.name for e in experiment.layout.entries if any(c.start <= e.offset < c.stop for c in columns)]
        assert {name.rpartition(".")[0] for name in away} == {"branch.1", "downsample.1"}


BESIDE = sorted(name for name, method in methods().items() if name in BUILT_IN and method.server is None)


@pytest.mark.parametrize("name", BESIDE)
def test_a_client_drawn_twice_does_its_work_once_and_counts_twice(name: str) -> None:
    """CluSamp draws with repeats; whatever clients do besides, and keep, must not happen twice."""
    method = f"clusamp+{name}"
    # A server's data change nothing here: what refiners do comes after the mean.
    options = {**given(method), **{"feddf": {"feddf": {"steps": 0}}, "fedbe": {"fedbe": {"epochs": 0}}}.get(name, {})}
    with build_small_run(method, options).engine_closed() as experiment:
        server, layout = experiment.rounds.parts.server, experiment.layout
        server.sample_clients = lambda _: [2, 5, 2, 2]
        seen: dict[int, Tensor] = {}
        train = experiment.engine.train

        def noted(jobs: Any) -> Any:
            for update in train(jobs):
                assert isinstance(update, ClientUpdate), update
                assert update.client_id not in seen
                seen[update.client_id] = update.row.clone()
                yield update

        experiment.engine.train = noted
        record = experiment.rounds.run_round(0)
        assert (record["clients"], set(seen)) == (2, {2, 5})
        mean = (3 * seen[2].double() + seen[5].double()) / 4
        torch.testing.assert_close(
            server.global_model()[: layout.floats], mean.float()[: layout.floats], rtol=1e-5, atol=1e-6
        )
        if name == "scaffold":
            own = sum(experiment.engine.client_states.get(client)["c"] for client in (2, 5)) / 8
            torch.testing.assert_close(experiment.rounds.parts.extras.c, own)


class StopAfter(Callback):
    """Asks a run to stop after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def on_round_end(self, record: Mapping[str, Any]) -> None:
        self.left -= record["round"] > 0

    def should_stop(self) -> bool:
        return self.left <= 0


COSTS = {entry["name"]: entry for entry in read_catalog_entries("methods")}
KEEPING = sorted(name for name in NAMES if COSTS[name]["client state"] != "nothing")


@pytest.mark.parametrize("name", KEEPING)
def test_what_clients_keep_survives_a_stop_to_the_bit(name: str, tmp_path: Path) -> None:
    values = {**SETTINGS, "report": False, "checkpoint_seconds": 0, "options": given(name)}
    start = partial(run, name, SmallFederatedDataset(), batch_norm_network, **values)
    start(out=tmp_path / "whole")
    with pytest.raises(RunStopped):
        start(out=tmp_path / "stopped", callbacks=[StopAfter(2)])
    host = {"engine": "multiprocess", "workers": 2}
    resume(tmp_path / "stopped", data=SmallFederatedDataset(), model=batch_norm_network, report=False, **host)
    kept = [homes_in(tmp_path / which, name) for which in ("whole", "stopped")]
    assert kept[0].keys() == kept[1].keys()
    assert len(kept[0]) > 4
    assert all(torch.equal(kept[0][client], kept[1][client]) for client in kept[0])


def homes_in(folder: Path, name: str) -> dict[tuple[int, str], Tensor]:
    """What the clients keep after the last round, as it is on disk."""
    with build_small_run(name, given(name)).engine_closed() as experiment:
        homes = ClientStates(experiment.engine.client_states.shapes, experiment.layout.dtype)
    checkpoints = Checkpoints(folder / "checkpoints")
    loaded = checkpoints.load_latest(homes)
    assert loaded is not None
    assert loaded[0] == SETTINGS["rounds"]
    return {(client, key): tensor for client in homes.client_ids() for key, tensor in homes.get(client).items()}


Weights = Callable[[list[int]], list[float]]
WEIGHTS: dict[str, Weights] = {
    "samples": lambda samples: [float(n) for n in samples],
    "uniform": lambda samples: [1.0] * len(samples),
}
AVERAGES = {
    "samples": "fedavg fedprox fedsam fedasam fedasam-swa fedexp moon fedgen fedmix naivemix fedbn fedrep fedcluster "
    "swa swad soups diwa lss fedma gamf fedlaw feddf fedbe dynafed fedavgm fednova",
    "uniform": "scaffold feddyn fedmut clusamp fedbabu indep fedcross fedmr",
}
"""How clients count in the first mean, as the papers or their authors have it. Left are `abavg`, which counts by
accuracy, servers that take no mean of what comes back (`fedcda`, `fedfomo`, `fedma-layers`), and those that take a
step of their own to the mean (`fedadagrad`, `fedadam`, `fedyogi`)."""


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind, names in AVERAGES.items() for name in names.split()])
def test_clients_count_as_the_paper_says(name: str, kind: str) -> None:
    quiet = {"fedlaw": {"epochs": 0}, "fedexp": {"epsilon": 1e300}, "fedcross": {"selection": "in-order"}}.get(name, {})
    made = build_small_run(name, {name: quiet}, rounds=20)
    with made.engine_closed() as experiment:
        server, layout = experiment.rounds.parts.server, experiment.layout
        samples, rows = [3, 10, 1, 40], []
        jobs = list(server.dispatch(0, [0, 1, 2, 3]))
        noise = torch.Generator().manual_seed(0)
        for job in jobs:
            row = job.row.clone()
            row[: layout.floats] += 1e-3 * torch.randn(layout.floats, generator=noise).abs()
            rows.append(row)
        updates = [ClientUpdate(job, row, n, 1.0, 1) for job, row, n in zip(jobs, rows, samples, strict=True)]
        server.aggregate(0, iter(updates))
        weights = torch.tensor(WEIGHTS[kind](samples), dtype=torch.float64)
        mean = weights @ torch.stack(rows).double()[:, : layout.floats] / weights.sum()
        torch.testing.assert_close(server.global_model()[: layout.floats], mean.float(), rtol=1e-5, atol=1e-6)


def test_every_server_has_its_weights_named() -> None:
    named = {name for names in AVERAGES.values() for name in names.split()}
    others = {"abavg", "fedcda", "fedfomo", "fedma-layers", "fedadagrad", "fedadam", "fedyogi"}
    others |= {"centralized", "local"}  # one update, or none
    assert named | others == set(NAMES)


def test_the_odd_clients_of_these_tests_are_odd() -> None:
    federation = SmallFederatedDataset(sizes={0: 1, 1: 9, 2: 9, 3: 2})
    assert [federation.num_examples(client) for client in range(4)] == [1, 9, 9, 2]
    assert {3, 7}.isdisjoint({int(y) for k in range(8) for y in WithoutClasses().client_samples(k).y})
    assert small_run("fedavg", {}, federated_data=WithoutClasses()).loss > 0


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_a_server_that_asks_a_client_twice_is_stopped_where_that_would_be_ambiguous(name: str) -> None:
    """Clients that keep something would begin their second job where the first ended, or not, as engines like it."""
    rows = []
    for engine in ("sequential", "multiprocess"):
        with build_small_run(name, given(name), engine=engine).engine_closed() as experiment:
            server = experiment.rounds.parts.server
            server.sample_clients = lambda _: [2, 5, 2]
            if COSTS[name]["client state"] != "nothing":
                with pytest.raises(FedloomError, match="round 1: the server sends client 2 several tasks"):
                    experiment.rounds.run_round(0)
                return
            if name == "fedma-layers":  # it has a place for each client
                return
            experiment.rounds.run_round(0)
            rows.append(experiment.rounds.global_model().clone())
    assert torch.equal(*rows)
