"""Optimisers over one flat row.

The same arithmetic as `torch.optim` (the tests compare bit for bit), on one vector instead of a list of tensors and
without its bookkeeping per step, which costs a tenth of the time of the MLP
(benchmarks/choices.py). State is rows too. On a GPU it is that of `torch.optim` with `fused=True`: one kernel a step.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from fedloom.config import TrainingConfig

MOST_PIECES = {2: 64, 3: 48, 4: 36}
"""Tensors that torch's fused optimisers take in one kernel, by how many lists of them there are."""


class Optimizer(Protocol):
    """One step down `gradient`, which may be overwritten."""

    def step(self, weights: Tensor, gradient: Tensor, lr: float | Tensor) -> None: ...


class StatefulOptimizer(Optimizer, Protocol):
    """An optimiser whose state can be made before its first step and stays where it is: such steps can be recorded once
    and replayed. The learning rate is then a tensor, so that it may change between replays."""

    def settle(self, weights: Tensor) -> None:
        """Make the state, all zeros."""

    def reset(self) -> None:
        """Forget what was learned, in place."""

    def remembers(self, size: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of what it knows after a step, for `size` weights."""

    def known(self, weights: Tensor) -> dict[str, Tensor]:
        """What it knows now, zeros where that is nothing yet."""

    def recall(self, known: Mapping[str, Tensor]) -> None:
        """Go on with what another one knew."""


class SGD:
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay."""

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> None:
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.velocity: Tensor | None = None

    def settle(self, weights: Tensor) -> None:
        self.velocity = torch.zeros_like(weights) if self.momentum else None

    def reset(self) -> None:
        if self.velocity is not None:
            self.velocity.zero_()

    def remembers(self, size: int) -> dict[str, tuple[int, ...]]:
        return {"velocity": (size,)} if self.momentum else {}

    def known(self, weights: Tensor) -> dict[str, Tensor]:
        if not self.momentum:
            return {}
        return {"velocity": torch.zeros_like(weights) if self.velocity is None else self.velocity}

    def recall(self, known: Mapping[str, Tensor]) -> None:
        if self.momentum:
            self.velocity = _taken(self.velocity, known["velocity"])

    def step(self, weights: Tensor, gradient: Tensor, lr: float | Tensor) -> None:
        if isinstance(lr, Tensor) and _can_fuse_step(weights) and (self.velocity is not None or not self.momentum):
            lists = 2 if self.velocity is None else 3
            torch._fused_sgd_(
                split_row_for_foreach(weights, lists), split_row_for_foreach(gradient, lists),
                split_row_for_foreach(self.velocity, lists) if self.velocity is not None else [],
                weight_decay=self.weight_decay, momentum=self.momentum, lr=lr, dampening=0.0, nesterov=self.nesterov,
                maximize=False, is_first_step=False,
            )  # fmt: skip
            return
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
        if isinstance(lr, Tensor):
            weights.addcmul_(gradient, lr, value=-1)
        else:
            weights.add_(gradient, alpha=-lr)


class Adam:
    """Adam; weight decay is added to the gradient, as in `torch.optim.Adam`."""

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.steps: int | Tensor = 0
        self.mean: Tensor | None = None
        self.square: Tensor | None = None

    def settle(self, weights: Tensor) -> None:
        self.mean, self.square = torch.zeros_like(weights), torch.zeros_like(weights)
        kind = torch.float32 if _can_fuse_step(weights) else torch.float64
        self.steps = torch.zeros((), dtype=kind, device=weights.device)

    def reset(self) -> None:
        for state in (self.mean, self.square, self.steps):
            if isinstance(state, Tensor):
                state.zero_()

    def remembers(self, size: int) -> dict[str, tuple[int, ...]]:
        return {"mean": (size,), "square": (size,), "steps": ()}

    def known(self, weights: Tensor) -> dict[str, Tensor]:
        steps = torch.as_tensor(self.steps, dtype=weights.dtype, device=weights.device)
        if self.mean is None or self.square is None:
            return {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights), "steps": steps}
        return {"mean": self.mean, "square": self.square, "steps": steps}

    def recall(self, known: Mapping[str, Tensor]) -> None:
        self.mean, self.square = _taken(self.mean, known["mean"]), _taken(self.square, known["square"])
        self.steps = self.steps.copy_(known["steps"]) if isinstance(self.steps, Tensor) else int(known["steps"])

    def step(self, weights: Tensor, gradient: Tensor, lr: float | Tensor) -> None:
        if self.mean is None or self.square is None:
            self.mean, self.square = torch.zeros_like(weights), torch.zeros_like(weights)
        self.steps += 1
        first, second = self.betas
        if isinstance(lr, Tensor) and isinstance(self.steps, Tensor) and _can_fuse_step(weights):
            parts = split_row_for_foreach(weights, 4)
            torch._fused_adam_(
                parts, split_row_for_foreach(gradient, 4), split_row_for_foreach(self.mean, 4),
                split_row_for_foreach(self.square, 4), [],
                [self.steps] * len(parts),
                lr=lr, beta1=first, beta2=second, weight_decay=self.weight_decay, eps=self.eps, amsgrad=False,
                maximize=False,
            )  # fmt: skip
            return
        if self.weight_decay:
            gradient.add_(weights, alpha=self.weight_decay)
        self.mean.lerp_(gradient, 1 - first)
        self.square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        correction = 1 - first**self.steps
        scale = (1 - second**self.steps) ** 0.5
        denominator = (self.square.sqrt() / scale).add_(self.eps)
        if isinstance(lr, Tensor) or isinstance(correction, Tensor):
            weights.sub_((self.mean / denominator).mul_(lr / correction))
        else:
            weights.addcdiv_(self.mean, denominator, value=-lr / correction)


def make_optimizer(config: TrainingConfig) -> StatefulOptimizer:
    """A new optimiser as these settings ask for."""
    if config.optimizer == "adam":
        return Adam(weight_decay=config.weight_decay)
    return SGD(config.momentum, config.nesterov, config.weight_decay)


def _taken(place: Tensor | None, value: Tensor) -> Tensor:
    """The value, in the place where there is one."""
    return value.clone() if place is None else place.copy_(value)


def _can_fuse_step(weights: Tensor) -> bool:
    """Whether a step is one kernel here, with a learning rate that lies on the device."""
    return weights.is_cuda and weights.dtype is torch.float32


def split_row_for_foreach(row: Tensor, lists: int) -> tuple[Tensor, ...]:
    """A row in pieces, for a kernel that takes so many rows: it gives each tensor, or each 65536 numbers of it, to one
    processor of the GPU."""
    return torch.split(row, max(2, -(-len(row) // (1024 * MOST_PIECES[lists]))) * 1024)


def clip_gradient_(gradient: Tensor, largest: float) -> None:
    """Scale `gradient` down to the norm `largest` where it is longer, as `torch.nn.utils.clip_grad_norm_` does."""
    scale = largest / (torch.linalg.vector_norm(gradient) + 1e-6)
    gradient.mul_(scale.clamp_(max=1.0))
