"""The permutation symmetries of a network: units that may change places, and where each of them lies in a row.

A unit is a neuron or a channel. To let the units of a layer change places without changing what the network computes,
the rows of its weights, its biases and norms must be permuted, and the columns of every layer that reads it; layers
that write into one residual stream share one permutation. `find` sees this by letting the network compute once
(tracing.py); a network for which it cannot be told is refused by name.

Which axes of a network's tensors are permuted together, found by watching it compute once.

Every operation that the network calls is met with what it does to the units of its inputs (operations.py). One that is
not known there, on something whose units may change places, is an error: to guess would change the function.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from fedloom.core.layout import Layout, LayoutEntry, TensorKind
from fedloom.errors import InputError
from fedloom.methods.base import MethodContext
from fedloom.methods.matching.axes import (
    Axis,
    AxisUnits,
    axis_length,
    fix_axis,
    is_fixed_axis,
    make_fixed_axis,
    make_permutable_axis,
    resolve_axis_segments,
    tie_axes,
)
from fedloom.methods.matching.operations import RULES, Axes, find_operation_tensors


class _UnclearSymmetryError(Exception):
    """It cannot be told which units of this network may change places; the reason is the text."""


class SymmetryTracer(TorchFunctionMode):
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
            self.put(
                tensor,
                [make_permutable_axis(n) if id(tensor) in self._own else make_fixed_axis(n) for n in tensor.shape],
            )
        for name, child in module.named_modules():
            child.register_forward_pre_hook(lambda *_, name=name: setattr(self, "where", name))

    def put(self, tensor: Tensor, axes: Axes | None) -> None:
        """Say what lies along the axes of a tensor; None: something that cannot be said."""
        if axes is not None and [axis_length(axis) for axis in axes] != list(tensor.shape):
            raise ValueError(f"these are not the axes of a tensor of shape {tuple(tensor.shape)}")
        self._axes[id(tensor)] = axes
        self._alive.append(tensor)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor comes from the network's tensors or its input, and is no constant."""
        return id(tensor) in self._axes

    def of(self, tensor: Tensor) -> Axes:
        """The axes of a tensor; those of a constant are fixed."""
        axes = self._axes.get(id(tensor), [make_fixed_axis(n) for n in tensor.shape])
        if axes is None:
            raise self.unclear("it uses the last state of a recurrent layer that has several")
        return axes

    def consume(self, tensor: Tensor, axis: int, by: Axis) -> None:
        """A product sums over this axis of `tensor`, against `by`."""
        tie_axes(self.of(tensor)[axis], by)
        self.consuming.add((id(tensor), axis))

    def unclear(self, reason: str) -> _UnclearSymmetryError:
        return _UnclearSymmetryError(f"{reason} (near {self.where or 'the beginning'})")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = list(find_operation_tensors((args, kwargs)))
        for tensor in given:
            if id(tensor) in self._own:
                self.used.add(id(tensor))
                self.first.setdefault(id(tensor), len(self.first))
        made, name = list(find_operation_tensors(out)), _name(func)
        if not any(self.knows(tensor) for tensor in given) or (not made and name != "setitem"):
            return out
        loose = [t for t in given if not all(is_fixed_axis(axis) for axis in self.of(t))]
        if not loose:
            for tensor in made:
                self.put(tensor, [make_fixed_axis(n) for n in tensor.shape])
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


def _trace_network(module: nn.Module, movable: Mapping[str, Tensor], x: Tensor) -> SymmetryTracer:
    """Let a network compute once, and say what was found. `movable` are the tensors whose units may change places."""
    trace = SymmetryTracer(module, movable)
    trace.put(x, [make_fixed_axis(n) for n in x.shape])
    with torch.no_grad(), trace:
        out = module(x)
    for tensor in find_operation_tensors(out):  # what comes out has its meaning
        for axis in trace.of(tensor):
            fix_axis(axis)
    return trace


@dataclass(frozen=True)
class SymmetryTie:
    """Where the units of a group lie in one tensor: along `axis` from `start` on, `inner` positions for each."""

    entry: LayoutEntry
    axis: int
    start: int
    inner: int
    made: bool
    """Whether this tensor makes what the units are (weights into them, biases, norms), or reads them."""

    def view(self, row: Tensor, size: int) -> Tensor:
        """The `size` units along `axis` and their positions along the next, as a view into `row`."""
        block = self.entry.view(row).narrow(self.axis, self.start, size * self.inner)
        return torch.unflatten(block, self.axis, (size, self.inner))


@dataclass(frozen=True)
class SymmetryGroup:
    """Units that may change places among themselves."""

    name: str
    """The layer that first makes them, and which part of its units, if they are several groups."""
    size: int
    ties: tuple[SymmetryTie, ...]
    coupled: bool
    """Whether they are normalised together, so that more of them change what each one does."""

    def vectors(self, row: Tensor, ties: Sequence[SymmetryTie]) -> Tensor:
        """One row of numbers for each unit: what lies in these ties."""
        parts = [tie.view(row, self.size).movedim(tie.axis, 0).reshape(self.size, -1) for tie in ties]
        return torch.cat(parts, dim=1) if parts else row.new_zeros(self.size, 0)

    def permute_(self, row: Tensor, order: Tensor) -> None:
        """Put unit `order[i]` into place i, in every tensor of the model in `row`."""
        for tie in self.ties:
            block = tie.view(row, self.size)
            block.copy_(block.index_select(tie.axis, order))

    def transport_(self, row: Tensor, P: Tensor) -> None:
        """Put the mixture sum_j P[i, j] (unit j) into place i; a permutation matrix permutes."""
        for tie in self.ties:
            if tie.entry.kind is not TensorKind.INTEGER:
                block = tie.view(row, self.size)
                block.copy_(torch.tensordot(P, block.to(P.dtype), dims=([1], [tie.axis])).movedim(0, tie.axis))


@dataclass(frozen=True)
class Symmetries:
    """The groups of a network, in the order in which it makes them."""

    groups: tuple[SymmetryGroup, ...]

    def elsewhere(self, tie: SymmetryTie) -> set[str]:
        """The groups that lie along the other axes of a tie's tensor, perhaps the tie's own among them."""
        return {
            other.name
            for other in self.groups
            for theirs in other.ties
            if theirs.entry.offset == tie.entry.offset and theirs.axis != tie.axis
        }

    def permuted(self, row: Tensor, orders: Sequence[Tensor]) -> Tensor:
        """A copy of the model in which each group is permuted, see `Group.permute_`: the same function."""
        row = row.clone()
        for group, order in zip(self.groups, orders, strict=True):
            group.permute_(row, order)
        return row

    def random(self, generator: torch.Generator) -> list[Tensor]:
        """A permutation for each group."""
        return [torch.randperm(group.size, generator=generator) for group in self.groups]


def find_symmetries(module: nn.Module, layout: Layout, shape: tuple[int, ...]) -> Symmetries:
    """The symmetries of a network for inputs of `shape`."""
    name = type(module).__name__
    module = deepcopy(module).to("cpu").eval()  # a copy: models of a run share their frozen weights
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    movable = {entry.name: tensors[entry.name] for entry in layout.entries}
    try:
        x, trace = _watched(module, movable, shape)
    except _UnclearSymmetryError as reason:
        raise InputError(f"the units of the model {name} cannot be matched: {reason}.") from None
    found = Symmetries(_groups(layout, movable, trace))
    _try_out(name, module, layout, found, x)
    return found


def find_run_symmetries(context: MethodContext) -> Symmetries:
    """The symmetries of a run's network."""
    return find_symmetries(context.make_module(), context.layout, context.shape)


def _watched(module: nn.Module, movable: dict[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, SymmetryTracer]:
    """An input of two samples, images or whatever the network takes, and what was seen."""
    dtype = next((p.dtype for p in movable.values() if p.is_floating_point()), torch.float32)
    x = torch.rand((2, *shape), generator=torch.Generator().manual_seed(0), dtype=dtype)
    try:
        return x, _trace_network(module, movable, x)
    except (RuntimeError, IndexError):
        tokens = x.round().long()  # an embedding takes whole numbers
        return tokens, _trace_network(module, movable, tokens)


def _groups(layout: Layout, tensors: dict[str, Tensor], trace: SymmetryTracer) -> tuple[SymmetryGroup, ...]:
    ties: dict[int, list[SymmetryTie]] = {}
    sets: dict[int, AxisUnits] = {}
    used = [entry for entry in layout.entries if id(tensors[entry.name]) in trace.used]
    for entry in sorted(used, key=lambda entry: trace.first[id(tensors[entry.name])]):
        key, axes = id(tensors[entry.name]), trace.of(tensors[entry.name])
        for number, axis in enumerate(axes):
            start = 0
            for segment in resolve_axis_segments(axis):
                if not segment.units.fixed:
                    ties.setdefault(id(segment.units), []).append(
                        SymmetryTie(entry, number, start, segment.inner, (key, number) not in trace.consuming)
                    )
                    sets[id(segment.units)] = segment.units
                start += segment.length
    names: dict[str, int] = {}
    groups = []
    for key, theirs in ties.items():
        if not any(tie.made for tie in theirs):
            continue  # columns that read constants: what lies there is no unit of the network
        home = next(tie for tie in theirs if tie.made).entry.unit
        names[home] = names.get(home, 0) + 1
        name = home if names[home] == 1 else f"{home}#{names[home]}"
        groups.append(SymmetryGroup(name, sets[key].size, tuple(theirs), sets[key].coupled))
    return tuple(groups)


@torch.no_grad()
def _try_out(name: str, module: nn.Module, layout: Layout, found: Symmetries, x: Tensor) -> None:
    """Refuse rather than be wrong: a random permutation must leave what the network computes as it is."""
    generator = torch.Generator().manual_seed(0)
    row = layout.read(module)
    for entry in layout.entries:
        if entry.kind is TensorKind.INTEGER:
            continue
        values = entry.view(row)
        noise = torch.rand(values.shape, generator=generator, dtype=row.dtype)
        values.copy_(values * (1 + 0.3 * noise) + 0.1 * noise * (values == 0))  # what starts as zero must count too
    outputs = []
    for each in (row, found.permuted(row, found.random(generator))):
        layout.bind(module, each)
        outputs.append(module(x))
    if not all(isinstance(output, Tensor) for output in outputs):
        return
    before, after = outputs
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-3 * float(before.abs().max())):
        raise InputError(
            f"the units of the model {name} cannot be matched: it computes something else when those change places "
            "that should be free to, so it treats some of them in a way that cannot be seen."
        )
