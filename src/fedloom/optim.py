"""Optimisers over one flat row.

The same arithmetic as `torch.optim` (the tests compare bit for bit), on one vector instead of a list of tensors and
without its bookkeeping per step, which costs a tenth of the time of the MLP
(benchmarks/choices.py). State is rows too.
"""

from typing import Protocol

import torch
from torch import Tensor


class Optimizer(Protocol):
    """One step down `gradient`, which may be overwritten."""

    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> None: ...


class SGD:
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay."""

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> None:
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.velocity: Tensor | None = None

    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> None:
        if self.weight_decay:
            gradient.add_(weights, alpha=self.weight_decay)
        if self.momentum:
            if self.velocity is None:
                self.velocity = gradient.clone()
            else:
                self.velocity.mul_(self.momentum).add_(gradient)
            if self.nesterov:
                gradient.add_(self.velocity, alpha=self.momentum)
            else:
                gradient = self.velocity
        weights.add_(gradient, alpha=-lr)


class Adam:
    """Adam; weight decay is added to the gradient, as in `torch.optim.Adam`."""

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.steps = 0
        self.mean: Tensor | None = None
        self.square: Tensor | None = None

    def step(self, weights: Tensor, gradient: Tensor, lr: float) -> None:
        if self.weight_decay:
            gradient.add_(weights, alpha=self.weight_decay)
        if self.mean is None or self.square is None:
            self.mean, self.square = torch.zeros_like(weights), torch.zeros_like(weights)
        self.steps += 1
        first, second = self.betas
        self.mean.lerp_(gradient, 1 - first)
        self.square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        correction = 1 - first**self.steps
        scale = (1 - second**self.steps) ** 0.5
        denominator = (self.square.sqrt() / scale).add_(self.eps)
        weights.addcdiv_(self.mean, denominator, value=-lr / correction)


def clip_(gradient: Tensor, largest: float) -> None:
    """Scale `gradient` down to the norm `largest` where it is longer, as `torch.nn.utils.clip_grad_norm_` does."""
    scale = largest / (torch.linalg.vector_norm(gradient) + 1e-6)
    gradient.mul_(scale.clamp_(max=1.0))
