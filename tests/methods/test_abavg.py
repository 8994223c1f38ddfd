"""Tests of ABAVG: weights by accuracy on the server's samples."""

import pytest
import torch

from fedloom.core.averaging import WeightedMean
from fedloom.data import Samples
from fedloom.testing.fixtures import SmallFederatedDataset
from tests.support.proxy_data import always, answers, noisy, play, put_together


def labelled(labels: list[int]) -> Samples:
    """Samples of the small federation with these labels."""
    data = SmallFederatedDataset().server_data
    assert data is not None
    y = torch.tensor(labels)
    return Samples(data.x[torch.arange(len(y)) % len(data)], y)


def test_the_weights_are_the_accuracies_on_the_whole_set() -> None:
    """Of 600 samples, more than are scored at once, 450 have label 0 and then 150 label 1: weights 3 to 1."""
    with put_together("abavg", {}, server_data=labelled([0] * 450 + [1] * 150)) as experiment:
        rows = [always(experiment, label) for label in (0, 1)]
        merged = play(experiment, answers(experiment, rows, [1, 99]))
        assert torch.allclose(merged, 0.75 * rows[0] + 0.25 * rows[1])
        numbers = experiment.rounds.parts.server.diagnostics()
        assert numbers == {"lowest accuracy": 0.25, "highest accuracy": 0.75}


def test_samples_count_too_if_asked_for() -> None:
    with put_together("abavg", {"samples": True}, server_data=labelled([0] * 30 + [1] * 10)) as experiment:
        rows = [always(experiment, label) for label in (0, 1)]
        merged = play(experiment, answers(experiment, rows, [1, 5]))
        assert torch.allclose(merged, 3 / 8 * rows[0] + 5 / 8 * rows[1])


def test_equal_accuracies_are_the_uniform_mean_bit_for_bit() -> None:
    """Small steps from one model say the same of clear samples."""
    with put_together("abavg", {}) as experiment:
        rows = noisy(experiment, 5, scale=1e-7)
        uniform = WeightedMean(experiment.layout)
        for row in rows:
            uniform.add(row)
        expected = torch.empty_like(rows[0])
        uniform.write_to(expected)
        merged = play(experiment, answers(experiment, rows, [3, 1, 4, 1, 5]))
        numbers = experiment.rounds.parts.server.diagnostics()
        assert numbers["lowest accuracy"] == numbers["highest accuracy"] > 0
        assert torch.equal(merged, expected)


@pytest.mark.parametrize("useless", [0, 1, 2])
def test_a_model_that_gets_nothing_right_has_no_weight(useless: int) -> None:
    with put_together("abavg", {}, server_data=labelled([0, 1, 0, 1])) as experiment:
        rows = [always(experiment, 0), always(experiment, 1)]
        expected = play(experiment, answers(experiment, rows))
        rows.insert(useless, always(experiment, 7))
        assert torch.equal(play(experiment, answers(experiment, rows)), expected)


def test_if_nobody_gets_anything_right_all_count_alike() -> None:
    with put_together("abavg", {}, server_data=labelled([0, 1, 0, 1])) as experiment:
        rows = [always(experiment, 7), always(experiment, 8)]
        merged = play(experiment, answers(experiment, rows, [1, 99]))
        assert torch.allclose(merged, (rows[0] + rows[1]) / 2)
