"""A model is a row.

All models of one run share a `Layout`: which tensor lies where in one contiguous row of floats. A population of
models is then a matrix, and every server method is linear algebra on rows. The modules that train are ordinary
`nn.Module`s whose tensors are views into a row, so nothing is flattened or copied per step.

A row has three blocks, one for each kind of tensor:

    [ trainable parameters | float buffers | integer buffers, as raw bytes ]
     0                     trainable       floats                          size

Only the first block is optimised; the first two are averaged; the bytes of the third are copied, never added. Before a
float buffer there may be a few zeros, so that it begins where a GPU can read it (see VECTOR).
Frozen parameters (`requires_grad=False`) are the same in every model and so are not part of a row.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from fedloom.errors import InputError

VECTOR = 4
"""Float buffers of so many numbers, or a multiple, begin at a multiple: batch norm on a GPU reads four at a time."""


class TensorKind(StrEnum):
    """What a tensor of a model is, and so how it may be treated."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INTEGER = "integer"


@dataclass(frozen=True)
class LayoutEntry:
    """One tensor of a model and its place in the row."""

    names: tuple[str, ...]
    """Its names in the state dict; more than one when weights are tied."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: TensorKind
    unit: str
    """The module that owns it: what FedMR calls a layer."""
    offset: int
    size: int
    """Row elements it takes; for integers enough of them to hold its bytes."""
    channels_last: bool
    gap: int = 0
    """Zeros before it."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def columns(self) -> slice:
        """Its part of a row, with the zeros before it: those of all entries are the whole row."""
        return slice(self.offset - self.gap, self.offset + self.size)

    def view(self, row: Tensor) -> Tensor:
        """This tensor as a view into `row`."""
        flat = row[self.offset : self.offset + self.size]
        if self.kind is TensorKind.INTEGER:
            raw = flat.view(torch.uint8)[: prod(self.shape) * self.dtype.itemsize]
            return raw.view(self.dtype).view(self.shape)
        if self.channels_last:
            out, channels, height, width = self.shape
            return flat.view(out, height, width, channels).permute(0, 3, 1, 2)
        return flat.view(self.shape)


class Layout:
    """Where each tensor of a model lies in its row."""

    def __init__(
        self,
        entries: tuple[LayoutEntry, ...],
        dtype: torch.dtype,
        frozen: tuple[str, ...] = (),
        modules: tuple[str, ...] = (),
    ) -> None:
        self.entries = entries
        self.dtype = dtype
        self.frozen = frozen
        self.modules = modules
        ends = {kind: max((e.columns.stop for e in entries if e.kind is kind), default=0) for kind in TensorKind}
        self.trainable = ends[TensorKind.PARAMETER]
        self.floats = max(self.trainable, ends[TensorKind.BUFFER])
        self.size = max(self.floats, ends[TensorKind.INTEGER])
        self._integers = _side_by_side(entry for entry in entries if entry.kind is TensorKind.INTEGER)

    @classmethod
    def of(cls, module: nn.Module, *, channels_last: bool = False) -> "Layout":
        """The layout of `module`'s models; `channels_last` stores convolution weights in that order."""
        parameters, buffers = _distinct(module)
        trainable = {names: tensor for names, tensor in parameters.items() if tensor.requires_grad}
        frozen = tuple(name for names in parameters if names not in trainable for name in names)
        floats = {n: tensor for n, tensor in buffers.items() if tensor.is_floating_point() or tensor.is_complex()}
        integers = {names: tensor for names, tensor in buffers.items() if names not in floats}
        dtype = _common_dtype({**trainable, **floats})

        entries: list[LayoutEntry] = []
        end = 0

        def place(kind: TensorKind, tensors: dict[tuple[str, ...], Tensor]) -> None:
            nonlocal end
            for names, tensor in tensors.items():
                size = tensor.numel()
                gap = -end % VECTOR if kind is TensorKind.BUFFER and size % VECTOR == 0 else 0
                end += gap
                if kind is TensorKind.INTEGER:
                    end += -end % (8 // dtype.itemsize)  # 64-bit integers must lie on 8-byte boundaries
                    size = -(-size * tensor.dtype.itemsize // 8) * (8 // dtype.itemsize)
                unit = _unit_of(names[0])
                strided = channels_last and tensor.dim() == 4 and kind is TensorKind.PARAMETER
                shape = tuple(tensor.shape)
                entries.append(LayoutEntry(names, shape, tensor.dtype, kind, unit, end, size, strided, gap))
                end += size

        place(TensorKind.PARAMETER, trainable)
        place(TensorKind.BUFFER, floats)
        place(TensorKind.INTEGER, integers)
        if not any(tensor.numel() for tensor in trainable.values()):
            raise InputError(f"the model {type(module).__name__} has no trainable parameter, so nothing can learn.")
        modules = tuple(path for path, _ in module.named_modules(remove_duplicate=False))
        return cls(tuple(entries), dtype, frozen, modules)

    @property
    def nbytes(self) -> int:
        """Bytes of one model on the wire."""
        return self.size * self.dtype.itemsize

    def units(self) -> dict[str, list[slice]]:
        """The columns of each unit (leaf module), in the order of the model.

        That of the row is another one: all buffers lie behind all parameters, so a module of buffers alone would be
        among the last.
        """
        columns: dict[str, list[slice]] = {path: [] for path in self.modules}
        for entry in self.entries:
            columns.setdefault(entry.unit, []).append(entry.columns)
        return {unit: parts for unit, parts in columns.items() if parts}

    def empty(self, device: torch.device | str = "cpu") -> Tensor:
        """A new row of zeros."""
        return torch.zeros(self.size, dtype=self.dtype, device=device)

    def read(self, module: nn.Module, device: torch.device | str = "cpu") -> Tensor:
        """A new row that holds the model as it now stands in `module`."""
        row = self.empty(device)
        tensors = _named_tensors(module)
        for entry in self.entries:
            entry.view(row).copy_(tensors[entry.name].detach())
        return row

    def bind(self, module: nn.Module, row: Tensor) -> None:
        """Make the tensors of `module` views into `row`: what trains there is the row itself."""
        if row.shape != (self.size,) or row.dtype is not self.dtype:
            raise ValueError(f"a row of this layout has {self.size} x {self.dtype}, not {row.shape} x {row.dtype}")
        modules = dict(module.named_modules(remove_duplicate=False))
        for entry in self.entries:
            view = entry.view(row)
            for name in entry.names:
                path, _, leaf = name.rpartition(".")
                if entry.kind is TensorKind.PARAMETER:
                    getattr(modules[path], leaf).data = view
                else:
                    # `.data`: views of one row would share a version, so that autograd takes one batch norm's new
                    # statistics for a change of another's, and refuses to go backward.
                    modules[path]._buffers[leaf] = view.data

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """The named tensors of `row`, copied, without the frozen ones."""
        return {name: e.view(row).detach().clone().contiguous() for e in self.entries for name in e.names}

    def views(self, row: Tensor, kind: TensorKind = TensorKind.PARAMETER) -> list[Tensor]:
        """The tensors of one kind as views into `row` (or into its trainable block alone)."""
        return [entry.view(row) for entry in self.entries if entry.kind is kind]

    def integers(self, row: Tensor) -> list[Tensor]:
        """All integers of `row`: a flat view of those of one type that lie side by side, such as the counters of norms.

        Where some do not fill eight bytes there are zeros between them.
        """
        return [row[columns].view(torch.uint8).view(dtype) for columns, dtype in self._integers]

    def is_finite(self, row: Tensor) -> bool:
        """Whether every float of `row` is finite."""
        return all_finite(row[: self.floats])

    def fingerprint(self) -> str:
        """What two networks must have in common to exchange models."""
        return hashlib.sha256(repr((self.describe(), str(self.dtype))).encode()).hexdigest()[:32]

    def describe(self) -> list[dict[str, object]]:
        """The layout as plain data, to be stored beside rows and compared."""
        return [
            {
                "name": e.name,
                "shape": list(e.shape),
                "kind": e.kind.value,
                "dtype": str(e.dtype),
                "offset": e.offset,
                "channels_last": e.channels_last,
            }
            for e in self.entries
        ]


def all_finite(tensor: Tensor) -> bool:
    """Whether every number is finite. A finite sum proves it in one quick pass; huge numbers may need a second."""
    if bool(torch.isfinite(tensor.sum())):
        return True
    low, high = torch.aminmax(tensor)  # both carry a NaN on
    return bool(torch.isfinite(low) & torch.isfinite(high))


def model_digest(row: Tensor) -> str:
    """SHA-256 of a row's bytes: two models with one digest are equal bit for bit."""
    return hashlib.sha256(row.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def _side_by_side(integers: Iterable[LayoutEntry]) -> list[tuple[slice, torch.dtype]]:
    """The columns of integers of one type that lie side by side."""
    found: list[tuple[slice, torch.dtype]] = []
    for entry in integers:
        before, dtype = found[-1] if found else (slice(0, 0), None)
        if dtype is entry.dtype and before.stop == entry.offset:
            found[-1] = slice(before.start, entry.offset + entry.size), entry.dtype
        else:
            found.append((slice(entry.offset, entry.offset + entry.size), entry.dtype))
    return found


def _unit_of(name: str) -> str:
    """The module that a tensor is of.

    Both factors of a low-rank adaptation are of the module that is adapted: one alone means nothing in another model.
    """
    module = f".{name}".rpartition(".")[0]  # with a dot before it even where it is of the network itself
    return module.partition(".lora_")[0].removeprefix(".")


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and leaf not in owner._non_persistent_buffers_set:
                tensors[f"{prefix}.{leaf}" if prefix else leaf] = buffer
    return tensors


def _distinct(module: nn.Module) -> tuple[dict[tuple[str, ...], Tensor], dict[tuple[str, ...], Tensor]]:
    """Parameters and buffers, each tensor once with all of its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in _named_tensors(module).items():
        if nn.parameter.is_lazy(tensor):
            raise InputError(f"{name} of the model has no shape yet; pass one batch through lazy modules first.")
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    _refuse_hidden_ties([(names[key][0], tensor) for key, tensor in tensors.items()])
    groups: tuple[dict[tuple[str, ...], Tensor], dict[tuple[str, ...], Tensor]] = ({}, {})
    for key, tensor in tensors.items():
        groups[0 if isinstance(tensor, nn.Parameter) else 1][tuple(names[key])] = tensor
    return groups


def _refuse_hidden_ties(tensors: list[tuple[str, Tensor]]) -> None:
    """Two tensor objects over one memory would come apart when bound to a row, silently: say so instead."""
    spans = []
    for name, tensor in tensors:
        if tensor.numel() and tensor.device.type != "meta":
            steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (steps + 1) * tensor.element_size(), name))
    for (_, end, other), (start, _, name) in pairwise(sorted(spans)):
        if start < end:
            raise InputError(
                f"{name} and {other} of the model share memory but are two tensors; tie them by using one "
                "Parameter object under both names."
            )


def _common_dtype(tensors: dict[tuple[str, ...], Tensor]) -> torch.dtype:
    dtypes = {tensor.dtype: names[0] for names, tensor in tensors.items()}
    if not dtypes:
        return torch.float32
    if len(dtypes) > 1 or next(iter(dtypes)) not in (torch.float32, torch.float64):
        found = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in dtypes.items())
        raise InputError(f"the floats of a model must all be float32 (or all float64), but {found}.")
    return next(iter(dtypes))


def scatter_columns(row: Tensor, stays_home: Sequence[slice], values: Tensor) -> None:
    """Put what a client keeps as STAYS into the columns of `row` where it belongs."""
    start = 0
    for columns in stays_home:
        size = columns.stop - columns.start
        row[columns] = values[start : start + size]
        start += size
