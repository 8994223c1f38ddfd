"""Tests of DynaFed's rounds: trajectory, synthesis, fine-tuning.

They include the case in which it equals FedAvg.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core.layout import model_digest
from fedloom.methods.dynafed import DynaFedRefiner
from fedloom.testing.fixtures import build_small_run, simple_network, small_run
from tests.support.small_dynafed import refiner_of, samples_of, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("options", "equal", "differ"),
    [({}, 3, 4), ({"initial": False}, 3, 4), ({"refine_at_synthesis": True}, 2, 3)],
    ids=["paper", "without the initial model", "code"],
)
def test_before_it_fine_tunes_it_is_fedavg_bit_for_bit(options: dict[str, Any], equal: int, differ: int) -> None:
    """With L = 3: Algorithm 2 synthesises in round 3 and fine-tunes from round 4 on; the code already in round 3."""
    for rounds in (equal, differ):
        mine = small_run("dynafed", tiny(L=3, **options), rounds=rounds, model=simple_network).digest
        plain = small_run("fedavg", {}, rounds=rounds, model=simple_network).digest
        assert (mine == plain) == (rounds == equal), rounds


def test_without_epochs_it_is_fedavg_for_ever() -> None:
    mine, plain = (
        small_run(name, options, rounds=5, model=simple_network)
        for name, options in (("dynafed", tiny(refine_epochs=0)), ("fedavg", {}))
    )
    assert mine.digest == plain.digest
    assert mine.records[1]["diagnostics"]["refiner.inner rate"] > 0, "samples were made all the same"


@pytest.mark.parametrize(
    ("refine_at_synthesis", "rounds", "told"), [(False, 3, True), (False, 4, False), (True, 3, False)]
)
def test_a_run_too_short_for_it_is_told_so(refine_at_synthesis: bool, rounds: int, told: bool) -> None:
    with build_small_run(
        "dynafed", tiny(L=3, refine_at_synthesis=refine_at_synthesis), model=simple_network, rounds=rounds
    ).engine_closed() as e:
        assert bool(e.notes) == told
        assert all("refines from round 4 on (dynafed.L is 3), and this run has 3" in note for note in e.notes)
    equal = small_run(
        "dynafed", tiny(L=3, refine_at_synthesis=refine_at_synthesis), rounds=rounds, model=simple_network
    ).digest
    assert (equal == small_run("fedavg", {}, rounds=rounds, model=simple_network).digest) == told


def test_in_company_it_does_not_call_the_rounds_before_it_fedavg() -> None:
    with build_small_run("fedcross+dynafed", tiny(L=3), model=simple_network, rounds=3).engine_closed() as e:
        (note,) = e.notes
    assert note.endswith("until then it changes nothing.")


def test_the_trajectory_is_the_deployed_models_each_a_copy() -> None:
    with build_small_run("dynafed", tiny(L=4), model=simple_network).engine_closed() as experiment:
        refiner, server = refiner_of(experiment), experiment.rounds.parts.server
        expected = [model_digest(experiment.rounds.context.initial)]
        for round in range(3):
            experiment.rounds.run_round(round)
            expected.append(model_digest(server.global_model()))
            server.models().add_(1.0)  # what happens to the model later must not reach the trajectory
        assert [model_digest(row) for row in refiner.trajectory] == expected
        assert len(set(expected)) == 4


def test_without_the_initial_model_the_trajectory_is_one_round_later() -> None:
    with build_small_run("dynafed", tiny(L=3, initial=False), model=simple_network).engine_closed() as experiment:
        refiner, server, lengths = refiner_of(experiment), experiment.rounds.parts.server, []
        seen: list[Tensor] = []
        refiner.synthesize = lambda: lengths.append(list(refiner.trajectory)) or DynaFedRefiner.synthesize(refiner)  # type: ignore[func-returns-value, method-assign]
        for round in range(3):
            experiment.rounds.run_round(round)
            seen.append(server.global_model().clone())
        assert len(lengths) == 1
        assert all(torch.equal(a, b) for a, b in zip(lengths[0], seen, strict=True))


def test_it_synthesises_once_and_keeps_what_it_made() -> None:
    with build_small_run("dynafed", tiny(), model=simple_network, rounds=5).engine_closed() as experiment:
        refiner, made = refiner_of(experiment), []
        for round in range(5):
            experiment.rounds.run_round(round)
            made.append(
                None if refiner.images is None else [model_digest(t.flatten()) for t in samples_of(refiner).tensors()]
            )
        assert made[0] is None
        assert made[1] is not None
        assert made[1:] == [made[1]] * 4
        assert refiner.trajectory == [], "it is not needed any more"


def test_a_round_without_an_answer_neither_counts_nor_refines() -> None:
    with build_small_run("dynafed", tiny(), model=simple_network, failure_rate=0.999999).engine_closed() as experiment:
        before = model_digest(experiment.rounds.parts.server.global_model())
        for round in range(4):
            experiment.rounds.run_round(round)
        refiner = refiner_of(experiment)
        assert (refiner.seen, refiner.images, len(refiner.trajectory)) == (0, None, 1)
        assert model_digest(experiment.rounds.parts.server.global_model()) == before
    with build_small_run("dynafed", tiny(), model=simple_network).engine_closed() as experiment:
        rounds, server = experiment.rounds, experiment.rounds.parts.server
        for round in range(3):
            rounds.run_round(round)
        before = model_digest(server.global_model())
        refiner_of(experiment).refine(3, server)
        assert model_digest(server.global_model()) == before
