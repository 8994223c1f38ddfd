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

The sweep of synthesis.py in memory that stays where it is, so that a GPU can replay its steps from recordings.

One inner step is some hundred short kernels on the way forward and three hundred on the way back, and an iteration has
twenty of each: launched one by one they take longer than they compute. All steps with one kind of change are alike but
for the numbers, so each is recorded once. `match` of synthesis.py says what is computed here, and tests hold the two
against each other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.devices.cuda_graphs import StaticGraphOwner, make_graph_runner
from fedloom.methods._support.differentiable_augmentation import DifferentiableAugmentation
from fedloom.methods._support.distillation import FunctionalModel
from fedloom.training.optimizers import StatefulOptimizer

Distance = Literal["squared", "cosine"]


def trajectory_soft_label_loss(output: Tensor, logits: Tensor) -> Tensor:
    """Cross-entropy with the soft labels softmax(logits), divided by the number of classes as the authors' code does.

    That division is part of what an inner rate means, so it is kept.
    """
    return -(F.softmax(logits, dim=1) * F.log_softmax(output, dim=1)).mean()


def trajectory_distance(w: Tensor, target: Tensor, kind: Distance) -> Tensor:
    """How far `w` is from `target`: squared Euclidean, or 1 - cosine without the cancellation of that formula."""
    if kind == "cosine":
        w, target = (v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(v.dtype).tiny) for v in (w, target))
        return (w - target).square().sum() / 2
    return (w - target).square().sum()


@dataclass(frozen=True)
class TrajectoryStep:
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
class SyntheticData:
    """A synthetic data set, and the rate at which a network is to be trained on it."""

    images: Tensor
    logits: Tensor
    """Soft labels before softmax: one row a sample, one column a class."""
    rate: Tensor
    """A single number."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.images, self.logits, self.rate


@dataclass(frozen=True)
class TrajectoryMatch:
    """A matching loss and its gradients, all without a graph."""

    loss: Tensor
    end: Tensor
    """Where the steps led."""
    gradients: SyntheticData


def match_trajectory(
    network: FunctionalModel,
    data: SyntheticData,
    steps: Sequence[TrajectoryStep],
    row: Tensor,
    target: Tensor,
    kind: Distance = "squared",
    remember: bool = False,
) -> TrajectoryMatch:
    """The matching loss of `steps` from the model in `row` towards `target` (a row, or its trainable part).

    A segment that leads nowhere (`row` equals `target`) has nothing to teach: its loss and gradients are 0.
    """
    start, target = row[: network.trainable].detach(), target[: network.trainable].detach()
    images, logits = (tensor.detach().requires_grad_() for tensor in (data.images, data.logits))
    rate = data.rate.detach()

    def slope(w: Tensor, step: TrajectoryStep, graph: bool) -> Tensor:
        x, y = step.take(images, logits) if graph else step.take(images.detach(), logits.detach())
        return torch.autograd.grad(trajectory_soft_label_loss(network(w, x, row), y), w, create_graph=graph)[0]

    w, path = start, []
    for step in steps:
        w = w.detach().requires_grad_()
        g = slope(w, step, graph=remember)
        path.append((w, g if remember else None))
        w = w.detach() - rate * g.detach()

    end = w.detach().requires_grad_()
    length = trajectory_distance(start, target, kind)
    moved = length > 0
    loss = torch.where(moved, trajectory_distance(end, target, kind) / torch.where(moved, length, 1), 0)
    (a,) = torch.autograd.grad(loss, end)

    gradients = SyntheticData(*(torch.zeros_like(tensor) for tensor in (images, logits, rate)))
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
    return TrajectoryMatch(loss.detach(), end.detach(), gradients)


class GraphedTrajectoryMatcher(StaticGraphOwner):
    """Steps on one synthetic set, whose tensors may be changed in place between two calls."""

    def __init__(self, network: FunctionalModel, data: SyntheticData, row: Tensor, noise: torch.Generator) -> None:
        self.network, self.data, self._noise = network, data, noise
        self._row = row.detach().clone()
        self._w, self._a = (self._row.new_zeros(network.trainable) for _ in range(2))
        self._gradients = SyntheticData(*(torch.zeros_like(tensor) for tensor in data.tensors()))
        self._lr = self._row.new_zeros(())
        self._optimizer: StatefulOptimizer | None = None
        self._indices: dict[int, Tensor] = {}
        self._tape = make_graph_runner(self._row.device, (noise,))

    def close(self) -> None:
        """Give back the recordings."""
        self._tape.close()

    def memory(self) -> list[Tensor]:
        """What a step changes."""
        state = vars(self._optimizer).values() if self._optimizer is not None else ()
        return [self._w, self._a, *self._gradients.tensors(), *(v for v in state if isinstance(v, Tensor))]

    def match(
        self, steps: Sequence[TrajectoryStep], row: Tensor, target: Tensor, kind: Distance = "squared"
    ) -> TrajectoryMatch:
        """What synthesis.match finds for these steps from `row` towards `target`; gradients are lent until the next."""
        with self._apart():
            start, target = row[: self.network.trainable].detach(), target[: self.network.trainable].detach()
            self._row.copy_(row)
            self._w.copy_(start)
            path = []
            for step in steps:
                path.append(self._w.clone())
                self._play("forward", step)
            end = self._w.clone().requires_grad_()
            length = trajectory_distance(start, target, kind)
            moved = length > 0
            loss = torch.where(moved, trajectory_distance(end, target, kind) / torch.where(moved, length, 1), 0)
            self._a.copy_(torch.autograd.grad(loss, end)[0])
            for tensor in self._gradients.tensors():
                tensor.zero_()
            for step in reversed(steps):
                self._w.copy_(path.pop())
                self._play("back", step)
        return TrajectoryMatch(loss.detach(), end.detach(), self._gradients)

    def train(
        self, row: Tensor, steps: Sequence[TrajectoryStep], make_optimizer: Callable[[], StatefulOptimizer], lr: float
    ) -> None:
        """Fine-tune the model in `row` by these steps, in place, with an optimiser that is as good as new."""
        with self._apart():
            self._row.copy_(row)
            self._w.copy_(row[: self.network.trainable])
            self._lr.fill_(lr)
            if self._optimizer is None:
                self._optimizer = make_optimizer()
                self._optimizer.settle(self._w)
            self._optimizer.reset()
            for step in steps:
                self._play("learn", step)
            row[: self.network.trainable].copy_(self._w)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Work in the tape's stream, after what was asked for before and before what is asked for later."""
        if self._row.device.type != "cuda":
            yield
            return
        outside = torch.cuda.current_stream()
        with self._tape.stream():
            inside = torch.cuda.current_stream()
            inside.wait_stream(outside)
            yield
        outside.wait_stream(inside)

    def _play(self, what: str, step: TrajectoryStep) -> None:
        index = step.index
        if index is not None:
            held = self._indices.setdefault(len(index), torch.zeros_like(index))
            index = held.copy_(index)
        change = step.change
        if isinstance(change, DifferentiableAugmentation):
            self._noise.manual_seed(change.seed)
            alike: Any = change.kind
        else:
            alike = change
        size = None if index is None else len(index)
        key = (what, alike, size)
        body = {"forward": self._forward, "back": self._back, "learn": self._learn}[what]
        self._tape.play(key, key, lambda: body(step, index), self)

    def _slope(self, given: Sequence[Tensor], step: TrajectoryStep, index: Tensor | None, graph: bool) -> Tensor:
        """The gradient of the loss at w, for (w, images, logits)."""
        w, images, logits = given
        if index is not None:
            images, logits = images.index_select(0, index), logits.index_select(0, index)
        if isinstance(step.change, DifferentiableAugmentation):
            images = step.change.drawn(images)
        elif step.change is not None:
            images = step.change(images)
        loss = trajectory_soft_label_loss(self.network(w, images, self._row), logits)
        return torch.autograd.grad(loss, w, create_graph=graph)[0]

    def _forward(self, step: TrajectoryStep, index: Tensor | None) -> None:
        w = self._w.detach().requires_grad_()
        g = self._slope((w, self.data.images.detach(), self.data.logits.detach()), step, index, graph=False)
        self._w.sub_(self.data.rate * g)

    def _learn(self, step: TrajectoryStep, index: Tensor | None) -> None:
        w = self._w.detach().requires_grad_()
        g = self._slope((w, self.data.images.detach(), self.data.logits.detach()), step, index, graph=False)
        assert self._optimizer is not None, "it was made before the first step"
        self._optimizer.step(self._w, g, self._lr)

    def _back(self, step: TrajectoryStep, index: Tensor | None) -> None:
        given = [tensor.detach().requires_grad_() for tensor in (self._w, self.data.images, self.data.logits)]
        along = self._slope(given, step, index, graph=True) @ self._a
        by_w, by_images, by_logits = torch.autograd.grad(along, given)
        rate, gradients = self.data.rate, self._gradients
        gradients.images.sub_(rate * by_images)
        gradients.logits.sub_(rate * by_logits)
        gradients.rate.sub_(along.detach())
        self._a.sub_(rate * by_w)
