"""The permutation symmetries of a network: units that may change places, and where each of them lies in a row.

A unit is a neuron or a channel. To let the units of a layer change places without changing what the network computes,
the rows of its weights, its biases and norms must be permuted, and the columns of every layer that reads it; layers
that write into one residual stream share one permutation. `find` sees this by letting the network compute once
(tracing.py); a network for which it cannot be told is refused by name.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.errors import InputError
from fedloom.methods.axes import Units, flat
from fedloom.methods.base import Context
from fedloom.methods.tracing import Trace, Unclear, watch
from fedloom.rows import Entry, Kind, Layout


@dataclass(frozen=True)
class Tie:
    """Where the units of a group lie in one tensor: along `axis` from `start` on, `inner` positions for each."""

    entry: Entry
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
class Group:
    """Units that may change places among themselves."""

    name: str
    """The layer that first makes them, and which part of its units, if they are several groups."""
    size: int
    ties: tuple[Tie, ...]
    coupled: bool
    """Whether they are normalised together, so that more of them change what each one does."""

    def vectors(self, row: Tensor, ties: Sequence[Tie]) -> Tensor:
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
            if tie.entry.kind is not Kind.INTEGER:
                block = tie.view(row, self.size)
                block.copy_(torch.tensordot(P, block.to(P.dtype), dims=([1], [tie.axis])).movedim(0, tie.axis))


@dataclass(frozen=True)
class Symmetries:
    """The groups of a network, in the order in which it makes them."""

    groups: tuple[Group, ...]

    def elsewhere(self, tie: Tie) -> set[str]:
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


def find(module: nn.Module, layout: Layout, shape: tuple[int, ...]) -> Symmetries:
    """The symmetries of a network for inputs of `shape`."""
    name = type(module).__name__
    module = deepcopy(module).to("cpu").eval()  # a copy: models of a run share their frozen weights
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    movable = {entry.name: tensors[entry.name] for entry in layout.entries}
    try:
        x, trace = _watched(module, movable, shape)
    except Unclear as reason:
        raise InputError(f"the units of the model {name} cannot be matched: {reason}.") from None
    found = Symmetries(_groups(layout, movable, trace))
    _try_out(name, module, layout, found, x)
    return found


def find_for(context: Context) -> Symmetries:
    """The symmetries of a run's network."""
    return find(context.make_module(), context.layout, context.shape)


def _watched(module: nn.Module, movable: dict[str, Tensor], shape: tuple[int, ...]) -> tuple[Tensor, Trace]:
    """An input of two samples, images or whatever the network takes, and what was seen."""
    dtype = next((p.dtype for p in movable.values() if p.is_floating_point()), torch.float32)
    x = torch.rand((2, *shape), generator=torch.Generator().manual_seed(0), dtype=dtype)
    try:
        return x, watch(module, movable, x)
    except (RuntimeError, IndexError):
        tokens = x.round().long()  # an embedding takes whole numbers
        return tokens, watch(module, movable, tokens)


def _groups(layout: Layout, tensors: dict[str, Tensor], trace: Trace) -> tuple[Group, ...]:
    ties: dict[int, list[Tie]] = {}
    sets: dict[int, Units] = {}
    used = [entry for entry in layout.entries if id(tensors[entry.name]) in trace.used]
    for entry in sorted(used, key=lambda entry: trace.first[id(tensors[entry.name])]):
        key, axes = id(tensors[entry.name]), trace.of(tensors[entry.name])
        for number, axis in enumerate(axes):
            start = 0
            for segment in flat(axis):
                if not segment.units.fixed:
                    ties.setdefault(id(segment.units), []).append(
                        Tie(entry, number, start, segment.inner, (key, number) not in trace.consuming)
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
        groups.append(Group(name, sets[key].size, tuple(theirs), sets[key].coupled))
    return tuple(groups)


@torch.no_grad()
def _try_out(name: str, module: nn.Module, layout: Layout, found: Symmetries, x: Tensor) -> None:
    """Refuse rather than be wrong: a random permutation must leave what the network computes as it is."""
    generator = torch.Generator().manual_seed(0)
    row = layout.read(module)
    for entry in layout.entries:
        if entry.kind is Kind.INTEGER:
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
