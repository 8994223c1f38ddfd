"""Tests of the evaluation of a model by a trainer, and of sums of results."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedloom.core.evaluation import EvaluationResult, evaluation_slices
from fedloom.data import Samples
from fedloom.training.trainer import LocalSteps
from tests.support.trainers import begin, make_bench, normed, numbered, sgd


def test_score_is_what_the_model_does_in_evaluation() -> None:
    bench = make_bench(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.9)))
    samples = Samples(torch.randn(20, 3), torch.arange(20) % 2)
    row = torch.randn(bench.layout.size)
    score = bench.evaluate(row, samples)
    weight, bias = row[:6].view(2, 3), row[6:8]
    output = samples.x @ weight.t() + bias
    right = output.argmax(1) == samples.y
    assert score.accuracy == pytest.approx(right.float().mean().item())
    assert score.loss == pytest.approx(F.cross_entropy(output, samples.y).item(), rel=1e-5)
    assert score.count_per_class.tolist() == [10, 10]
    assert score.correct_per_class.tolist() == [int(right[::2].sum()), int(right[1::2].sum())]
    assert score.count == 20


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any))
@settings(deadline=None, max_examples=30)
def test_scores_add_up_however_the_samples_are_cut(sizes: list[int]) -> None:
    bench = make_bench()
    total = sum(sizes)
    generator = torch.Generator().manual_seed(total)
    samples = Samples(torch.randn(total, 3, generator=generator), torch.randint(2, (total,), generator=generator))
    row = torch.randn(bench.layout.size, generator=generator)
    whole = bench.evaluate(row, samples)
    ends = np.cumsum([0, *sizes])
    pieces = [bench.evaluate(row, samples[a:b]) for a, b in pairwise(ends) if b > a]
    forward, backward = sum(pieces[1:], start=pieces[0]), sum(pieces[-2::-1], start=pieces[-1])
    for score in (forward, backward):
        assert score.count == total
        assert np.array_equal(score.correct_per_class, whole.correct_per_class)
        assert np.array_equal(score.count_per_class, whole.count_per_class)
        assert score.accuracy == whole.accuracy
        assert score.loss == pytest.approx(whole.loss, rel=1e-5)


@given(st.integers(0, 1700))
@settings(deadline=None, max_examples=30)
def test_score_chunks_cover_the_test_set_in_order(count: int) -> None:
    test = Samples(torch.zeros(count, 1), torch.zeros(count, dtype=torch.int64))
    covered = [index for chunk in evaluation_slices(test) for index in range(count)[chunk]]
    assert covered == list(range(count))


def test_a_score_without_classes_has_no_accuracy() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert EvaluationResult(6.0, 3, none, none).accuracy is None
    assert EvaluationResult(6.0, 3, none, none).loss == 2.0


def test_scoring_between_clients_does_not_change_training() -> None:
    bench = begin(make_bench(normed()), numbered(8), client=1)
    bench.run_steps(LocalSteps(sgd))
    alone = bench.row.clone()
    bench.evaluate(torch.ones_like(alone), numbered(4))
    begin(bench, numbered(8), client=1)
    bench.run_steps(LocalSteps(sgd))
    assert torch.equal(bench.row[: bench.layout.floats], alone[: bench.layout.floats])
