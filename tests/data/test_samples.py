"""Tests of stored samples and their transform to network input."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import InputTransform, Samples
from fedloom.errors import InputError


def images(n: int, height: int, width: int, channels: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, height, width, channels), dtype=torch.uint8, generator=generator)


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(0, 4),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    constants=st.lists(st.tuples(st.floats(-2, 2), st.floats(0.05, 2)), min_size=1, max_size=4),
    channels_last=st.booleans(),
)
def test_prepare_is_the_formula(
    n: int, height: int, width: int, constants: list[tuple[float, float]], channels_last: bool
) -> None:
    mean, std = (tuple(column) for column in zip(*constants, strict=True))
    x = images(n, height, width, len(constants))
    out = InputTransform(mean, std)(x, channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert out.dtype == torch.float32
    assert out.is_contiguous(memory_format=layout)
    expected = (x.double() / 255 - torch.tensor(mean).double()) / torch.tensor(std).double()
    torch.testing.assert_close(out.double(), expected.permute(0, 3, 1, 2), rtol=1e-5, atol=1e-4)


def test_both_memory_formats_have_the_same_bits_and_the_store_is_left_alone() -> None:
    prepare, x = InputTransform((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)), images(5, 8, 9, 3)
    before = x.clone()
    assert torch.equal(prepare(x), prepare(x, channels_last=True))
    assert torch.equal(prepare(x), prepare(x))  # its constants survive being used
    assert torch.equal(x, before)


def test_prepare_takes_a_batch_that_is_a_view() -> None:
    prepare, x = InputTransform((0.3, 0.2), (0.5, 0.4)), images(6, 5, 4, 2)
    for channels_last in (False, True):
        expected = prepare(x[::2, :, 1:3].contiguous(), channels_last)
        assert torch.equal(prepare(x[::2, :, 1:3], channels_last), expected)


def test_identity_only_changes_the_memory_format() -> None:
    prepare, x = InputTransform.identity(), torch.randn(3, 2, 5, 4)
    assert torch.equal(prepare(x), x)
    assert prepare(x, channels_last=True).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(prepare(x, channels_last=True), x)
    rows = torch.randn(3, 7, dtype=torch.float64)
    assert torch.equal(prepare(rows, channels_last=True), rows.float())


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, dtype=torch.uint8), images(2, 4, 4, 1)])
def test_prepare_refuses_what_is_not_its_kind_of_image(x: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"expected uint8 images, n x height x width x 3"):
        InputTransform.unit(3)(x)


@pytest.mark.parametrize(("mean", "std"), [((0.1,), ()), ((0.1,), (0.0,)), ((0.1,), (float("nan"),))])
def test_prepare_refuses_impossible_constants(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    with pytest.raises(InputError, match="positive std for each channel"):
        InputTransform(mean, std)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=20))
def test_take_gives_the_samples_in_the_order_asked_for(index: list[int]) -> None:
    samples = Samples(images(10, 2, 2, 1), torch.arange(10))
    taken = samples.take(np.array(index, dtype=np.int64))
    assert taken.y.tolist() == index
    assert len(taken) == len(index)
    assert all(torch.equal(x, samples.x[i]) for x, i in zip(taken.x, index, strict=True))


def test_samples_must_pair_up() -> None:
    with pytest.raises(InputError, match=r"\(3, 2\) and labels of shape \(2,\)"):
        Samples(torch.zeros(3, 2), torch.zeros(2))
