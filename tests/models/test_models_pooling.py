"""The mean and the largest of four pixels, on any device the same as torch's."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.models.pooling import LargestPool2d, MeanPool2d, PooledConv2d, _Largest, _largest, _Mean

SIZES = [(2, 2), (4, 6), (5, 4), (6, 7), (3, 3)]


def third(pool: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Output, gradient, and the gradient of a function of the gradient, as dataset synthesis needs them."""
    x = x.clone().requires_grad_()
    output = pool(x)
    (first,) = torch.autograd.grad(output.pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return [output.detach(), first.detach(), second]


@pytest.mark.parametrize("size", SIZES)
def test_it_is_torchs_to_the_last_bit(size: tuple[int, int]) -> None:
    x = torch.randn(3, 4, *size, generator=torch.Generator().manual_seed(0))
    wanted = third(lambda x: F.avg_pool2d(x, 2), x)
    for pool in (_Mean.apply, MeanPool2d()):
        for ours, theirs in zip(third(pool, x), wanted, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", SIZES)
def test_its_gradients_are_right(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_Mean.apply, x)
    assert torch.autograd.gradgradcheck(_Mean.apply, x)


def test_what_is_not_contiguous_stays_in_its_order() -> None:
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert MeanPool2d()(x).is_contiguous(memory_format=torch.channels_last)


def images(size: tuple[int, int], layout: torch.memory_format, dtype: torch.dtype = torch.float32) -> Tensor:
    """Some of whose neighbours are equal."""
    x = torch.randn(3, 4, *size, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return x.mul(2).round().div(2).to(memory_format=layout)


LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_the_largest_is_torchs_to_the_last_bit(size: tuple[int, int], layout: torch.memory_format) -> None:
    x = images(size, layout)
    wanted = third(lambda x: F.max_pool2d(x, 2), x)
    for pool in (lambda x: _largest(x, None), LargestPool2d()):
        for ours, theirs in zip(third(pool, x), wanted, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_a_bias_before_the_pool_is_torchs_too(size: tuple[int, int], layout: torch.memory_format) -> None:
    """Only the sum that is its gradient may be added up in another order."""
    x, bias, found = images(size, layout), torch.randn(4), []
    for pool in (_largest, lambda x, bias: F.max_pool2d(x + bias.view(-1, 1, 1), 2)):
        inputs = x.clone().requires_grad_(), bias.clone().requires_grad_()
        output = pool(*inputs)
        found.append([output, *torch.autograd.grad(output.pow(3).sum(), inputs)])
    (ours, spread, total), (theirs, their_spread, their_total) = found
    assert torch.equal(ours, theirs)
    assert torch.equal(spread, their_spread)
    assert spread.is_contiguous(memory_format=layout) or min(size) < 2
    torch.testing.assert_close(total, their_total)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_the_largest_are_right(size: tuple[int, int], layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, *size, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    bias = torch.randn(3, dtype=torch.float64, requires_grad=True)
    for given in ((x, bias), (x, bias.detach()), (x.detach(), bias)):
        assert torch.autograd.gradcheck(_Largest.apply, given)
        assert torch.autograd.gradgradcheck(_Largest.apply, given)


def test_a_pooled_convolution_is_a_convolution_and_a_pool() -> None:
    made: list[nn.Conv2d] = []
    for kind in (nn.Conv2d, PooledConv2d):
        torch.manual_seed(0)
        made.append(kind(3, 4, 5, padding=2))
    theirs, ours = made
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))
    x = torch.randn(2, 3, 9, 8)
    assert torch.equal(ours(x), F.max_pool2d(theirs(x), 2))
