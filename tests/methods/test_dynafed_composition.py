"""Tests of DynaFed with servers of one or several models."""

import pytest
from torch import Tensor

from fedloom.core.layout import model_digest
from fedloom.errors import InputError
from fedloom.methods import compose
from fedloom.testing import CHECKS, check_method
from fedloom.testing.fixtures import build_small_run, simple_network
from tests.support.small_dynafed import refiner_of, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("title", CHECKS)
def test_conformance_where_it_synthesises_and_refines(title: str) -> None:
    """Vectors, batch norm, lost clients, resuming before and after the synthesis, all engines."""
    CHECKS[title]("dynafed", tiny())


@pytest.mark.exhaustive
def test_conformance_in_company() -> None:
    check_method("fedmr+fedprox+dynafed", tiny())


@pytest.mark.parametrize("name", ["fedcross", "fedmr", "fedcda", "scaffold", "indep"])
def test_it_refines_every_model_of_every_server(name: str) -> None:
    options = tiny()
    with build_small_run(f"{name}+dynafed", options, model=simple_network).engine_closed() as experiment:
        rounds, refiner, server = experiment.rounds, refiner_of(experiment), experiment.rounds.parts.server
        calls: list[tuple[int, str]] = []
        tune = refiner.fine_tune

        def spied(round: int, slot: int, row: Tensor) -> None:
            before = model_digest(row)
            tune(round, slot, row)
            assert model_digest(row) != before
            assert row.data_ptr() == server.models()[slot].data_ptr(), "in place"
            calls.append((slot, model_digest(row)))

        refiner.fine_tune = spied  # type: ignore[method-assign]
        for round in range(4):
            rounds.run_round(round)
        count = len(server.models())
        assert [slot for slot, _ in calls] == list(range(count)) * 2
        assert [row for _, row in calls[-count:]] == [model_digest(row) for row in server.models()]
        assert experiment.layout.is_finite(server.global_model())


@pytest.mark.parametrize("name", ["fedcross+dynafed", "fedcda+dynafed", "scaffold+dynafed"])
def test_it_resumes_exactly_in_company(name: str) -> None:
    options = {**tiny(), **({"fedcda": {"warmup": 1}} if "fedcda" in name else {})}
    CHECKS["resumes exactly"](name, options)


def test_two_refiners_are_refused() -> None:
    with pytest.raises(InputError, match="twice"):
        compose("dynafed+dynafed")
    assert compose("fedmr+fedprox+dynafed").owner("refiner").name == "dynafed"  # type: ignore[union-attr]
