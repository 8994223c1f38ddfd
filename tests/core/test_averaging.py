"""Tests of weighted means of rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.core.averaging import WeightedMean, average_models
from fedloom.core.layout import Layout, TensorKind, model_digest
from tests.support.layout_networks import Odd, randomise, same_bits

# checking and naming rows


@given(st.data(), st.sampled_from([float("nan"), float("inf"), float("-inf")]))
@settings(deadline=None, max_examples=40)
def test_is_finite_sees_a_bad_float_anywhere(data: st.DataObject, bad: float) -> None:
    module = Odd()
    layout = Layout.of(module)
    row = layout.read(module)
    assert layout.is_finite(row)
    row[data.draw(st.integers(0, layout.floats - 1))] = bad
    assert not layout.is_finite(row)


def test_is_finite_is_not_fooled_by_integer_bytes() -> None:
    module = nn.BatchNorm1d(3)
    module.num_batches_tracked.fill_(0x7FC000007F800000)  # the bytes of a NaN and of an infinity
    layout = Layout.of(module)
    row = layout.read(module)
    assert not bool(row.isfinite().all())
    assert layout.is_finite(row)
    assert int(layout.state_dict(row)["num_batches_tracked"]) == 0x7FC000007F800000


@given(st.integers(0, 31), st.integers(0, 8))
@settings(deadline=None, max_examples=30)
def test_digest_changes_with_one_bit(bit: int, place: int) -> None:
    row = torch.arange(9, dtype=torch.float32)
    other = row.clone()
    other.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert model_digest(row) == model_digest(row.clone())
    assert model_digest(other) != model_digest(row)


def test_digest_is_pinned() -> None:
    assert model_digest(torch.zeros(2)) == "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc"


# the mean


def model_rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Layout, list[Tensor]]:
    module = Odd().to(dtype)
    layout = Layout.of(module)
    rows = []
    for index in range(count):
        randomise(module, seed + index)
        rows.append(layout.read(module))
    return layout, rows


def mean_of(layout: Layout, rows: list[Tensor], weights: list[float]) -> Tensor:
    mean = WeightedMean(layout)
    for row, weight in zip(rows, weights, strict=True):
        mean.add(row, weight)
    target = layout.empty()
    assert mean.write_to(target)
    return target


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=9, max_size=9),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=12),
)
@settings(deadline=None, max_examples=60)
def test_equal_rows_have_exactly_themselves_as_mean(values: list[float], weights: list[int]) -> None:
    layout = Layout.of(nn.Linear(2, 3))
    row = torch.tensor(values, dtype=torch.float32)
    double, third = Layout.of(nn.Linear(2, 3).double()), torch.tensor(values, dtype=torch.float64) / 3
    assert torch.equal(mean_of(double, [third] * len(weights), [float(w) for w in weights]), third)
    assert torch.equal(mean_of(layout, [row] * len(weights), [float(w) for w in weights]), row)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(any), st.randoms(), st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_mean_matches_float64_in_any_order(weights: list[int], random: object, seed: int) -> None:
    layout, rows = model_rows(len(weights), seed)
    got = mean_of(layout, rows, [float(w) for w in weights])
    floats = np.stack([row[: layout.floats].numpy() for row in rows]).astype(np.float64)
    expected = np.average(floats, axis=0, weights=weights)
    assert np.allclose(got[: layout.floats].numpy(), expected, rtol=1e-6, atol=1e-6)
    order = list(range(len(weights)))
    random.shuffle(order)  # type: ignore[attr-defined]
    other = mean_of(layout, [rows[i] for i in order], [float(weights[i]) for i in order])
    assert torch.allclose(other[: layout.floats], got[: layout.floats], rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(
        layout.views(got, TensorKind.INTEGER), layout.views(other, TensorKind.INTEGER), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_integers_take_the_largest_and_keep_their_dtype() -> None:
    layout, rows = model_rows(3)
    for row, mask, small, byte in zip(rows, ([0, 0, 1], [0, 1, 0], [0, 0, 0]), (-5, 3, -9), (1, 250, 7), strict=True):
        views = {e.name: e.view(row) for e in layout.entries}
        views["mask"].copy_(torch.tensor(mask))
        views["small"].fill_(small)
        views["byte"].fill_(byte)
        views["norm.num_batches_tracked"].fill_(2**40 + small)
    untouched = [row.clone() for row in rows]
    state = layout.state_dict(mean_of(layout, rows, [1.0, 2.0, 1.0]))
    assert state["mask"].tolist() == [False, True, True]
    assert state["small"].tolist() == [3, 3, 3]
    assert state["byte"].item() == 250
    assert state["norm.num_batches_tracked"].item() == 2**40 + 3
    assert [state[n].dtype for n in ("mask", "small", "byte")] == [torch.bool, torch.int32, torch.uint8]
    assert all(same_bits(a, b) for a, b in zip(rows, untouched, strict=True)), "the mean changes none of its rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_integers_of_one_type_are_seen_together(dtype: torch.dtype) -> None:
    module = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(5)), Odd(), nn.BatchNorm1d(3)).to(dtype)
    randomise(module, 0)
    layout = Layout.of(module)
    row = layout.read(module)
    found = layout.integers(row)
    assert [view.dtype for view in found] == [torch.int64, torch.bool, torch.int32, torch.uint8, torch.int64]
    expected = [view.flatten() for view in layout.views(row, TensorKind.INTEGER)]
    assert found[0].tolist() == torch.cat(expected[:5]).tolist(), "the counters of the first norms"
    assert found[1].tolist() == [*expected[5].tolist(), *[False] * 5], "filled up to eight bytes"
    assert found[4].tolist() == torch.cat(expected[-2:]).tolist()
    found[0][4] = 12345
    assert layout.state_dict(row)["4.num_batches_tracked"].item() == 12345


def test_weight_zero_is_ignored_even_when_not_finite() -> None:
    layout, (first, second, bad) = model_rows(3)
    bad[: layout.floats] = float("nan")
    layout.views(bad, TensorKind.INTEGER)[0].fill_(1)
    assert same_bits(mean_of(layout, [bad, first, second], [0, 1, 3]), mean_of(layout, [first, second], [1, 3]))


def test_no_weight_leaves_the_target_untouched() -> None:
    layout, (row, target) = model_rows(2)
    before = target.clone()
    mean = WeightedMean(layout)
    assert not mean.write_to(target)
    mean.add(row, 0.0)
    assert not mean.write_to(target)
    assert same_bits(target, before)


def test_negative_weights_are_refused() -> None:
    layout, (row,) = model_rows(1)
    with pytest.raises(ValueError, match="0 or more"):
        WeightedMean(layout).add(row, -1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_may_be_read_twice_and_go_on(dtype: torch.dtype) -> None:
    layout, (a, b, c) = model_rows(3, dtype=dtype)
    mean = WeightedMean(layout)
    mean.add(a, 2.0)
    mean.add(b, 1.0)
    first, second, third = (layout.empty() for _ in range(3))
    mean.write_to(first)
    mean.write_to(second)
    assert same_bits(first, second)
    mean.add(c, 3.0)
    mean.write_to(third)
    assert same_bits(third, mean_of(layout, [a, b, c], [2.0, 1.0, 3.0]))


def test_models_in_a_list_or_a_matrix_have_the_same_mean() -> None:
    layout, rows = model_rows(3)
    for weights in ([1.0, 2.0, 0.0], [1, 1, 1]):
        expected = mean_of(layout, rows, [float(weight) for weight in weights])
        assert same_bits(average_models(layout, rows, weights), expected)
        assert same_bits(average_models(layout, torch.stack(rows), weights), expected)
    assert same_bits(average_models(layout, rows), expected), "by default all weigh the same"
    with pytest.raises(ValueError, match="zip"):
        average_models(layout, rows, [1.0])
