"""The sweep of synthesis.py in memory that stays where it is, so that a GPU can replay its steps from recordings.

One inner step is some hundred short kernels on the way forward and three hundred on the way back, and an iteration has
twenty of each: launched one by one they take longer than they compute. All steps with one kind of change are alike but
for the numbers, so each is recorded once. `match` of synthesis.py says what is computed here, and tests hold the two
against each other.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedloom.methods.dsa import Redrawn
from fedloom.methods.synthesis import Distance, Match, Network, Step, Synthetic, distance, soft_loss
from fedloom.optim import Steady
from fedloom.tapes import Quiet, make_tape


class Sweep(Quiet):
    """Steps on one synthetic set, whose tensors may be changed in place between two calls."""

    def __init__(self, network: Network, data: Synthetic, row: Tensor, noise: torch.Generator) -> None:
        self.network, self.data, self._noise = network, data, noise
        self._row = row.detach().clone()
        self._w, self._a = (self._row.new_zeros(network.trainable) for _ in range(2))
        self._gradients = Synthetic(*(torch.zeros_like(tensor) for tensor in data.tensors()))
        self._lr = self._row.new_zeros(())
        self._optimizer: Steady | None = None
        self._indices: dict[int, Tensor] = {}
        self._tape = make_tape(self._row.device, (noise,))

    def close(self) -> None:
        """Give back the recordings."""
        self._tape.close()

    def memory(self) -> list[Tensor]:
        """What a step changes."""
        state = vars(self._optimizer).values() if self._optimizer is not None else ()
        return [self._w, self._a, *self._gradients.tensors(), *(v for v in state if isinstance(v, Tensor))]

    def match(self, steps: Sequence[Step], row: Tensor, target: Tensor, kind: Distance = "squared") -> Match:
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
            length = distance(start, target, kind)
            moved = length > 0
            loss = torch.where(moved, distance(end, target, kind) / torch.where(moved, length, 1), 0)
            self._a.copy_(torch.autograd.grad(loss, end)[0])
            for tensor in self._gradients.tensors():
                tensor.zero_()
            for step in reversed(steps):
                self._w.copy_(path.pop())
                self._play("back", step)
        return Match(loss.detach(), end.detach(), self._gradients)

    def train(self, row: Tensor, steps: Sequence[Step], make_optimizer: Callable[[], Steady], lr: float) -> None:
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

    def _play(self, what: str, step: Step) -> None:
        index = step.index
        if index is not None:
            held = self._indices.setdefault(len(index), torch.zeros_like(index))
            index = held.copy_(index)
        change = step.change
        if isinstance(change, Redrawn):
            self._noise.manual_seed(change.seed)
            alike: Any = change.kind
        else:
            alike = change
        size = None if index is None else len(index)
        key = (what, alike, size)
        body = {"forward": self._forward, "back": self._back, "learn": self._learn}[what]
        self._tape.play(key, key, lambda: body(step, index), self)

    def _slope(self, given: Sequence[Tensor], step: Step, index: Tensor | None, graph: bool) -> Tensor:
        """The gradient of the loss at w, for (w, images, logits)."""
        w, images, logits = given
        if index is not None:
            images, logits = images.index_select(0, index), logits.index_select(0, index)
        if isinstance(step.change, Redrawn):
            images = step.change.drawn(images)
        elif step.change is not None:
            images = step.change(images)
        loss = soft_loss(self.network(w, images, self._row), logits)
        return torch.autograd.grad(loss, w, create_graph=graph)[0]

    def _forward(self, step: Step, index: Tensor | None) -> None:
        w = self._w.detach().requires_grad_()
        g = self._slope((w, self.data.images.detach(), self.data.logits.detach()), step, index, graph=False)
        self._w.sub_(self.data.rate * g)

    def _learn(self, step: Step, index: Tensor | None) -> None:
        w = self._w.detach().requires_grad_()
        g = self._slope((w, self.data.images.detach(), self.data.logits.detach()), step, index, graph=False)
        assert self._optimizer is not None, "it was made before the first step"
        self._optimizer.step(self._w, g, self._lr)

    def _back(self, step: Step, index: Tensor | None) -> None:
        given = [tensor.detach().requires_grad_() for tensor in (self._w, self.data.images, self.data.logits)]
        along = self._slope(given, step, index, graph=True) @ self._a
        by_w, by_images, by_logits = torch.autograd.grad(along, given)
        rate, gradients = self.data.rate, self._gradients
        gradients.images.sub_(rate * by_images)
        gradients.logits.sub_(rate * by_logits)
        gradients.rate.sub_(along.detach())
        self._a.sub_(rate * by_w)
