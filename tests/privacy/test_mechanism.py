"""Tests of clipping, private mean, client sampling and sources of noise."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from torch import Tensor

from fedloom.core.rng import RngStreams
from fedloom.core.tasks import ClientTask, ClientUpdate
from fedloom.privacy import PrivacyAccountant, PrivacyMechanism
from fedloom.privacy.mechanism import _clip_update, _default_delta, _SeededNoise, _SystemNoise, mechanism_base_model

WIDTH = 6
ROWS = arrays(np.float32, WIDTH, elements=st.floats(-1e4, 1e4, width=32)).map(torch.from_numpy)
CLIPS = st.floats(1e-3, 1e3)


def make(**values: Any) -> PrivacyMechanism:
    settings = {
        "clip": 1.0,
        "noise": 0.0,
        "num_clients": 20,
        "clients_per_round": 4,
        "source": _SeededNoise(RngStreams(0)),
    }
    settings |= {"account": PrivacyAccountant(0.0, 0.2, 1e-3)} | values
    return PrivacyMechanism(**settings)


def mean_of(privacy: PrivacyMechanism, base: Tensor, rows: list[Tensor], round: int = 0) -> Tensor:
    """The private mean of these models, in float64 so that nothing is rounded away."""
    updates = iter([ClientUpdate(ClientTask(client, base), row, 3 + client, 1.0, 2) for client, row in enumerate(rows)])
    return next(privacy.mean(round, base.double(), updates)).row


# Clipping


@given(ROWS, ROWS, CLIPS)
def test_no_update_is_longer_than_the_clip(row: Tensor, received: Tensor, clip: float) -> None:
    assert float(_clip_update(row, received, clip).norm()) <= clip * (1 + 1e-12)


@given(ROWS, ROWS, CLIPS)
def test_the_direction_of_an_update_is_kept(row: Tensor, received: Tensor, clip: float) -> None:
    way, cut = row.double() - received.double(), _clip_update(row, received, clip)
    assert torch.allclose(cut * way.norm(), way * cut.norm(), rtol=1e-9, atol=1e-9 * clip)
    assert float(cut @ way) >= 0
    if float(way.norm()) > clip:
        assert float(cut.norm()) == pytest.approx(clip, rel=1e-12)


@given(ROWS, ROWS)
def test_an_update_within_the_clip_is_not_touched(row: Tensor, received: Tensor) -> None:
    way = row.double() - received.double()
    assert torch.equal(_clip_update(row, received, float(way.norm()) + 1e-6), way)


def test_the_rows_themselves_are_left_alone() -> None:
    row, received = torch.ones(WIDTH) * 5, torch.ones(WIDTH)
    _clip_update(row, received, 0.1)
    assert torch.equal(row, torch.ones(WIDTH) * 5)
    assert torch.equal(received, torch.ones(WIDTH))


# The mean


@given(st.lists(ROWS, max_size=6), ROWS, CLIPS)
def test_the_mean_divides_by_the_number_that_was_expected(rows: list[Tensor], base: Tensor, clip: float) -> None:
    expected = base.double()
    for row in rows:
        way = row.double() - base.double()
        expected = expected + way * min(1.0, clip / max(float(way.norm()), 1e-300)) / 4
    assert torch.allclose(mean_of(make(clip=clip), base, rows), expected, rtol=1e-12, atol=1e-9)


@given(st.lists(ROWS, min_size=1, max_size=6), ROWS, ROWS, CLIPS)
def test_one_client_more_or_less_moves_the_mean_by_no_more_than_its_share(
    rows: list[Tensor], base: Tensor, other: Tensor, clip: float
) -> None:
    privacy = make(clip=clip)
    without, with_one = mean_of(privacy, base, rows[1:]), mean_of(privacy, base, rows)
    changed = mean_of(privacy, base, [other, *rows[1:]])
    rounding = 1e-12 * (1 + float(base.double().norm()))
    assert float((with_one - without).norm()) <= clip / 4 + rounding
    assert float((with_one - changed).norm()) <= 2 * clip / 4 + rounding


def test_samples_do_not_count() -> None:
    base, row = torch.zeros(2), torch.tensor([0.5, 0.0])
    means = [
        next(make().mean(0, base, iter([ClientUpdate(ClientTask(0, base), row, samples, 1.0, 2)]))).row
        for samples in (1, 1000)
    ]
    assert torch.equal(*means)
    assert means[0].tolist() == [0.125, 0.0]


def test_the_server_is_handed_as_many_copies_as_clients_were_expected() -> None:
    for answers in (0, 2, 9):
        base = torch.zeros(3)
        updates = iter([ClientUpdate(ClientTask(client, base), torch.ones(3), 1, 1.0, 1) for client in range(answers)])
        copies = list(make(noise=1.0).mean(0, base, updates))
        assert len(copies) == 4
        assert all(copy.row is copies[0].row and copy.num_examples == 1 and copy.client_id < 0 for copy in copies)
        assert copies[0].row.dtype is torch.float32


def test_the_mean_is_rounded_once_at_its_end() -> None:
    """In float32 the small update of the second client would vanish beside the large weight."""
    base = torch.tensor([2.0**24], dtype=torch.float32)
    rows = [base + 2.0, base + 2.0, base + 2.0, base + 2.0]
    updates = iter([ClientUpdate(ClientTask(client, base), row, 1, 1.0, 1) for client, row in enumerate(rows)])
    assert next(make(clip=1.0).mean(0, base, updates)).row.item() == 2.0**24  # + 1, which float32 does not have
    assert mean_of(make(clip=1.0), base, rows).item() == 2.0**24 + 1


def test_where_nobody_is_asked_the_model_at_hand_is_the_base() -> None:
    models = torch.arange(6.0).view(2, 3)
    assert mechanism_base_model([], models).tolist() == [0.0, 1.0, 2.0]
    assert mechanism_base_model([ClientTask(3, models[1]), ClientTask(4, models[1])], models).tolist() == [
        3.0,
        4.0,
        5.0,
    ]


# Noise


def noise_in(privacy: PrivacyMechanism, answers: list[Tensor], width: int, round: int = 0) -> Tensor:
    base = torch.zeros(width, dtype=torch.float64)
    return mean_of(privacy, base, answers, round)


@pytest.mark.parametrize("source", [_SeededNoise(RngStreams(3)), _SystemNoise()], ids=["seed", "system"])
def test_the_noise_of_the_server_has_the_deviation_that_was_asked_for(source: Any) -> None:
    privacy = make(noise=1.5, clip=0.2, source=source)
    for rows in ([], [torch.zeros(40_000, dtype=torch.float64)] * 3):  # also where nobody answers
        drawn = noise_in(privacy, rows, 40_000)
        assert float(drawn.std()) == pytest.approx(1.5 * 0.2 / 4, rel=0.03)
        assert abs(float(drawn.mean())) < 5 * 1.5 * 0.2 / 4 / math.sqrt(40_000)


# Where draws come from


SOURCES: list[Callable[[int], np.ndarray]] = [
    lambda count: _SeededNoise(RngStreams(1)).normal(0, count),
    lambda count: _SystemNoise().normal(0, count),
]


@pytest.mark.parametrize("draw", SOURCES, ids=["seed", "system"])
def test_noise_is_normal(draw: Callable[[int], np.ndarray]) -> None:
    assert stats.kstest(draw(20_001), "norm").pvalue > 1e-4
    assert len(draw(1)) == 1
    assert abs(np.corrcoef(draw(20_000)[:10_000], draw(20_000)[10_000:])[0, 1]) < 0.05  # the two halves of Box-Muller


def test_draws_of_the_system_are_uniform_and_never_one() -> None:
    drawn = _SystemNoise().uniform(0, 50_000)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert stats.kstest(drawn, "uniform").pvalue > 1e-4


def test_draws_of_the_seed_repeat_and_belong_to_one_round() -> None:
    source = _SeededNoise(RngStreams(5))
    drawn = [tuple(source.normal(round, 3)) for round in range(4)]
    assert drawn == [tuple(_SeededNoise(RngStreams(5)).normal(round, 3)) for round in range(4)]
    assert len(set(drawn)) == 4


def test_draws_of_the_system_never_repeat() -> None:
    assert not np.array_equal(_SystemNoise().normal(0, 4), _SystemNoise().normal(0, 4))
    assert not make(noise=1.0, source=_SystemNoise()).repeatable
    assert make(noise=1.0).repeatable
    assert make(noise=0.0, source=_SystemNoise()).repeatable  # nothing is drawn


@pytest.mark.parametrize("source", [_SeededNoise(RngStreams(2)), _SystemNoise()], ids=["seed", "system"])
def test_every_client_takes_part_on_its_own_with_the_same_chance(source: Any) -> None:
    privacy = make(noise=1.0, num_clients=10, clients_per_round=3, source=source)
    cohorts = [privacy.sample_clients(round) for round in range(3000)]
    assert all(cohort == sorted(set(cohort)) for cohort in cohorts)
    asked = Counter(client for cohort in cohorts for client in cohort)
    assert all(abs(asked[client] / 3000 - 0.3) < 0.05 for client in range(10))
    sizes = np.array([len(cohort) for cohort in cohorts])
    assert sizes.var() == pytest.approx(10 * 0.3 * 0.7, rel=0.15)  # of a binomial; a fixed number would have none
    assert sizes.min() == 0
    both = np.mean([0 in cohort and 1 in cohort for cohort in cohorts])
    assert abs(both - 0.09) < 0.03


def test_all_are_asked_where_all_are_wanted() -> None:
    assert make(noise=1.0, num_clients=5, clients_per_round=5).sample_clients(0) == [0, 1, 2, 3, 4]


def test_delta_is_less_than_one_client() -> None:
    assert _default_delta(1000) == pytest.approx(1000**-1.1)
    assert 0 < _default_delta(1) < 1
