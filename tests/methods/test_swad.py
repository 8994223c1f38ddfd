"""Tests of SWAD: start and end of averaging, the mean, equality with FedAvg."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core.averaging import WeightedMean
from fedloom.core.layout import Layout, TensorKind
from fedloom.core.tasks import ClientUpdate
from fedloom.methods.swad import SwadOptions, SwadValley
from fedloom.runs.build import BuiltRun
from fedloom.testing.fixtures import build_small_run, small_run
from fedloom.training.batches import Batch
from fedloom.training.trainer import LocalTrainer
from tests.support.task_rounds import in_round

LAYOUT = Layout.of(torch.nn.Linear(1, 1, bias=False))


def average(losses: list[float], **options: Any) -> tuple[float | None, SwadValley]:
    """The mean over segments that are the numbers 1, 2, ..., one for each check; None when there was none."""
    valley = SwadValley(WeightedMean(LAYOUT), SwadOptions(**options))
    for number, loss in enumerate(losses, 1):
        valley.check(torch.tensor([float(number)]), 1, loss)
        if valley.ended:
            break
    out = torch.full((1,), torch.nan)
    return (float(out) if valley.finish().write_to(out) else None), valley


def algorithm_1(losses: list[float], n_s: int, n_e: int, r: float) -> list[int]:
    """The paper's listing, word for word; the numbers of the checks from t_s to t_e."""
    t_s, t_e, bound = None, len(losses), None
    for i in range(1, len(losses) + 1):
        if bound is None:
            window = [losses[i - 1 - back] for back in range(n_s)] if i >= n_s else []
            if window and losses[i - n_s] == min(window):
                t_s, bound = i - n_s + 1, r * sum(window) / n_s
        elif bound < min(losses[max(0, i - n_e) : i]):
            t_e = i - n_e
            break
    return list(range(t_s, t_e + 1)) if t_s is not None else [len(losses)]


def test_the_papers_rule_by_hand() -> None:
    _, valley = average([5, 4, 3])
    assert valley.threshold is None
    _, valley = average([5, 4, 3, 3.1])
    assert valley.threshold is None
    mean, valley = average([5, 4, 3, 3.1, 3.2])
    assert valley.threshold == pytest.approx(4.03)
    assert mean == pytest.approx(4), "from the third check on: 3, 4, 5"


def test_it_ends_before_the_checks_that_are_all_above_the_bound() -> None:
    rising = [5, 4, 3, 3.1, 3.2, 4.1, 4.2, 4.3, 4.4, 4.5, 4.6, 4.7]
    mean, valley = average(rising)
    assert valley.ended
    assert mean == pytest.approx(4), "the six checks from the sixth on are above 4.03: 3, 4, 5 are left"
    mean, valley = average(rising[:10])
    assert not valley.ended
    assert mean == pytest.approx(6.5), "five are not enough: 3 to 10"
    mean, valley = average([*rising[:10], 4.0, *rising[10:]])
    assert not valley.ended, "one below the bound begins the count anew"


def test_where_nothing_starts_the_last_segment_is_returned() -> None:
    mean, valley = average([5.0, 4.0, 3.0, 2.0, 1.0])
    assert valley.threshold is None
    assert mean == 5
    assert average([])[0] is None


def test_segments_count_by_their_steps() -> None:
    valley = SwadValley(WeightedMean(LAYOUT), SwadOptions(optimum_patience=1))
    for number, steps in ((1.0, 3), (5.0, 1)):
        valley.check(torch.tensor([number]), steps, 1.0)
    out = torch.zeros(1)
    assert valley.finish().write_to(out)
    assert float(out) == pytest.approx(2.0)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=25), st.integers(1, 5), st.integers(1, 5), st.floats(1.0, 2.0))
@settings(max_examples=300, deadline=None)
def test_it_is_the_papers_listing(losses: list[int], n_s: int, n_e: int, r: float) -> None:
    found, _ = average(list(map(float, losses)), optimum_patience=n_s, overfit_patience=n_e, tolerance=r)
    inside = algorithm_1(list(map(float, losses)), n_s, n_e, r)
    assert found == pytest.approx(sum(inside) / len(inside), rel=1e-5)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=60), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_few_segments_are_held_at_once(losses: list[float], n_s: int, n_e: int) -> None:
    valley = SwadValley(WeightedMean(LAYOUT), SwadOptions(optimum_patience=n_s, overfit_patience=n_e))
    for loss in losses:
        valley.check(torch.zeros(1), 1, loss)
        assert len(valley._pending) <= max(n_s, n_e)
        if valley.ended:
            break


# on a client


def trace(experiment: BuiltRun, client: int = 1) -> tuple[ClientUpdate, list[Tensor]]:
    """A client's update, and the model after each of its steps."""
    local, rows = experiment.rounds.parts.client, []
    plain = local.training_step

    def noted(bench: LocalTrainer, batch: Batch) -> Tensor:
        loss = plain(bench, batch)
        rows.append(bench.row.clone())
        return loss

    local.training_step = noted
    (update,) = experiment.engine.train(in_round(0, list(experiment.rounds.parts.server.dispatch(0, [client]))))
    return update, rows


ALWAYS = {"optimum_patience": 1, "tolerance": 1e9}
"""Averaging starts at the first check and never ends."""


@pytest.mark.parametrize("checks", [1, 3, 1000])
def test_a_window_over_everything_is_the_mean_of_all_iterates(checks: int) -> None:
    options = {"swad": {**ALWAYS, "checks": checks, "estimate": False}}
    with build_small_run("fedavg", {}, epochs=4, validation=0.2).engine_closed() as experiment:
        _, iterates = trace(experiment)
    with build_small_run("swad", options, epochs=4).engine_closed() as experiment:
        update, rows = trace(experiment)
        layout = experiment.layout
        assert len(rows) == len(iterates) > 8
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(rows, iterates, strict=True)), "no feedback"
        mean = torch.stack(iterates)[:, : layout.floats].double().mean(0).float()
        torch.testing.assert_close(update.row[: layout.floats], mean, rtol=1e-5, atol=1e-6)
        pairs = (layout.views(row, TensorKind.INTEGER) for row in (update.row, iterates[-1]))
        assert all(torch.equal(mine, last) for mine, last in zip(*pairs, strict=True)), "counters are not averaged"


def test_the_last_segment_alone_is_averaged_where_nothing_starts() -> None:
    with build_small_run("swad", {"swad": {"optimum_patience": 1000, "checks": 2}}, steps=7).engine_closed() as held:
        update, rows = trace(held)
        trainable = held.layout.trainable
        mean = torch.stack(rows[-3:])[:, :trainable].double().mean(0).float()  # checks after steps 4 and 7
        torch.testing.assert_close(update.row[:trainable], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("checks", "checked"), [(32, [1, 2, 3, 4, 5, 6]), (3, [2, 4, 6])])
def test_the_checks_are_of_the_iterates_on_what_is_held_out(checks: int, checked: list[int]) -> None:
    """Of the last one of a segment, and not of its mean."""
    with build_small_run("swad", {"swad": {"checks": checks}}, steps=6, lr=0.3).engine_closed() as experiment:
        bench, scores = experiment.engine._trainer, []
        plain = bench.validate

        def noted(row: Tensor) -> Any:
            scores.append((row.clone(), plain(row)))
            return scores[-1][1]

        bench.validate = noted
        _, rows = trace(experiment)
        held = experiment.data.federated_data.client_samples(1)
        assert [score.count for _, score in scores] == [int(0.2 * len(held) + 0.5)] * len(checked)
        iterates = [rows[step - 1] for step in checked]
        assert all(torch.equal(scored, row) for (scored, _), row in zip(scores, iterates, strict=True))


def test_training_stops_when_the_end_is_seen() -> None:
    options = {"swad": {"optimum_patience": 1, "overfit_patience": 1, "tolerance": 1.0}}
    with build_small_run("swad", options, steps=200, lr=2.0).engine_closed() as experiment:
        update, rows = trace(experiment)
        assert update.steps == len(rows) < 200


def test_weights_that_stand_still_stay_exactly_as_they_are() -> None:
    for options in (ALWAYS, {}, {**ALWAYS, "checks": 2}):
        with build_small_run("swad", {"swad": options}, lr=0.0, epochs=3).engine_closed() as experiment:
            update, rows = trace(experiment)
            assert len(rows) > 5
            trainable = experiment.layout.trainable
            assert torch.equal(update.row[:trainable], experiment.rounds.context.initial[:trainable])


def test_without_a_start_and_a_split_it_is_fedavg_bit_for_bit() -> None:
    never = {"optimum_patience": 10**9, "checks": 10**9}
    nothing = {"swad": {**never, "validation": 0.0}}
    assert small_run("swad", nothing, epochs=2).digest == small_run("fedavg", {}, epochs=2).digest
    split = small_run("fedavg", {}, epochs=2, validation=0.2).digest
    assert small_run("swad", {"swad": never}, epochs=2).digest == split
    assert small_run("swad", {}, epochs=2, validation=0.2).digest != split
