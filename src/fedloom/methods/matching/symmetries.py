"""Permutation symmetries of a network: which units may be permuted.

They include the positions of the units in a row.

A unit is a neuron or a channel. Permuting the units of a layer keeps the function of the network if the rows of its
weights, its biases and norms are permuted, and the columns of every layer that reads them. Layers that write into one
residual stream share one permutation. `find_symmetries` finds this by tracing one forward pass.

The tracer applies a rule (operations.py) to every operation that the network calls. An operation without a rule on
units that may be permuted is an error: a guess could change the function.
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
    """The units of this network that may be permuted cannot be determined; the message is the reason."""


class SymmetryTracer(TorchFunctionMode):
    """Traces operations; knows the axes of every tensor that depends on the network's tensors or its input."""

    def __init__(self, module: nn.Module, movable: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.where = ""
        self.used: set[int] = set()
        """Tensors of the network that were used, by id."""
        self.consuming: set[tuple[int, int]] = set()
        """(id of a tensor of the network, axis) of each sum of a product: the units are made elsewhere."""
        self.first: dict[int, int] = {}
        """The order in which tensors of the network were first used."""
        self._axes: dict[int, Axes | None] = {}
        self._alive: list[Tensor] = []  # so that no id is reused
        self._own = {id(tensor) for tensor in movable.values()}
        for tensor in (*module.parameters(), *module.buffers()):
            self.put(
                tensor,
                [make_permutable_axis(n) if id(tensor) in self._own else make_fixed_axis(n) for n in tensor.shape],
            )
        for name, child in module.named_modules():
            child.register_forward_pre_hook(lambda *_, name=name: setattr(self, "where", name))

    def put(self, tensor: Tensor, axes: Axes | None) -> None:
        """Set the axes of a tensor; None if they are unknown."""
        if axes is not None and [axis_length(axis) for axis in axes] != list(tensor.shape):
            raise ValueError(f"the axes do not fit a tensor of shape {tuple(tensor.shape)}")
        self._axes[id(tensor)] = axes
        self._alive.append(tensor)

    def knows(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on the network's tensors or its input, and is no constant."""
        return id(tensor) in self._axes

    def of(self, tensor: Tensor) -> Axes:
        """Return the axes of a tensor; those of a constant are fixed."""
        axes = self._axes.get(id(tensor), [make_fixed_axis(n) for n in tensor.shape])
        if axes is None:
            raise self.unclear("it uses the last state of a recurrent layer with several layers or directions")
        return axes

    def consume(self, tensor: Tensor, axis: int, by: Axis) -> None:
        """Note that a product sums over this axis of `tensor` against `by`."""
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
            raise self.unclear(f"there is no rule for the operation {name!r} on units")
        else:
            try:
                RULES[name](self, out, *args, **kwargs)
            except (TypeError, ValueError, IndexError):
                raise self.unclear(f"it calls {name!r} in an unsupported form") from None
        return out


def _name(func: Callable[..., Any]) -> str:
    """Return the name of a function, the same for functions, methods, operators and in-place forms."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    elif name == "fn":  # pools with two forms
        name = (resolve_name(func) or name).rpartition(".")[2]
    return name.strip("_")


def _trace_network(module: nn.Module, movable: Mapping[str, Tensor], x: Tensor) -> SymmetryTracer:
    """Trace one forward pass. `movable` are the tensors whose units may be permuted."""
    trace = SymmetryTracer(module, movable)
    trace.put(x, [make_fixed_axis(n) for n in x.shape])
    with torch.no_grad(), trace:
        out = module(x)
    for tensor in find_operation_tensors(out):  # outputs must not be permuted
        for axis in trace.of(tensor):
            fix_axis(axis)
    return trace


@dataclass(frozen=True)
class SymmetryTie:
    """The position of a group's units in one tensor: along `axis` from `start` on, `inner` positions each."""

    entry: LayoutEntry
    axis: int
    start: int
    inner: int
    produces_units: bool
    """Whether this tensor produces the units (incoming weights, biases, norms) or reads them."""

    def view(self, row: Tensor, size: int) -> Tensor:
        """Return a view into `row`: the `size` units along `axis` and their positions along the next axis."""
        block = self.entry.view(row).narrow(self.axis, self.start, size * self.inner)
        return torch.unflatten(block, self.axis, (size, self.inner))


@dataclass(frozen=True)
class SymmetryGroup:
    """Units that may be permuted among themselves."""

    name: str
    """The layer that first makes them, with a number if it has several groups."""
    size: int
    ties: tuple[SymmetryTie, ...]
    coupled: bool
    """Whether they are normalized together, so that adding units changes each output."""

    def vectors(self, row: Tensor, ties: Sequence[SymmetryTie]) -> Tensor:
        """Return a vector for each unit: its values in these ties."""
        parts = [tie.view(row, self.size).movedim(tie.axis, 0).reshape(self.size, -1) for tie in ties]
        return torch.cat(parts, dim=1) if parts else row.new_zeros(self.size, 0)

    def permute_(self, row: Tensor, order: Tensor) -> None:
        """Put unit `order[i]` into place i, in every tensor of the model in `row`."""
        for tie in self.ties:
            block = tie.view(row, self.size)
            block.copy_(block.index_select(tie.axis, order))

    def transport_(self, row: Tensor, P: Tensor) -> None:
        """Put the mixture sum_j P[i, j] (unit j) into place i; a permutation matrix permutes the units."""
        for tie in self.ties:
            if tie.entry.kind is not TensorKind.INTEGER:
                block = tie.view(row, self.size)
                block.copy_(torch.tensordot(P, block.to(P.dtype), dims=([1], [tie.axis])).movedim(0, tie.axis))


@dataclass(frozen=True)
class Symmetries:
    """The groups of a network, in the order in which it makes them."""

    groups: tuple[SymmetryGroup, ...]

    def elsewhere(self, tie: SymmetryTie) -> set[str]:
        """Return the groups along the other axes of a tie's tensor; its own may be among them."""
        return {
            other.name
            for other in self.groups
            for theirs in other.ties
            if theirs.entry.offset == tie.entry.offset and theirs.axis != tie.axis
        }

    def permuted(self, row: Tensor, orders: Sequence[Tensor]) -> Tensor:
        """Return a copy of the model with each group permuted (see `SymmetryGroup.permute_`): the same function."""
        row = row.clone()
        for group, order in zip(self.groups, orders, strict=True):
            group.permute_(row, order)
        return row

    def random(self, generator: torch.Generator) -> list[Tensor]:
        """Return a random permutation for each group."""
        return [torch.randperm(group.size, generator=generator) for group in self.groups]


def find_symmetries(module: nn.Module, layout: Layout, shape: tuple[int, ...]) -> Symmetries:
    """Return the symmetries of a network for inputs of `shape`."""
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
    """Return the symmetries of a run's network."""
    return find_symmetries(context.make_model(), context.layout, context.shape)


def _watched(module: nn.Module, movable: dict[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, SymmetryTracer]:
    """Return an input of two samples, images or tokens, and the trace of a forward pass on it."""
    dtype = next((p.dtype for p in movable.values() if p.is_floating_point()), torch.float32)
    x = torch.rand((2, *shape), generator=torch.Generator().manual_seed(0), dtype=dtype)
    try:
        return x, _trace_network(module, movable, x)
    except (RuntimeError, IndexError):
        tokens = x.round().long()  # an embedding takes integers
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
        if not any(tie.produces_units for tie in theirs):
            continue  # columns that read constants: there are no units of the network
        home = next(tie for tie in theirs if tie.produces_units).entry.layer
        names[home] = names.get(home, 0) + 1
        name = home if names[home] == 1 else f"{home}#{names[home]}"
        groups.append(SymmetryGroup(name, sets[key].size, tuple(theirs), sets[key].coupled))
    return tuple(groups)


@torch.no_grad()
def _try_out(name: str, module: nn.Module, layout: Layout, found: Symmetries, x: Tensor) -> None:
    """Raise an error if a random permutation changes the function of the network."""
    generator = torch.Generator().manual_seed(0)
    row = layout.read(module)
    for entry in layout.entries:
        if entry.kind is TensorKind.INTEGER:
            continue
        values = entry.view(row)
        noise = torch.rand(values.shape, generator=generator, dtype=row.dtype)
        values.copy_(values * (1 + 0.3 * noise) + 0.1 * noise * (values == 0))  # zero initial values must matter too
    outputs = []
    for each in (row, found.permuted(row, found.random(generator))):
        layout.bind(module, each)
        outputs.append(module(x))
    if not all(isinstance(output, Tensor) for output in outputs):
        return
    before, after = outputs
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-3 * float(before.abs().max())):
        raise InputError(
            f"the units of the model {name} cannot be matched: it computes something else after a permutation of units "
            "that the trace found free, so it depends on them in a way that the trace does not see."
        )
