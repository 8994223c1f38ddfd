"""Tests of clients that fail, send bad updates or end their process."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom import Client, Layout, LocalSteps, LocalTrainer, Method, Options, register
from fedloom.engines.multiprocess.engine import MultiprocessEngine
from fedloom.methods.scaffold import ScaffoldClient, ScaffoldExtras, ScaffoldOptions
from fedloom.runs.build import build_run
from fedloom.runs.directory import RunDirectory
from fedloom.runs.resolve import resolve_run
from tests.support.small_runs import TINY, TINY_OPTIONS, Command, tiny
from tests.support.task_rounds import in_round

FAULTY = (2, 3, 4, 5)


class Faulty(Client[Options]):
    """Clients 2 to 5 each do something else wrong."""

    def upload_shapes(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        return {"greeting": (3,)}

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step)
        if trainer.client_id == 2:
            raise RuntimeError("the disk of this site\nis on fire")
        if trainer.client_id == 3:
            trainer.row[7] = float("nan")
        if trainer.client_id == 4:
            trainer.row[0] = float("-inf")
        if trainer.client_id == 5:
            trainer.uploads["greeting"] = torch.zeros(4)


class Hopeless(Client[Options]):
    """Nobody ever answers."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step)
        raise ValueError(f"client {trainer.client_id} is out of order")


class Suicidal(Client[Options]):
    """Client 3 takes its whole process with it."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step)
        if trainer.client_id == 3:
            os.kill(os.getpid(), signal.SIGKILL)


class Quitter(Client[Options]):
    """Client 3 ends its process as if all were well."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step)
        if trainer.client_id == 3:
            os._exit(0)


class Raiser(Client[Options]):
    """Client 3 fails in the ordinary way."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step)
        if trainer.client_id == 3:
            raise OSError("no")


class Poisoned(ScaffoldClient):
    """SCAFFOLD whose client 3 sends NaN in odd rounds, after having changed what it keeps at home."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield from super().train(trainer)
        if trainer.client_id == 3 and trainer.round % 2:
            trainer.client_state["c"].fill_(1e6)
            trainer.row[0] = float("nan")


class Silent(ScaffoldClient):
    """SCAFFOLD whose client 3 raises in odd rounds."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield from super().train(trainer)
        if trainer.client_id == 3 and trainer.round % 2:
            raise OSError("no")


LOCALS: dict[str, type[Client[Any]]] = {
    "test-faulty": Faulty,
    "test-hopeless": Hopeless,
    "test-suicidal": Suicidal,
    "test-quitter": Quitter,
    "test-raiser": Raiser,
}


@pytest.fixture(autouse=True)
def methods() -> None:
    """The methods above; conftest.py forgets them after each test."""
    for name, local in LOCALS.items():
        register(Method(name=name, summary="", reference="", client=local))
    for name, local in (("test-poisoned", Poisoned), ("test-silent", Silent)):
        register(
            Method(
                name=name,
                summary="",
                reference="",
                options=ScaffoldOptions,
                client=local,
                extras=ScaffoldExtras,
            )
        )


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_failing_and_lying_clients_are_counted_and_named(tmp_path: Path, engine: str) -> None:
    run = tiny(tmp_path / engine, "test-faulty", engine=engine, rounds=2)
    for record in run.history[1:]:
        assert (record["clients"], record["failed"]) == (6, 4)
        assert record["failed_clients"].keys() == set(map(str, FAULTY))
        assert record["failed_clients"]["2"] == "RuntimeError: the disk of this site is on fire"
        assert record["failed_clients"]["3"] == "rejected: its model is not finite"
        assert record["failed_clients"]["4"] == "rejected: its model is not finite"
        assert "greeting" in record["failed_clients"]["5"]
        assert "(4,)" in record["failed_clients"]["5"]
        assert "(3,)" in record["failed_clients"]["5"]
        assert record["accuracy"] is not None
        assert "note" not in record
    assert run.summary["failed"] == 2 * 4
    assert all(torch.isfinite(value).all() for value in run.model().state_dict().values())


def test_the_rest_is_averaged_as_if_nobody_else_had_been_asked(tmp_path: Path) -> None:
    """The survivors are clients 0 and 1: their mean by hand."""
    run = tiny(tmp_path / "r", "test-faulty", rounds=1)
    config = fedloom.config.make_config({k: v for k, v in TINY.items() if k != "report"} | {"engine": "sequential"})
    with build_run(resolve_run(config)).engine_closed() as experiment:
        server = experiment.rounds.parts.server
        jobs = [job for job in server.dispatch(0, server.sample_clients(0)) if job.client_id not in FAULTY]
        rows = [(u.row.double().clone(), u.num_examples) for u in experiment.engine.train(in_round(0, jobs))]
        mean = sum(row * count for row, count in rows) / sum(count for _, count in rows)
        expected = experiment.layout.state_dict(mean.float())
    for name, value in run.model().state_dict().items():
        assert torch.allclose(value, expected[name], rtol=0, atol=1e-7), name


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_a_round_without_a_survivor_keeps_the_model(command: Command, tmp_path: Path, engine: str) -> None:
    ended = command("run", "test-hopeless", *TINY_OPTIONS, "--engine", engine, "--out", "r")
    assert ended.code == 0
    assert ended.err.count("no client answered, so the model was kept as it was") == 3
    assert "18 client tasks" in ended.out
    history = RunDirectory.open(tmp_path / "r").history()
    assert len({record["loss"] for record in history}) == 1
    assert all("note" in record and record["train_loss"] is None for record in history[1:])
    untouched = tiny(tmp_path / "untouched", "fedavg", rounds=1, epochs=0)
    assert RunDirectory.open(tmp_path / "r").summary()["digest"] == untouched.digest  # type: ignore[index]


def test_too_few_survivors_end_the_run_with_a_sentence(command: Command) -> None:
    ended = command("run", "test-faulty", *TINY_OPTIONS, "--min-clients", 3, "--quiet")
    assert ended.code == 1
    assert ended.err.startswith("fedloom: round 1: 2 of 6 clients answered, but min_clients is 3 (client ")
    assert ended.err.count("\n") == 1
    assert command("run", "test-faulty", *TINY_OPTIONS, "--min-clients", 2, "--rounds", 2, "--quiet").code == 0


@pytest.mark.parametrize(("method", "how"), [("test-suicidal", "signal 9"), ("test-quitter", "exit code 0")])
def test_a_client_that_kills_its_process_is_given_up_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, how: str
) -> None:
    engines: list[MultiprocessEngine] = []
    real = MultiprocessEngine.__init__
    monkeypatch.setattr(MultiprocessEngine, "__init__", lambda self, *a: (engines.append(self), real(self, *a))[1])
    run = tiny(tmp_path / "r", method, workers=2)
    for record in run.history[1:]:
        assert record["failed_clients"] == {"3": f"its worker died 3 times ({how})"}
    assert engines[0].num_dead_workers == 3 * 3
    assert run.digest == tiny(tmp_path / "s", "test-raiser", engine="sequential").digest


@pytest.mark.parametrize("engine", ["sequential", "multiprocess"])
def test_a_refused_update_does_not_change_what_its_client_keeps(tmp_path: Path, engine: str) -> None:
    """What client 3 wrote into its home in a refused round is as if it had never been."""
    settings = {"rounds": 5, "engine": engine}
    poisoned = tiny(tmp_path / "a", "test-poisoned", **settings)
    silent = tiny(tmp_path / "b", "test-silent", **settings)
    assert poisoned.summary["failed"] == silent.summary["failed"] == 2
    assert poisoned.digest == silent.digest != tiny(tmp_path / "c", "scaffold", **settings).digest


def test_simulated_losses_are_the_same_each_time(command: Command) -> None:
    words = ("run", "fedavg", *TINY_OPTIONS, "--failure-rate", 0.5, "--json")
    first, second = command(*words).result, command(*words).result
    assert first["digest"] == second["digest"]
    assert 0 < first["failed"] == second["failed"] < 18
    assert first["bytes_up"] < first["bytes_down"]
