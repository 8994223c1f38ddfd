"""The mean of four pixels, on any device the same as torch's."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.models.pooling import MeanPool2d, _Mean

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
