"""Tests that every method passes `check_method`, and broken methods do not."""

from collections.abc import Iterator

import pytest
import torch

from fedloom import Client, ClientUpdate, LocalSteps, LocalTrainer, Method, register
from fedloom.methods import methods
from fedloom.methods.base import Options
from fedloom.methods.fedavg import FedAvgOptions, FedAvgServer
from fedloom.testing import CHECKS, check_method
from tests.support.core_methods import CORE_METHODS

NAMES = [
    "abavg",
    "centralized",
    "clusamp",
    "diwa",
    "dynafed",
    "fedadagrad",
    "fedadam",
    "fedasam",
    "fedasam-swa",
    "fedavg",
    "fedavgm",
    "fedbabu",
    "fedbe",
    "fedbn",
    "fedcda",
    "fedcluster",
    "fedcross",
    "feddf",
    "feddyn",
    "fedexp",
    "fedfomo",
    "fedgen",
    "fedlaw",
    "fedma",
    "fedma-layers",
    "fedmix",
    "fedmr",
    "fedmut",
    "fednova",
    "fedprox",
    "fedrep",
    "fedsam",
    "fedyogi",
    "gamf",
    "indep",
    "local",
    "lss",
    "moon",
    "naivemix",
    "scaffold",
    "soups",
    "swa",
    "swad",
]

QUICK = {"feddf": {"feddf": {"steps": 20, "check_every": 5}}}
"""Options of methods that take their time otherwise."""


def test_all_built_in_methods_are_checked() -> None:
    from fedloom.methods.registry import BUILT_IN

    assert set(NAMES) == set(BUILT_IN)


@pytest.mark.quick_if(name=CORE_METHODS)
@pytest.mark.parametrize("title", CHECKS)
@pytest.mark.parametrize("name", NAMES)
def test_conformance(name: str, title: str) -> None:
    CHECKS[title](name, QUICK.get(name, {}))


@pytest.mark.parametrize("options", [{"scaffold": {"option": "I"}}, {"fedavg": {"server_lr": 0.7}}])
def test_conformance_with_other_options(options: dict) -> None:
    check_method("scaffold", options)


class DividesByAll(FedAvgServer):
    """Divides by all clients instead of by those that answered."""

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        w, total = self.bank.rows[0], torch.zeros_like(self.bank.rows[0])
        for update in updates:
            total += update.row / self.context.num_clients
        w.copy_(total)


class AveragesIntegers(FedAvgServer):
    """Averages whole rows, counters and all."""

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        rows = [update.row.clone() for update in updates]
        if rows:
            layout = self.context.layout
            self.bank.rows[0, : layout.floats] = torch.stack(rows)[:, : layout.floats].mean(0)
            for entry in layout.entries:
                if entry.dtype is torch.int64:
                    mean = torch.stack([entry.view(row) for row in rows]).double().mean(0) + 0.5
                    entry.view(self.bank.rows[0]).copy_(mean)


class TakesTheLast(FedAvgServer):
    """Keeps whatever came last."""

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        for update in updates:
            self.bank.rows[0].copy_(update.row)


class SaysMean(TakesTheLast):
    """Says that the mean is enough for it."""

    needs = "mean"


class Forgetful(FedAvgServer):
    """Has state that is not in its checkpoint."""

    _rounds_seen = 0

    def aggregate(self, round: int, updates: Iterator[ClientUpdate]) -> None:
        super().aggregate(round, updates)
        self._rounds_seen += 1
        self.bank.rows[0, 0] += 0.001 * self._rounds_seen


class TrainsInPlace(Client[Options]):
    """Changes the model it received."""

    def train(self, trainer: LocalTrainer) -> Iterator[LocalSteps]:
        yield LocalSteps(self.training_step)
        trainer.received.copy_(trainer.row)


class DrawsGlobally(Client[Options]):
    """Draws from a generator that is not keyed."""

    generator = torch.Generator().manual_seed(0)

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        trainer.gradient.add_(torch.randn(trainer.gradient.numel(), generator=self.generator), alpha=0.01)


class Undocumented(FedAvgOptions):
    secret: int = 0


class AlmostFedAvg(Client[Options]):
    """Is not FedAvg where it claims to be."""

    def adjust_gradient(self, trainer: LocalTrainer) -> None:
        trainer.gradient.mul_(1.0001)


BROKEN = {
    "weights sum to one": {"server": DividesByAll},
    "buffers follow their rules": {"server": AveragesIntegers},
    "order of clients does not matter": {"server": TakesTheLast},
    "resumes exactly": {"server": Forgetful},
    "leaves inputs alone": {"client": TrainsInPlace},
    "engines agree": {"client": DrawsGlobally},
    "needs no more than it says": {"server": SaysMean},
    "documents its options": {"server": FedAvgServer, "options": Undocumented},
    "equals fedavg when neutral": {"client": AlmostFedAvg, "neutral": {}},
}


@pytest.mark.parametrize("title", BROKEN)
def test_a_broken_method_fails_the_check_that_is_for_it(title: str) -> None:
    parts = {"options": FedAvgOptions, **BROKEN[title]}
    register(Method("broken", "a test", "nobody", **parts))
    assert methods()["broken"].name == "broken"
    with pytest.raises(AssertionError):
        CHECKS[title]("broken", {})


def test_what_a_resume_does_not_restore_is_named() -> None:
    register("forgetful")(Forgetful)
    with pytest.raises(AssertionError, match=r"resume does not restore Forgetful\._rounds_seen$"):
        CHECKS["resumes exactly"]("forgetful", {})


class SeldomAsks(FedAvgServer):
    """Asks client 3 in its eighth round, and alone."""

    def sample_clients(self, round: int) -> list[int]:
        return [3] if round == 7 else [client for client in range(8) if client != 3]


class NeverAsks(FedAvgServer):
    """Leaves client 3 out."""

    def sample_clients(self, round: int) -> list[int]:
        return [client for client in range(8) if client != 3]


def test_clients_that_are_seldom_asked_are_judged_when_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, server in (("seldom", SeldomAsks), ("never", NeverAsks)):
        register(Method(name, "a test", "nobody", options=FedAvgOptions, server=server))
    check = CHECKS["refuses what is not finite"]
    check("seldom", {})
    with pytest.raises(AssertionError, match="client 3 of 8 was not sampled in 16 rounds"):
        check("never", {})
    monkeypatch.setattr("fedloom.runs.round._find_update_fault", lambda *_: None)
    for name in ("seldom", "fedcluster", "fedavg"):
        with pytest.raises(AssertionError, match="was not rejected"):
            check(name, {})
