"""Networks for tests of layouts."""

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.core.layout import model_digest


class Odd(nn.Module):
    """A bit of everything: scalars, buffers of several kinds, a frozen weight, an empty module."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Identity()
        self.body = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("small", torch.tensor([-7, 9, 11], dtype=torch.int32))
        self.register_buffer("byte", torch.tensor(200, dtype=torch.uint8))
        self.register_buffer("void", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("cache", torch.full((2,), 3.0), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x)) * self.scale + self.cache.sum()


class Tied(nn.Module):
    """One Parameter under two names, and one submodule (with buffers) under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4, bias=False)
        self.outof = nn.Linear(4, 4)
        self.outof.weight = self.into.weight
        self.first = nn.BatchNorm1d(4)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.outof(self.first(self.into(x))))


def randomise(module: nn.Module, seed: int) -> None:
    """Other values in every tensor, frozen and non-persistent ones included."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in {id(t): t for t in [*module.parameters(), *module.buffers()]}.values():
        if tensor.is_floating_point():
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
        else:
            tensor.data.copy_(torch.randint(0, 100, tensor.shape, generator=generator))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and model_digest(a.reshape(-1)) == model_digest(b.reshape(-1))


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    """A random chain of layers of all kinds, sometimes frozen, tied, nested or in float64."""
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 5))):
        width = draw(st.integers(1, 5))
        kind = draw(st.integers(0, 7))
        layer: nn.Module
        if kind == 0:
            layer = nn.Conv2d(width, draw(st.integers(1, 3)), (3, 2), bias=draw(st.booleans()))
        elif kind == 1:
            layer = nn.BatchNorm2d(width, affine=draw(st.booleans()))
        elif kind == 2:
            layer = nn.Sequential(nn.ReLU(), nn.Sequential(), nn.Linear(width, 2))
        elif kind == 3 and layers:
            layer = layers[draw(st.integers(0, len(layers) - 1))]
        elif kind == 4:
            layer = Odd()
        elif kind == 5:
            layer = nn.LSTM(width, 2)
        elif kind == 6:
            layer = Tied()
        else:
            layer = nn.Linear(width, 3)
        if draw(st.integers(0, 4)) == 0:
            layer.requires_grad_(False)
        layers.append(layer)
    module = nn.Sequential(nn.Linear(1, 1), *layers)
    return module.double() if draw(st.booleans()) else module
