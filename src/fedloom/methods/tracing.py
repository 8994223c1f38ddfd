"""Which axes of a network's tensors are permuted together, found by watching it compute once.

Every operation that the network calls is met with what it does to the units of its inputs (operations.py). One that is
not known there, on something whose units may change places, is an error: to guess would change the function.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from fedloom.methods.axes import Axis, fix, fixed, fresh, is_fixed, length, tie
from fedloom.methods.operations import RULES, Axes, tensors_in


class Unclear(Exception):
    """It cannot be told which units of this network may change places; the reason is the text."""


class Trace(TorchFunctionMode):
    """Watches operations; knows the axes of every tensor that comes from the network's own or from its input."""

    def __init__(self, module: nn.Module, movable: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.where = ""
        self.used: set[int] = set()
        """Tensors of the network that took part, by id."""
        self.consuming: set[tuple[int, int]] = set()
        """(tensor of the network by id, axis) along which a product sums: its units are made elsewhere."""
        self.first: dict[int, int] = {}
        """When each tensor of the network first took part."""
        self._axes: dict[int, Axes | None] = {}
        self._alive: list[Tensor] = []  # so that no other tensor gets the id of one that is gone
        self._own = {id(tensor) for tensor in movable.values()}
        for tensor in (*module.parameters(), *module.buffers()):
            self.put(tensor, [fresh(n) if id(tensor) in self._own else fixed(n) for n in tensor.shape])
        for name, child in module.named_modules():
            child.register_forward_pre_hook(lambda *_, name=name: setattr(self, "where", name))

    def put(self, tensor: Tensor, axes: Axes | None) -> None:
        """Say what lies along the axes of a tensor; None: something that cannot be said."""
        if axes is not None and [length(axis) for axis in axes] != list(tensor.shape):
            raise ValueError(f"these are not the axes of a tensor of shape {tuple(tensor.shape)}")
        self._axes[id(tensor)] = axes
        self._alive.append(tensor)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor comes from the network's tensors or its input, and is no constant."""
        return id(tensor) in self._axes

    def of(self, tensor: Tensor) -> Axes:
        """The axes of a tensor; those of a constant are fixed."""
        axes = self._axes.get(id(tensor), [fixed(n) for n in tensor.shape])
        if axes is None:
            raise self.unclear("it uses the last state of a recurrent layer that has several")
        return axes

    def consume(self, tensor: Tensor, axis: int, by: Axis) -> None:
        """A product sums over this axis of `tensor`, against `by`."""
        tie(self.of(tensor)[axis], by)
        self.consuming.add((id(tensor), axis))

    def unclear(self, reason: str) -> Unclear:
        return Unclear(f"{reason} (near {self.where or 'the beginning'})")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        for tensor in given:
            if id(tensor) in self._own:
                self.used.add(id(tensor))
                self.first.setdefault(id(tensor), len(self.first))
        made, name = list(tensors_in(out)), _name(func)
        if not any(self.knows(tensor) for tensor in given) or (not made and name != "setitem"):
            return out
        loose = [t for t in given if not all(is_fixed(axis) for axis in self.of(t))]
        if not loose:
            for tensor in made:
                self.put(tensor, [fixed(n) for n in tensor.shape])
        elif name not in RULES:
            raise self.unclear(f"it is not known what the operation {name!r} does to units")
        else:
            try:
                RULES[name](self, out, *args, **kwargs)
            except (TypeError, ValueError, IndexError):
                raise self.unclear(f"it calls {name!r} in a form that is not known") from None
        return out


def _name(func: Callable[..., Any]) -> str:
    """What a function is called, the same for functions, methods, operators and in-place forms."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    elif name == "fn":  # pools, which come in two forms
        name = (resolve_name(func) or name).rpartition(".")[2]
    return name.strip("_")


def watch(module: nn.Module, movable: Mapping[str, Tensor], x: Tensor) -> Trace:
    """Let a network compute once, and say what was found. `movable` are the tensors whose units may change places."""
    trace = Trace(module, movable)
    trace.put(x, [fixed(n) for n in x.shape])
    with torch.no_grad(), trace:
        out = module(x)
    for tensor in tensors_in(out):  # what comes out has its meaning
        for axis in trace.of(tensor):
            fix(axis)
    return trace
