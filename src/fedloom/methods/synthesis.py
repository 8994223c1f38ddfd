"""Trajectory matching: a small data set on which a network trains the way it once trained on the real data.

From a model w_t of a trajectory, s' steps of gradient descent with rate eta on the synthetic samples (X, y),

    w_{k+1} = w_k - eta grad_w l(X, y; w_k),   k = 0 .. s'-1,

should lead to a target further along the trajectory. The matching loss is d(w_{s'}, target) / d(w_0, target): 1 where
the steps lead nowhere, 0 where they arrive. `match` gives its gradient with respect to X, y and eta.

The gradient is taken by a reverse sweep written by hand. With a_k the gradient of the loss with respect to w_k and
g_k = grad_w l(X, y; w_k), the chain rule for one step is

    X' -= eta d<g_k, a>/dX,   y' -= eta d<g_k, a>/dy,   eta' -= <g_k, a>,   a_k = a - eta d<g_k, a>/dw_k,  a = a_{k+1}

so a step needs w_k and its own graph, and no other step's. `remember` keeps all graphs from the way forward, which is
fastest; without it only the rows w_k are kept and each graph is made again when the sweep comes to it. Memory then
grows by one row a step, whatever the network and the number of samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.rows import Kind, Layout

Distance = Literal["squared", "cosine"]


class Network:
    """A network as a function of a row and a batch.

    It computes as the deployed model does, in evaluation mode: batch norm uses the statistics in the row and leaves
    them alone, and there is no dropout. So the function is the same each time, and has derivatives.
    """

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device) -> None:
        self.module = module.to(device).eval()
        self.trainable = layout.trainable
        # Split in one go: the gradients of many slices would each be a whole row of zeros around a few numbers.
        self._parameters = [replace(entry, offset=0) for entry in layout.entries if entry.kind is Kind.PARAMETER]
        self._sizes = [entry.size for entry in self._parameters]
        self._buffers = [entry for entry in layout.entries if entry.kind is not Kind.PARAMETER]
        self._channels_last = any(entry.channels_last for entry in layout.entries)

    def __call__(self, weights: Tensor, x: Tensor, row: Tensor) -> Tensor:
        """The outputs for a batch with trainable parameters `weights` (flat), and all other tensors from `row`."""
        named: dict[str, Tensor] = {}
        for entry, piece in zip(self._parameters, torch.split(weights, self._sizes), strict=True):
            named.update(dict.fromkeys(entry.names, entry.view(piece)))
        for entry in self._buffers:
            named.update(dict.fromkeys(entry.names, entry.view(row)))
        if self._channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        output: Tensor = torch.func.functional_call(self.module, named, (x,))
        return output


def soft_loss(output: Tensor, logits: Tensor) -> Tensor:
    """Cross-entropy with the soft labels softmax(logits), divided by the number of classes as the authors' code does.

    That division is part of what an inner rate means, so it is kept.
    """
    return -(F.softmax(logits, dim=1) * F.log_softmax(output, dim=1)).mean()


def distance(w: Tensor, target: Tensor, kind: Distance) -> Tensor:
    """How far `w` is from `target`: squared Euclidean, or 1 - cosine without the cancellation of that formula."""
    if kind == "cosine":
        w, target = (v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(v.dtype).tiny) for v in (w, target))
        return (w - target).square().sum() / 2
    return (w - target).square().sum()


@dataclass(frozen=True)
class Step:
    """One inner step: which samples, and how they are changed. The same again when it is computed again."""

    index: Tensor | None = None
    """Positions of the samples; None takes all."""
    change: Callable[[Tensor], Tensor] | None = None

    def take(self, images: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The samples of this step."""
        if self.index is not None:
            images, logits = images.index_select(0, self.index), logits.index_select(0, self.index)
        return (self.change(images) if self.change is not None else images), logits


@dataclass(frozen=True)
class Synthetic:
    """A synthetic data set, and the rate at which a network is to be trained on it."""

    images: Tensor
    logits: Tensor
    """Soft labels before softmax: one row a sample, one column a class."""
    rate: Tensor
    """A single number."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.images, self.logits, self.rate


@dataclass(frozen=True)
class Match:
    """A matching loss and its gradients, all without a graph."""

    loss: Tensor
    end: Tensor
    """Where the steps led."""
    gradients: Synthetic


def match(
    network: Network,
    data: Synthetic,
    steps: Sequence[Step],
    row: Tensor,
    target: Tensor,
    kind: Distance = "squared",
    remember: bool = False,
) -> Match:
    """The matching loss of `steps` from the model in `row` towards `target` (a row, or its trainable part).

    A segment that leads nowhere (`row` equals `target`) has nothing to teach: its loss and gradients are 0.
    """
    start, target = row[: network.trainable].detach(), target[: network.trainable].detach()
    images, logits = (tensor.detach().requires_grad_() for tensor in (data.images, data.logits))
    rate = data.rate.detach()

    def slope(w: Tensor, step: Step, graph: bool) -> Tensor:
        x, y = step.take(images, logits) if graph else step.take(images.detach(), logits.detach())
        return torch.autograd.grad(soft_loss(network(w, x, row), y), w, create_graph=graph)[0]

    w, path = start, []
    for step in steps:
        w = w.detach().requires_grad_()
        g = slope(w, step, graph=remember)
        path.append((w, g if remember else None))
        w = w.detach() - rate * g.detach()

    end = w.detach().requires_grad_()
    length = distance(start, target, kind)
    moved = length > 0
    loss = torch.where(moved, distance(end, target, kind) / torch.where(moved, length, 1), 0)
    (a,) = torch.autograd.grad(loss, end)

    gradients = Synthetic(*(torch.zeros_like(tensor) for tensor in (images, logits, rate)))
    for step in reversed(steps):
        w, known = path.pop()
        g = known if known is not None else slope(w, step, graph=True)
        along = g @ a
        by_w, by_images, by_logits = torch.autograd.grad(along, (w, images, logits))
        gradients.images.sub_(rate * by_images)
        gradients.logits.sub_(rate * by_logits)
        gradients.rate.sub_(along.detach())
        a = a - rate * by_w
        del g, known, along  # so that no two steps' graphs are there at once
    return Match(loss.detach(), end.detach(), gradients)
