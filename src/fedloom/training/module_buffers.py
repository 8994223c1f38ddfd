"""Keep module buffers in the row, and reset non-persistent buffers.

A network may change a buffer in place, or assign a new tensor (`self.mean = 0.9 * self.mean + ...`). The new tensor is
outside the row until `gather` copies it. Buffers with `persistent=False` are in no row, so each client starts with
their initial values. Otherwise values of one client would reach another, and which one would depend on the engine.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.layout import Layout, TensorKind
from fedloom.errors import FedloomError


class _BufferSlot(NamedTuple):
    """The place where a network stores one of its buffers."""

    name: str
    buffers: dict[str, Tensor | None]
    """The buffers of the module that owns it."""
    leaf: str
    """Its name in that module."""
    persistent: bool

    @property
    def tensor(self) -> Tensor | None:
        return self.buffers[self.leaf]


def copy_non_persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the non-persistent buffers, by name."""
    found = [(place.name, place.tensor) for place in _places(module) if not place.persistent]
    return {name: tensor.detach().clone() for name, tensor in found if tensor is not None}


class ModuleBuffers:
    """Keep the buffers of one network in the row that it is bound to."""

    def __init__(
        self, module: nn.Module, layout: Layout, initial_buffers: Mapping[str, Tensor], device: torch.device
    ) -> None:
        names = {name for entry in layout.entries if entry.kind is not TensorKind.PARAMETER for name in entry.names}
        self._in_rows = [place for place in _places(module) if place.name in names]
        self._non_persistent = _held(place for place in _places(module) if place.name in initial_buffers)
        self._initial = [initial_buffers[place.name].to(device) for place, _ in self._non_persistent]
        self._held = self._non_persistent

    def hold(self) -> None:
        """Remember the present buffers as the right ones, after the network was bound to a row."""
        self._held = _held(self._in_rows) + self._non_persistent

    @torch.no_grad()
    def gather(self) -> None:
        """Copy tensors that the network assigned to its buffers into the row."""
        for place, held in self._held:
            written = place.tensor
            if written is held:
                continue
            if written is not None and written.shape == held.shape:
                held.copy_(written.detach())
            elif not place.persistent:
                continue  # for example a mask for inputs of another length
            else:
                now = "None" if written is None else f"a tensor of shape {tuple(written.shape)}"
                has = f"its buffer {place.name} of shape {tuple(held.shape)}"
                raise FedloomError(f"the network assigned {now} to {has}; buffers must keep their shape.")
            place.buffers[place.leaf] = held

    def forget(self) -> None:
        """Drop tensors that the network assigned to its buffers: they belong to another client."""
        for place, held in self._held:
            place.buffers[place.leaf] = held

    def renew(self) -> None:
        """Reset non-persistent buffers to their initial values."""
        for (place, held), fresh in zip(self._non_persistent, self._initial, strict=True):
            place.buffers[place.leaf] = held.copy_(fresh)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Use initial non-persistent buffers inside, and drop tensors that the network assigns to buffers."""
        kept = [(place, place.tensor, held.clone()) for place, held in self._non_persistent]
        self.renew()
        try:
            yield
        finally:
            for place, held in self._held:
                place.buffers[place.leaf] = held
            for (place, tensor, value), (_, held) in zip(kept, self._non_persistent, strict=True):
                held.copy_(value)
                place.buffers[place.leaf] = tensor


def _places(module: nn.Module) -> list[_BufferSlot]:
    return [
        _BufferSlot(
            f"{path}.{leaf}" if path else leaf, owner._buffers, leaf, leaf not in owner._non_persistent_buffers_set
        )
        for path, owner in module.named_modules(remove_duplicate=False)
        for leaf in owner._buffers
    ]


def _held(places: Iterable[_BufferSlot]) -> list[tuple[_BufferSlot, Tensor]]:
    return [(place, place.tensor) for place in places if place.tensor is not None]
