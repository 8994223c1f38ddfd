"""The mean and the largest of four pixels, on any device the same as torch's."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.models.pooling import LargestPool2d, MeanPool2d, _Largest, _Mean

SIZES = [(2, 2), (4, 6), (5, 4), (6, 7), (3, 3)]
POOLS: dict[str, tuple[Callable[[Tensor], Tensor], nn.Module, Callable[[Tensor], Tensor]]] = {
    "mean": (_Mean.apply, MeanPool2d(), lambda x: F.avg_pool2d(x, 2)),
    "largest": (_Largest.apply, LargestPool2d(), lambda x: F.max_pool2d(x, 2)),
}
both = pytest.mark.parametrize("kind", POOLS)


def third(pool: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Output, gradient, and the gradient of a function of the gradient, as dataset synthesis needs them."""
    x = x.clone().requires_grad_()
    output = pool(x)
    (first,) = torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return [output.detach(), first.detach(), second]


@both
@pytest.mark.parametrize("size", SIZES)
def test_it_is_torchs_to_the_last_bit(kind: str, size: tuple[int, int]) -> None:
    x = torch.randn(3, 4, *size, generator=torch.Generator().manual_seed(0))
    fast, module, torchs = POOLS[kind]
    for pool in (fast, module):
        for ours, theirs in zip(third(pool, x), third(torchs, x), strict=True):
            assert torch.equal(ours, theirs)


@given(st.integers(2, 7), st.integers(2, 7), st.integers(0, 2**31))
def test_of_equal_pixels_the_same_one_is_the_largest(height: int, width: int, seed: int) -> None:
    values = torch.tensor([-1.0, 0.0, 1.0, float("inf"), float("-inf")])
    x = values[torch.randint(0, 5, (2, 2, height, width), generator=torch.Generator().manual_seed(seed))]
    x.requires_grad_()
    g = torch.randn(2, 2, height // 2, width // 2)
    ours, theirs = (torch.autograd.grad(pool(x), x, g)[0] for pool in (_Largest.apply, POOLS["largest"][2]))
    assert torch.equal(ours, theirs)


@both
@pytest.mark.parametrize("size", SIZES)
def test_its_gradients_are_right(kind: str, size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(POOLS[kind][0], x)
    assert torch.autograd.gradgradcheck(POOLS[kind][0], x)


@both
def test_gradients_in_any_order_are_taken(kind: str) -> None:
    """Such as those of a layer after it that works on transposed images."""
    fast, _, torchs = POOLS[kind]
    x = torch.randn(2, 3, 4, 6)
    assert torch.equal(*(third(lambda x, p=pool: p(x).transpose(2, 3), x)[1] for pool in (fast, torchs)))
    assert torch.equal(*(third(lambda x, p=pool: p(x)[:, :1].expand(2, 3, 2, 3), x)[1] for pool in (fast, torchs)))


@both
def test_what_is_not_contiguous_stays_in_its_order(kind: str) -> None:
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert POOLS[kind][1](x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@both
@pytest.mark.parametrize("size", [*SIZES, (32, 32)])
def test_on_a_gpu_it_is_torchs_to_the_last_bit(kind: str, size: tuple[int, int]) -> None:
    x = torch.randn(50, 4, *size, device="cuda").round(decimals=1)  # many are equal
    for ours, theirs in zip(third(POOLS[kind][1], x), third(POOLS[kind][2], x), strict=True):
        assert torch.equal(ours, theirs)
    x.requires_grad_()
    assert "Backward" in type(POOLS[kind][1](x).grad_fn).__name__
    assert type(POOLS[kind][1](x).grad_fn).__name__ != type(POOLS[kind][2](x).grad_fn).__name__, "the fast way"
