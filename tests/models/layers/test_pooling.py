"""Tests of the mean and the maximum of four pixels against PyTorch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.models.layers.pooling import AvgPool2x2, MaxPool2x2, PooledConv2d, _largest, _Mean

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
    for pool in (_Mean.apply, AvgPool2x2()):
        for ours, theirs in zip(third(pool, x), wanted, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", SIZES)
def test_its_gradients_are_right(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_Mean.apply, x)
    assert torch.autograd.gradgradcheck(_Mean.apply, x)


def test_what_is_not_contiguous_stays_in_its_order() -> None:
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert AvgPool2x2()(x).is_contiguous(memory_format=torch.channels_last)


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
    for pool in (_largest, MaxPool2x2()):
        for ours, theirs in zip(third(pool, x), wanted, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_the_largest_are_right(size: tuple[int, int], layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, *size, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    assert torch.autograd.gradcheck(_largest, x)
    assert torch.autograd.gradgradcheck(_largest, x)
    assert _largest(x).is_contiguous(memory_format=layout)
    (spread,) = torch.autograd.grad(_largest(x).sum(), x)
    assert spread.is_contiguous(memory_format=layout)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_largest_can_be_transformed() -> None:
    """As where somebody wants a gradient for each sample."""
    x, w = torch.randn(5, 3, 6, 4), torch.randn(5, 3, 3, 2)

    def score(pool: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, w: (pool(x[None])[0] * w).pow(2).sum()

    ours, theirs = (torch.func.vmap(torch.func.grad(score(p)))(x, w) for p in (_largest, lambda x: F.max_pool2d(x, 2)))
    assert torch.equal(ours, theirs)


class OnAGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_a_pooled_convolution_is_a_convolution_and_a_pool(as_on_a_gpu: bool) -> None:
    made: list[nn.Conv2d] = []
    for kind in (nn.Conv2d, PooledConv2d):
        torch.manual_seed(0)
        made.append(kind(3, 4, 5, padding=2))
    theirs, ours = made
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))
    x = torch.randn(20, 3, 9, 8)
    outputs = ours(x.as_subclass(OnAGpu) if as_on_a_gpu else x), F.max_pool2d(theirs(x), 2)
    if as_on_a_gpu:  # on a CPU convolutions begin with the bias, and so round differently
        torch.testing.assert_close(outputs[0].as_subclass(Tensor), outputs[1])
    else:
        assert torch.equal(*outputs)
    gradients = [
        torch.autograd.grad(output.square().sum(), list(layer.parameters()))
        for output, layer in zip(outputs, (ours, theirs), strict=True)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one.as_subclass(Tensor), other)


@pytest.mark.parametrize("batched", [False, True])
def test_as_on_a_gpu_the_largest_is_torchs(batched: bool) -> None:
    x = images((6, 4), torch.contiguous_format)
    x = x if batched else x[0]
    wanted, found = third(nn.MaxPool2d(2), x), third(MaxPool2x2(), x.as_subclass(OnAGpu))
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.as_subclass(Tensor), theirs)
