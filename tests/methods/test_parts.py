"""Tests of the contracts of the parts, with small methods.

They use what FedAvg, FedProx and SCAFFOLD do not.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedloom import ClientTask, ClientUpdate, Layout, LocalSteps, LocalTrainer, Method, Refiner, Server, register
from fedloom.core.layout import TensorKind
from fedloom.methods import Client, Options, compose
from fedloom.methods.fedavg import FedAvgOptions, FedAvgServer
from fedloom.testing import check_method
from fedloom.testing.fixtures import build_small_run, simple_network, small_run
from fedloom.training.context import PERSONAL_KEY
from tests.support.task_rounds import in_round


class NormsStayHome(Client[Options]):
    """FedBN: the modules with running statistics are each client's own."""

    def personal_columns(self, layout: Layout) -> list[slice]:
        units = {entry.layer for entry in layout.entries if entry.kind is TensorKind.BUFFER}
        return [entry.columns for entry in layout.entries if entry.layer in units]


class Swarm(Server[Options]):
    """As many models as clients in a round; each wanders from client to client and is averaged for deployment only."""

    def start(self) -> None:
        self.bank = self.context.bank(self.context.clients_per_round)
        self.bank.rows[:] = self.context.initial

    def dispatch(self, round: int, client_ids: list[int]) -> list[ClientTask]:
        return [ClientTask(client, self.bank.rows[slot], slot) for slot, client in enumerate(client_ids)]

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        for update in updates:
            self.bank.rows[update.model_index] = update.row

    def global_model(self) -> Tensor:
        row = self.bank.rows[0].clone()
        floats = self.context.layout.floats
        row[:floats] = self.bank.rows[:, :floats].mean(0)
        return row

    def models(self) -> Tensor:
        return self.bank.rows


class Shrinker(Refiner[Options]):
    """Makes the parameters of every model a little smaller, by what it saw of the clients."""

    def start(self) -> None:
        self.seen = 0
        self._module = self.context.make_model()

    def receive_update(self, round: int, update: ClientUpdate) -> None:
        self.seen += 1

    def refine(self, round: int, server: Server[Options]) -> None:
        server.models()[:, : self.context.layout.trainable] *= 1 - 0.001 * self.seen

    def diagnostics(self) -> dict[str, float]:
        return {"seen": self.seen}


class TwoModels(Client[Options]):
    """Trains a second model after the first, from the same start, and returns their mean: a small soup."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step)
        first = trainer.weights.clone()
        trainer.weights.copy_(trainer.received[: trainer.layout.trainable])
        trainer.new_optimizer()
        yield LocalSteps(self.training_step)
        trainer.weights.add_(first).div_(2)


@pytest.fixture(autouse=True)
def methods() -> None:
    register(Method("norms-home", "", "", client=NormsStayHome))
    register(Method("swarm", "", "", server=Swarm))
    register(Method("shrinker", "", "", refiner=Shrinker))
    register(Method("soup", "", "", client=TwoModels))


@pytest.mark.parametrize("name", ["norms-home", "swarm", "shrinker", "soup", "swarm+soup+shrinker", "swarm+scaffold"])
def test_they_keep_the_contract(name: str) -> None:
    check_method(name)


def test_a_composition_takes_each_part_from_the_method_that_brings_it() -> None:
    parts = compose("swarm+scaffold+shrinker")
    assert [parts.owner(part).name for part in ("server", "client", "extras", "refiner")] == [
        "swarm",
        "scaffold",
        "scaffold",
        "shrinker",
    ]


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_what_stays_home_is_the_clients_own_and_never_travels(engine: str) -> None:
    with build_small_run("norms-home", {}, engine=engine, clients_per_round=8).engine_closed() as experiment:
        layout, server = experiment.layout, experiment.rounds.parts.server
        columns = experiment.rounds.parts.client.personal_columns(layout)
        away = [experiment.rounds.context.initial[part].clone() for part in columns]
        record = experiment.rounds.run_round(0)
        assert all(torch.equal(server.global_model()[part], own) for part, own in zip(columns, away, strict=True))
        kept = [experiment.engine.client_states.get(client)[PERSONAL_KEY].clone() for client in range(8)]
        assert len({tuple(values.tolist()) for values in kept}) == 8, "every client has statistics of its own"
        at_home = sum(part.stop - part.start for part in columns)
        assert record["bytes_down"] == record["bytes_up"] == 8 * 4 * (layout.size - at_home)
        experiment.rounds.run_round(1)
        assert not any(torch.equal(experiment.engine.client_states.get(c)[PERSONAL_KEY], kept[c]) for c in range(8)), (
            "they train on"
        )


def test_what_stays_home_is_what_the_client_trained() -> None:
    """Client 2 alone, twice: its second visit must start from its own statistics and the server's weights."""
    with build_small_run("norms-home", {}).engine_closed() as experiment:
        engine, server = experiment.engine, experiment.rounds.parts.server
        seen: list[Tensor] = []
        local = experiment.rounds.parts.client
        plain = type(local).training_step

        def step(bench: LocalTrainer, batch):
            seen.append(bench.row.clone())
            return plain(local, bench, batch)

        local.training_step = step
        columns = local.personal_columns(experiment.layout)
        for number in range(2):
            (update,) = engine.train(in_round(number, list(server.dispatch(number, [2]))))
            engine.commit_update(update)
            kept = engine.client_states.get(2)[PERSONAL_KEY].clone()
            if number == 0:
                first, steps = kept, len(seen)
        start = torch.cat([seen[steps][part] for part in columns])
        assert torch.equal(start, first)
        assert not torch.equal(first, kept)


def test_without_such_modules_nothing_stays() -> None:
    assert (
        small_run("norms-home", {}, model=simple_network).digest == small_run("fedavg", {}, model=simple_network).digest
    )


def test_a_refiner_sees_the_updates_and_changes_what_is_sent_next() -> None:
    refined = small_run("shrinker", {})
    assert refined.digest != small_run("fedavg", {}).digest
    assert [record["diagnostics"] for record in refined.records] == [{"refiner.seen": 4 * n} for n in (1, 2, 3, 4)]


def test_several_models_on_a_server_keep_those_of_lost_clients() -> None:
    with build_small_run("swarm", {}).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        experiment.rounds.run_round(0)
        before = server.bank.rows.clone()
        jobs = server.dispatch(1, server.sample_clients(1))
        answered = list(experiment.engine.train(in_round(1, jobs[:1])))
        server.aggregate(1, iter(answered))
        assert not torch.equal(server.bank.rows[0], before[0])
        assert torch.equal(server.bank.rows[1:], before[1:])


def test_the_public_suite_names_the_promise_that_was_broken() -> None:
    class Nothing(FedAvgServer):
        def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
            for update in updates:
                self.bank.rows[0].copy_(update.row)

    register(Method("last-one", "", "", server=Nothing, options=FedAvgOptions))
    with pytest.raises(AssertionError, match="last-one: order of clients does not matter"):
        check_method("last-one")
