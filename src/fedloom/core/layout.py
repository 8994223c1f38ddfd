"""The layout of a model in one flat vector, called a row.

All models of a run share a `Layout`: it says where each tensor lies in a contiguous row of floats. Several models are
a matrix, so a server method is linear algebra on rows. The modules that train are ordinary `nn.Module`s whose tensors
are views into a row, so no step flattens or copies weights.

A row has three blocks, one for each kind of tensor:

    [ trainable parameters | float buffers | integer buffers, as raw bytes ]
     0                     trainable       floats                          size

Optimizers change the first block. The server averages the first two. The bytes of the third are copied, never added.
A float buffer may have a few zeros before it, for alignment (see `VECTOR`). Frozen parameters (`requires_grad=False`)
are the same in every model, so a row does not hold them.
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
"""A float buffer whose size is a multiple of this starts at a multiple: batch norm on a GPU reads four at a time."""


class TensorKind(StrEnum):
    """The kind of a tensor: the block of the row that holds it."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INTEGER = "integer"


@dataclass(frozen=True)
class LayoutEntry:
    """One tensor of a model and its place in the row."""

    names: tuple[str, ...]
    """Its names in the state dict; more than one if weights are tied."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: TensorKind
    layer: str
    """The module that owns it; FedMR recombines models by these layers."""
    offset: int
    size: int
    """Number of row elements that it takes; for integers, enough to hold its bytes."""
    channels_last: bool
    gap: int = 0
    """Number of zeros before it."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def columns(self) -> slice:
        """Return its columns, with the zeros before it. The columns of all entries make up the whole row."""
        return slice(self.offset - self.gap, self.offset + self.size)

    def view(self, row: Tensor) -> Tensor:
        """Return this tensor as a view into `row`."""
        flat = row[self.offset : self.offset + self.size]
        if self.kind is TensorKind.INTEGER:
            raw = flat.view(torch.uint8)[: prod(self.shape) * self.dtype.itemsize]
            return raw.view(self.dtype).view(self.shape)
        if self.channels_last:
            out, channels, height, width = self.shape
            return flat.view(out, height, width, channels).permute(0, 3, 1, 2)
        return flat.view(self.shape)


class Layout:
    """Where each tensor of a model lies in its row.

    The blocks of a row end at `trainable` (parameters), `floats` (float buffers) and `size` (integer buffers).

    Attributes:
        entries: The tensors, in the order of the row.
        dtype: The dtype of a row, float32 or float64.
        frozen: Names of parameters with `requires_grad=False`, which are not in the row.
        modules: Names of all modules, in the order of the model.

    Example:
        layout = Layout.of(module)
        row = layout.read(module)
        layout.bind(module, row)  # from now on training changes `row`
    """

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
        """Return the layout of the models of `module`.

        Args:
            module: The network.
            channels_last: Store the weights of 2-d convolutions in channels-last order.

        Raises:
            InputError: If nothing can be trained, float dtypes are mixed, or two tensors share memory.
        """
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
                layer = _unit_of(names[0])
                strided = channels_last and tensor.dim() == 4 and kind is TensorKind.PARAMETER
                shape = tuple(tensor.shape)
                entries.append(LayoutEntry(names, shape, tensor.dtype, kind, layer, end, size, strided, gap))
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
        """Return the bytes of one model when it is sent."""
        return self.size * self.dtype.itemsize

    def layer_columns(self) -> dict[str, list[slice]]:
        """Return the columns of each layer (a module with tensors of its own), in the order of the model.

        A row has another order: all buffers come after all parameters.
        """
        columns: dict[str, list[slice]] = {path: [] for path in self.modules}
        for entry in self.entries:
            columns.setdefault(entry.layer, []).append(entry.columns)
        return {layer: parts for layer, parts in columns.items() if parts}

    def empty(self, device: torch.device | str = "cpu") -> Tensor:
        """Return a new row of zeros.

        Args:
            device: Where the row lies.
        """
        return torch.zeros(self.size, dtype=self.dtype, device=device)

    def read(self, module: nn.Module, device: torch.device | str = "cpu") -> Tensor:
        """Return a new row with a copy of the tensors of `module`.

        Args:
            module: A network of this layout.
            device: Where the row lies.
        """
        row = self.empty(device)
        tensors = _named_tensors(module)
        for entry in self.entries:
            entry.view(row).copy_(tensors[entry.name].detach())
        return row

    def bind(self, module: nn.Module, row: Tensor) -> None:
        """Make the tensors of `module` views into `row`, so that training the module changes the row.

        Args:
            module: A network of this layout.
            row: The row of a model. It stays in use until another row is bound.

        Raises:
            ValueError: If `row` has another size or dtype than this layout.
        """
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
                    # `.data`: views of one row share a version counter. New statistics of one batch norm would count
                    # as an in-place change of another's, and autograd would raise an error in the backward pass.
                    modules[path]._buffers[leaf] = view.data

    def state_dict(self, row: Tensor) -> dict[str, Tensor]:
        """Return copies of the named tensors of `row`, without frozen parameters.

        Args:
            row: The row of a model.
        """
        return {name: e.view(row).detach().clone().contiguous() for e in self.entries for name in e.names}

    def views(self, row: Tensor, kind: TensorKind = TensorKind.PARAMETER) -> list[Tensor]:
        """Return the tensors of one kind as views into `row`.

        Args:
            row: The row of a model. For parameters, its trainable block is enough.
            kind: Which tensors: parameters, float buffers or integer buffers.
        """
        return [entry.view(row) for entry in self.entries if entry.kind is kind]

    def integers(self, row: Tensor) -> list[Tensor]:
        """Return all integers of `row`, as one flat view for each stretch of neighbors of one dtype.

        There are zeros between integers that do not fill eight bytes.

        Args:
            row: The row of a model.
        """
        return [row[columns].view(torch.uint8).view(dtype) for columns, dtype in self._integers]

    def is_finite(self, row: Tensor) -> bool:
        """Return whether every float of `row` is finite.

        Args:
            row: The row of a model.
        """
        return all_finite(row[: self.floats])

    def fingerprint(self) -> str:
        """Return a hash of the layout. Two networks can exchange models if it is the same for both."""
        return hashlib.sha256(repr((self.describe(), str(self.dtype))).encode()).hexdigest()[:32]

    def describe(self) -> list[dict[str, object]]:
        """Return the layout as plain data, to store beside rows and to compare."""
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
    """Return whether every number is finite. A finite sum proves it in one pass; huge numbers need a second one."""
    if bool(torch.isfinite(tensor.sum())):
        return True
    low, high = torch.aminmax(tensor)  # both are NaN if the tensor has a NaN
    return bool(torch.isfinite(low) & torch.isfinite(high))


def model_digest(*rows: Tensor) -> str:
    """Return the SHA-256 of the bytes of rows, in order. Models with the same digest are equal bit for bit."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _side_by_side(integers: Iterable[LayoutEntry]) -> list[tuple[slice, torch.dtype]]:
    """Return the columns of each stretch of neighboring integer buffers of one dtype."""
    found: list[tuple[slice, torch.dtype]] = []
    for entry in integers:
        before, dtype = found[-1] if found else (slice(0, 0), None)
        if dtype is entry.dtype and before.stop == entry.offset:
            found[-1] = slice(before.start, entry.offset + entry.size), entry.dtype
        else:
            found.append((slice(entry.offset, entry.offset + entry.size), entry.dtype))
    return found


def _unit_of(name: str) -> str:
    """Return the layer of a tensor.

    Both factors of a low-rank adaptation (LoRA) belong to the adapted module: one alone is useless in another model.
    """
    module = f".{name}".rpartition(".")[0]  # the dot is for tensors of the network itself, which have none
    return module.partition(".lora_")[0].removeprefix(".")


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and leaf not in owner._non_persistent_buffers_set:
                tensors[f"{prefix}.{leaf}" if prefix else leaf] = buffer
    return tensors


def _distinct(module: nn.Module) -> tuple[dict[tuple[str, ...], Tensor], dict[tuple[str, ...], Tensor]]:
    """Return parameters and buffers, each tensor once, with all of its names."""
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
    """Raise an error if two tensors share memory: binding them to a row would silently separate them."""
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


def scatter_columns(row: Tensor, columns: Sequence[slice], values: Tensor) -> None:
    """Write `values` into these columns of `row`, one after the other."""
    start = 0
    for part in columns:
        size = part.stop - part.start
        row[part] = values[start : start + size]
        start += size
