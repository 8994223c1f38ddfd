"""Trajectory matching: synthesize data that reproduce a training trajectory.

Training on the small synthetic data set follows a trajectory of models trained on real data.

From a model w_t of a trajectory, s' steps of gradient descent with rate eta on the synthetic samples (X, y),

    w_{k+1} = w_k - eta grad_w l(X, y; w_k),   k = 0 .. s'-1,

should lead to a target further along the trajectory. The matching loss is d(w_{s'}, target) / d(w_0, target): 1 if the
steps come no closer, 0 if they arrive. `match_trajectory` returns its gradient with respect to X, y and eta.

A reverse sweep written by hand computes the gradient. With a_k the gradient of the loss with respect to w_k and
g_k = grad_w l(X, y; w_k), the chain rule for one step is

    X' -= eta d<g_k, a>/dX,   y' -= eta d<g_k, a>/dy,   eta' -= <g_k, a>,   a_k = a - eta d<g_k, a>/dw_k,  a = a_{k+1}

so a step needs only w_k and its own graph. `keep_graphs` keeps all graphs of the forward pass, which is fastest.
Otherwise only the rows w_k are kept, and the sweep recomputes each graph. Memory then grows by one row per step,
whatever the network and the number of samples.

`GraphedTrajectoryMatcher` runs the same sweep in static memory, so that a GPU can replay its steps as CUDA graphs. One
inner step has about a hundred short kernels forward and three hundred backward, and an iteration has twenty steps:
single launches take longer than the computation. All steps with one kind of augmentation differ only in numbers, so
each kind is captured once. Tests compare it with `match_trajectory`.
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
from fedloom.methods._support.distillation import DistillationModel
from fedloom.training.optimizers import StatefulOptimizer

Distance = Literal["squared", "cosine"]


def trajectory_soft_label_loss(output: Tensor, label_logits: Tensor) -> Tensor:
    """Return the cross-entropy with soft labels softmax(logits), divided by the number of classes.

    The division is that of the authors' code; values of the inner rate depend on it.
    """
    return -(F.softmax(label_logits, dim=1) * F.log_softmax(output, dim=1)).mean()


def trajectory_distance(weights: Tensor, target: Tensor, distance: Distance) -> Tensor:
    """Return the squared Euclidean distance, or 1 - cosine in a form without cancellation."""
    if distance == "cosine":
        weights, target = (
            v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(v.dtype).tiny) for v in (weights, target)
        )
        return (weights - target).square().sum() / 2
    return (weights - target).square().sum()


@dataclass(frozen=True)
class TrajectoryStep:
    """One inner step: its samples and their augmentation. Recomputing it gives the same result."""

    sample_indices: Tensor | None = None
    """Positions of the samples; None takes all."""
    augmentation: Callable[[Tensor], Tensor] | None = None

    def take(self, images: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples of this step."""
        if self.sample_indices is not None:
            images, logits = images.index_select(0, self.sample_indices), logits.index_select(0, self.sample_indices)
        return (self.augmentation(images) if self.augmentation is not None else images), logits


@dataclass(frozen=True)
class TrajectoryMatchingData:
    """A synthetic data set, and the learning rate for training on it."""

    images: Tensor
    label_logits: Tensor
    """Soft labels before softmax: a row per sample, a column per class."""
    learning_rate: Tensor
    """A scalar."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.images, self.label_logits, self.learning_rate


@dataclass(frozen=True)
class _TrajectoryMatch:
    """A matching loss and its gradients, detached from the graph."""

    loss: Tensor
    end_weights: Tensor
    """The weights after the last step."""
    gradients: TrajectoryMatchingData


def match_trajectory(
    network: DistillationModel,
    data: TrajectoryMatchingData,
    steps: Sequence[TrajectoryStep],
    start_row: Tensor,
    target: Tensor,
    distance: Distance = "squared",
    keep_graphs: bool = False,
) -> _TrajectoryMatch:
    """Return the matching loss of `steps` from the model in `start_row` to `target` (a row, or its trainable part).

    If `start_row` equals `target`, the loss and the gradients are 0.
    """
    start, target = start_row[: network.trainable].detach(), target[: network.trainable].detach()
    images, logits = (tensor.detach().requires_grad_() for tensor in (data.images, data.label_logits))
    rate = data.learning_rate.detach()

    def slope(w: Tensor, step: TrajectoryStep, graph: bool) -> Tensor:
        x, y = step.take(images, logits) if graph else step.take(images.detach(), logits.detach())
        return torch.autograd.grad(trajectory_soft_label_loss(network(w, x, start_row), y), w, create_graph=graph)[0]

    w, path = start, []
    for step in steps:
        w = w.detach().requires_grad_()
        g = slope(w, step, graph=keep_graphs)
        path.append((w, g if keep_graphs else None))
        w = w.detach() - rate * g.detach()

    end = w.detach().requires_grad_()
    length = trajectory_distance(start, target, distance)
    moved = length > 0
    loss = torch.where(moved, trajectory_distance(end, target, distance) / torch.where(moved, length, 1), 0)
    (a,) = torch.autograd.grad(loss, end)

    gradients = TrajectoryMatchingData(*(torch.zeros_like(tensor) for tensor in (images, logits, rate)))
    for step in reversed(steps):
        w, known = path.pop()
        g = known if known is not None else slope(w, step, graph=True)
        along = g @ a
        by_w, by_images, by_logits = torch.autograd.grad(along, (w, images, logits))
        gradients.images.sub_(rate * by_images)
        gradients.label_logits.sub_(rate * by_logits)
        gradients.learning_rate.sub_(along.detach())
        a = a - rate * by_w
        del g, known, along  # so that the graphs of two steps never coexist
    return _TrajectoryMatch(loss.detach(), end.detach(), gradients)


class GraphedTrajectoryMatcher(StaticGraphOwner):
    """Steps on one synthetic data set with CUDA graphs; its tensors may change in place between calls."""

    def __init__(
        self, network: DistillationModel, data: TrajectoryMatchingData, row: Tensor, generator: torch.Generator
    ) -> None:
        self.network, self.data, self._generator = network, data, generator
        self._row = row.detach().clone()
        self._w, self._a = (self._row.new_zeros(network.trainable) for _ in range(2))
        self._gradients = TrajectoryMatchingData(*(torch.zeros_like(tensor) for tensor in data.tensors()))
        self._lr = self._row.new_zeros(())
        self._optimizer: StatefulOptimizer | None = None
        self._indices: dict[int, Tensor] = {}
        self._graph_runner = make_graph_runner(self._row.device, (generator,))

    def close(self) -> None:
        """Release the captured graphs."""
        self._graph_runner.close()

    def memory(self) -> list[Tensor]:
        """Return the tensors that a step changes."""
        state = vars(self._optimizer).values() if self._optimizer is not None else ()
        return [self._w, self._a, *self._gradients.tensors(), *(v for v in state if isinstance(v, Tensor))]

    def match(
        self, steps: Sequence[TrajectoryStep], start_row: Tensor, target: Tensor, distance: Distance = "squared"
    ) -> _TrajectoryMatch:
        """Do the same as `match_trajectory`; the gradients are valid until the next call."""
        with self._apart():
            start, target = start_row[: self.network.trainable].detach(), target[: self.network.trainable].detach()
            self._row.copy_(start_row)
            self._w.copy_(start)
            path = []
            for step in steps:
                path.append(self._w.clone())
                self._run("forward", step)
            end = self._w.clone().requires_grad_()
            length = trajectory_distance(start, target, distance)
            moved = length > 0
            loss = torch.where(moved, trajectory_distance(end, target, distance) / torch.where(moved, length, 1), 0)
            self._a.copy_(torch.autograd.grad(loss, end)[0])
            for tensor in self._gradients.tensors():
                tensor.zero_()
            for step in reversed(steps):
                self._w.copy_(path.pop())
                self._run("back", step)
        return _TrajectoryMatch(loss.detach(), end.detach(), self._gradients)

    def train(
        self, row: Tensor, steps: Sequence[TrajectoryStep], make_optimizer: Callable[[], StatefulOptimizer], lr: float
    ) -> None:
        """Fine-tune the model in `row` by these steps, in place, with a reset optimizer."""
        with self._apart():
            self._row.copy_(row)
            self._w.copy_(row[: self.network.trainable])
            self._lr.fill_(lr)
            if self._optimizer is None:
                self._optimizer = make_optimizer()
                self._optimizer.allocate_state(self._w)
            self._optimizer.reset()
            for step in steps:
                self._run("learn", step)
            row[: self.network.trainable].copy_(self._w)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Work in the graph runner's CUDA stream, ordered with the work before and after in the current stream."""
        if self._row.device.type != "cuda":
            yield
            return
        outside = torch.cuda.current_stream()
        with self._graph_runner.stream():
            inside = torch.cuda.current_stream()
            inside.wait_stream(outside)
            yield
        outside.wait_stream(inside)

    def _run(self, what: str, step: TrajectoryStep) -> None:
        index = step.sample_indices
        if index is not None:
            held = self._indices.setdefault(len(index), torch.zeros_like(index))
            index = held.copy_(index)
        change = step.augmentation
        if isinstance(change, DifferentiableAugmentation):
            self._generator.manual_seed(change.seed)
            alike: Any = change.kind
        else:
            alike = change
        size = None if index is None else len(index)
        key = (what, alike, size)
        body = {"forward": self._forward, "back": self._back, "learn": self._learn}[what]
        self._graph_runner.run(key, key, lambda: body(step, index), self)

    def _slope(self, given: Sequence[Tensor], step: TrajectoryStep, index: Tensor | None, graph: bool) -> Tensor:
        """Return the gradient of the loss at w, for (w, images, logits)."""
        w, images, logits = given
        if index is not None:
            images, logits = images.index_select(0, index), logits.index_select(0, index)
        if isinstance(step.augmentation, DifferentiableAugmentation):
            images = step.augmentation.drawn(images)
        elif step.augmentation is not None:
            images = step.augmentation(images)
        loss = trajectory_soft_label_loss(self.network(w, images, self._row), logits)
        return torch.autograd.grad(loss, w, create_graph=graph)[0]

    def _forward(self, step: TrajectoryStep, index: Tensor | None) -> None:
        w = self._w.detach().requires_grad_()
        g = self._slope((w, self.data.images.detach(), self.data.label_logits.detach()), step, index, graph=False)
        self._w.sub_(self.data.learning_rate * g)

    def _learn(self, step: TrajectoryStep, index: Tensor | None) -> None:
        w = self._w.detach().requires_grad_()
        g = self._slope((w, self.data.images.detach(), self.data.label_logits.detach()), step, index, graph=False)
        assert self._optimizer is not None, "`train` creates it before the first step"
        self._optimizer.step(self._w, g, self._lr)

    def _back(self, step: TrajectoryStep, index: Tensor | None) -> None:
        given = [tensor.detach().requires_grad_() for tensor in (self._w, self.data.images, self.data.label_logits)]
        along = self._slope(given, step, index, graph=True) @ self._a
        by_w, by_images, by_logits = torch.autograd.grad(along, given)
        rate, gradients = self.data.learning_rate, self._gradients
        gradients.images.sub_(rate * by_images)
        gradients.label_logits.sub_(rate * by_logits)
        gradients.learning_rate.sub_(along.detach())
        self._a.sub_(rate * by_w)
