"""Tests of inner products and cosine distances against numpy and longer floats."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedloom.core import similarity
from fedloom.core.similarity import cosine_distances, inner_products, squared_euclidean_distances

COUNTS = st.integers(1, 6)
WIDTHS = st.integers(3, 40)
SEEDS = st.integers(0, 2**32 - 1)
quick = settings(deadline=None, max_examples=50)


def rows_of(seed: int, count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def gaps_of(rows: Tensor, reference: int = 0) -> Tensor:
    return torch.from_numpy(cosine_distances(inner_products(rows, rows[reference], slice(0, rows.shape[1])).numpy()))


def true_gaps(rows: Tensor) -> np.ndarray:
    """1 - cosine as half the squared distance of the directions, in the longest floats there are."""
    long = rows.numpy().astype(np.longdouble)
    long /= np.sqrt((long**2).sum(1, keepdims=True))
    return ((long[:, None] - long[None]) ** 2).sum(2) / 2


@quick
@given(SEEDS, COUNTS, WIDTHS, st.data())
def test_products_are_those_of_the_differences_and_the_reference(
    seed: int, count: int, width: int, data: st.DataObject
) -> None:
    rows, reference = rows_of(seed, count, width), rows_of(seed + 1, 1, width)[0]
    start = data.draw(st.integers(0, width - 1))
    columns = slice(start, data.draw(st.integers(start, width)))
    wide = np.vstack([rows.double() - reference.double(), reference.double()[None]])[:, columns]
    found = inner_products(rows, reference, columns)
    assert found.dtype is torch.float64
    np.testing.assert_allclose(found.numpy(), wide @ wide.T, rtol=1e-12, atol=1e-12)


@quick
@given(SEEDS, COUNTS, WIDTHS)
def test_squared_distances_are_those_of_the_rows(seed: int, count: int, width: int) -> None:
    rows = rows_of(seed, count, width)
    wide = rows.double().numpy()
    found = squared_euclidean_distances(inner_products(rows, rows[0], slice(0, width)).numpy())
    np.testing.assert_allclose(found, _squared(wide), atol=1e-9)


def _squared(rows: np.ndarray) -> np.ndarray:
    return ((rows[:, None] - rows[None]) ** 2).sum(2)


@pytest.mark.parametrize("width", [255, 256, 257, 1000])
def test_long_rows_are_taken_in_pieces(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = rows_of(0, 3, width + 5), slice(3, width + 3)
    last = rows_of(1, 1, width)[0]
    for vector in (None, last):
        whole = inner_products(rows, rows[1], columns, vector)
        with monkeypatch.context() as patch:
            patch.setitem(similarity.BLOCK_BYTES, "cpu", 0)  # as little as it ever takes
            pieces = inner_products(rows, rows[1], columns, vector)
        torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)


class Products(TorchDispatchMode):
    """Counts how many products there are at once."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.at_once: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.made.append(weakref.ref(out))
            self.at_once.append(sum(product() is not None for product in self.made))
        return out


def test_pieces_are_added_up_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedCDA has hundreds of rows, and networks hundreds of pieces: all products together would be gigabytes."""
    monkeypatch.setitem(similarity.BLOCK_BYTES, "cpu", 0)
    rows = rows_of(0, 3, 256 * 10)
    with Products() as products:
        inner_products(rows, rows[0], slice(0, 256 * 10))
    assert len(products.made) == 10
    assert max(products.at_once) <= 3, "the sum, the one before and this one"


@quick
@given(SEEDS, COUNTS, WIDTHS, st.integers(0, 2))
def test_another_vector_may_be_the_last(seed: int, count: int, width: int, start: int) -> None:
    rows, reference, columns = rows_of(seed, count, width), rows_of(seed + 1, 1, width)[0], slice(start, width)
    last = rows_of(seed + 2, 1, width - start)[0]
    wide = np.vstack([(rows.double() - reference.double())[:, columns], last.double()[None]])
    found = inner_products(rows, reference, columns, extra_vector=last)
    np.testing.assert_allclose(found.numpy(), wide @ wide.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spread", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("seed", range(10))
def test_a_reference_far_from_the_others_does_not_disturb_their_order(spread: float, seed: int) -> None:
    rows = torch.cat([rows_of(seed, 1, 500), rows_of(seed + 100, 1, 500) + spread * rows_of(seed + 200, 5, 500)])
    wide = rows.numpy().astype(np.float64)
    unit = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    exact, found = 1 - unit @ unit.T, gaps_of(rows).numpy()
    for i in range(1, 6):
        others = [j for j in range(6) if j != i]
        assert min(others, key=lambda j: found[i, j]) == min(others, key=lambda j: exact[i, j])


@quick
@given(SEEDS, COUNTS, WIDTHS)
def test_gaps_agree_with_a_cosine_in_numpy(seed: int, count: int, width: int) -> None:
    rows = rows_of(seed, count, width)
    wide = rows.numpy().astype(np.float64)
    norms = np.sqrt((wide**2).sum(1))
    np.testing.assert_allclose(1 - gaps_of(rows).numpy(), wide @ wide.T / np.outer(norms, norms), atol=1e-9)


@quick
@given(SEEDS, COUNTS, WIDTHS)
def test_a_row_is_exactly_like_itself_and_likeness_is_mutual(seed: int, count: int, width: int) -> None:
    gaps = gaps_of(rows_of(seed, count, width))
    assert torch.equal(gaps.diagonal(), torch.zeros(count, dtype=torch.float64))
    torch.testing.assert_close(gaps, gaps.T, rtol=1e-10, atol=1e-13)
    assert bool((gaps >= 0).all())
    assert bool((gaps <= 2 + 1e-9).all())


@quick
@given(SEEDS, COUNTS, WIDTHS, st.data())
def test_lengths_do_not_matter(seed: int, count: int, width: int, data: st.DataObject) -> None:
    rows = rows_of(seed, count, width)
    scales = torch.tensor(data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0, 4.0]), min_size=count, max_size=count)))
    torch.testing.assert_close(gaps_of(rows * scales[:, None]), gaps_of(rows), rtol=1e-8, atol=1e-9)


@quick
@given(SEEDS, st.integers(2, 6), WIDTHS, st.data())
def test_any_reference_among_the_rows_gives_the_same_gaps(
    seed: int, count: int, width: int, data: st.DataObject
) -> None:
    rows = rows_of(seed, count, width)
    other = data.draw(st.integers(1, count - 1))
    torch.testing.assert_close(gaps_of(rows, other), gaps_of(rows), rtol=1e-8, atol=1e-9)


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.integers(3, 6))
def test_nearly_parallel_rows_are_ranked_rightly(seed: int, count: int) -> None:
    """Relative distances of 1e-5, gaps of 1e-10: all digits that decide are still there."""
    rows = rows_of(seed, 1, 2000) + 1e-5 * rows_of(seed + 1, count, 2000)
    gaps, wanted = gaps_of(rows).numpy(), true_gaps(rows)
    others = ~np.eye(count, dtype=bool)
    np.testing.assert_allclose(gaps[others], wanted[others].astype(np.float64), rtol=1e-8)
    for i in range(count):
        assert gaps[i].argmax() == wanted[i].argmax()
        assert np.where(others[i], gaps[i], 9).argmin() == np.where(others[i], wanted[i], 9).argmin()


def test_where_a_short_cosine_no_longer_can() -> None:
    """What the careful arithmetic is for: in float32 these cosines are rounding errors, and so is their order."""
    wrong = 0
    for seed in range(20):
        rows = rows_of(seed, 1, 2000) + 1e-5 * rows_of(seed + 100, 5, 2000)
        units = rows / rows.norm(dim=1, keepdim=True)
        naive = 1 - units @ units.T
        wanted = true_gaps(rows)
        wrong += int((naive.numpy().argmax(1) != wanted.argmax(1)).any())
        assert (gaps_of(rows).numpy().argmax(1) == wanted.argmax(1)).all()
    assert wrong >= 15


def test_stacked_products_give_the_gaps_of_each() -> None:
    grams = [
        inner_products(rows, rows[0], slice(0, 30)).numpy() for rows in (rows_of(seed, 4, 30) for seed in range(3))
    ]
    np.testing.assert_array_equal(
        cosine_distances(np.stack(grams)), np.stack([cosine_distances(gram) for gram in grams])
    )


def test_rows_of_zeros_are_alike_and_unlike_all_others() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [-3.0, -4.0], [4.0, -3.0]])
    wanted = [[0, 1, 1, 2, 1], [1, 0, 0, 1, 1], [1, 0, 0, 1, 1], [2, 1, 1, 0, 1], [1, 1, 1, 1, 0]]
    for reference in range(5):
        torch.testing.assert_close(gaps_of(rows, reference), torch.tensor(wanted, dtype=torch.float64))
