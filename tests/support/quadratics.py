"""Clients with quadratic losses, so that the optimum of their mean is known."""

import torch
from torch import Tensor, nn

from fedloom.data import FederatedDataset, Samples


class Quadratics(FederatedDataset):
    """Client k has f_k(v) = mean over its samples of |a (v - b)|^2 / 2, with a, b of its own."""

    classes = 0
    shape = (2,)
    name = "quadratics"
    slopes = torch.tensor([[1.0, 0.5], [2.0, 1.0], [0.5, 3.0]])
    optima = torch.tensor([[1.0, -1.0], [-2.0, 3.0], [4.0, 0.0]])

    def __len__(self) -> int:
        return 3

    def client_samples(self, client_id: int) -> Samples:
        x = self.slopes[client_id].repeat(4, 1)
        return Samples(x, x * self.optima[client_id])

    def minimiser(self) -> Tensor:
        curvature = self.slopes**2
        return (curvature * self.optima).sum(0) / curvature.sum(0)


class Point(nn.Module):
    """The model is the point v itself."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.v
