"""SGD and Adam on one flat row.

The arithmetic is that of `torch.optim`, and the tests compare the bits. One vector replaces the list of tensors and
the bookkeeping per step: a step of the MLP takes 11 % longer with `torch.optim` (results/choices.json). On a GPU the
arithmetic is that of `torch.optim` with `fused=True`, which is one kernel per step.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from fedloom.config import TrainingConfig

MOST_PIECES = {2: 64, 3: 48, 4: 36}
"""Tensors that torch's fused optimizers take in one kernel, by the number of lists of tensors."""


class Optimizer(Protocol):
    """Any object with a `step`; assign your own to `trainer.optimizer`."""

    def step(self, weights: Tensor, gradient: Tensor, lr: float | Tensor) -> None:
        """Update `weights` in place. `gradient` may be overwritten."""


class StatefulOptimizer(Optimizer, Protocol):
    """An optimizer whose state can be allocated before the first step and stays in place.

    Its steps can be captured once and replayed. The learning rate is then a tensor, so it may change between replays.
    """

    def allocate_state(self, weights: Tensor) -> None:
        """Allocate the state, all zeros."""

    def reset(self) -> None:
        """Set the state to zero in place."""

    def state_shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the state after a step, for `size` weights."""

    def state_dict(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the present state; zeros if there is none yet."""

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue with the state of another optimizer."""


class SGD:
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay."""

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> None:
        self.momentum = momentum
        self.nesterov = nesterov
        self.weight_decay = weight_decay
        self.velocity: Tensor | None = None

    def allocate_state(self, weights: Tensor) -> None:
        self.velocity = torch.zeros_like(weights) if self.momentum else None

    def reset(self) -> None:
        if self.velocity is not None:
            self.velocity.zero_()

    def state_shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        return {"velocity": (size,)} if self.momentum else {}

    def state_dict(self, weights: Tensor) -> dict[str, Tensor]:
        if not self.momentum:
            return {}
        return {"velocity": torch.zeros_like(weights) if self.velocity is None else self.velocity}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        if self.momentum:
            self.velocity = _taken(self.velocity, state_dict["velocity"])

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
    """Adam. Weight decay is added to the gradient, as in `torch.optim.Adam`."""

    def __init__(self, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.steps: int | Tensor = 0
        self.mean: Tensor | None = None
        self.square: Tensor | None = None

    def allocate_state(self, weights: Tensor) -> None:
        self.mean, self.square = torch.zeros_like(weights), torch.zeros_like(weights)
        kind = torch.float32 if _can_fuse_step(weights) else torch.float64
        self.steps = torch.zeros((), dtype=kind, device=weights.device)

    def reset(self) -> None:
        for state in (self.mean, self.square, self.steps):
            if isinstance(state, Tensor):
                state.zero_()

    def state_shapes(self, size: int) -> dict[str, tuple[int, ...]]:
        return {"mean": (size,), "square": (size,), "steps": ()}

    def state_dict(self, weights: Tensor) -> dict[str, Tensor]:
        steps = torch.as_tensor(self.steps, dtype=weights.dtype, device=weights.device)
        if self.mean is None or self.square is None:
            return {"mean": torch.zeros_like(weights), "square": torch.zeros_like(weights), "steps": steps}
        return {"mean": self.mean, "square": self.square, "steps": steps}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        self.mean, self.square = _taken(self.mean, state_dict["mean"]), _taken(self.square, state_dict["square"])
        self.steps = (
            self.steps.copy_(state_dict["steps"]) if isinstance(self.steps, Tensor) else int(state_dict["steps"])
        )

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
    """Create the optimizer of these settings."""
    if config.optimizer == "adam":
        return Adam(weight_decay=config.weight_decay)
    return SGD(config.momentum, config.nesterov, config.weight_decay)


def _taken(place: Tensor | None, value: Tensor) -> Tensor:
    """Return the value, copied into `place` if there is one."""
    return value.clone() if place is None else place.copy_(value)


def _can_fuse_step(weights: Tensor) -> bool:
    """Return whether torch's fused kernels support these weights, with a learning rate on the device."""
    return weights.is_cuda and weights.dtype is torch.float32


def split_row_for_foreach(row: Tensor, num_lists: int) -> tuple[Tensor, ...]:
    """Split a row into tensors for a kernel that takes `num_lists` lists of them.

    The kernel gives each tensor, or each 65536 elements of it, to one processor of the GPU.
    """
    return torch.split(row, max(2, -(-len(row) // (1024 * MOST_PIECES[num_lists]))) * 1024)


def clip_gradient_(gradient: Tensor, max_norm: float) -> None:
    """Scale `gradient` in place to at most the norm `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    scale = max_norm / (torch.linalg.vector_norm(gradient) + 1e-6)
    gradient.mul_(scale.clamp_(max=1.0))
