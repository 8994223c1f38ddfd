"""The buffers of a network that trains, whichever way it writes them.

A network may change a buffer in place, or put a new tensor in its place (`self.mean = 0.9 * self.mean + ...`), which
lies outside the row that the model is until it is gathered. And it may have buffers that are no part of its state
(`persistent=False`): they are in no row, so each client begins with them as the network was built, or what one client
left there would reach another, and which one would depend on the engine.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.layout import Layout, TensorKind
from fedloom.errors import FedloomError


class _BufferSlot(NamedTuple):
    """Where a network looks for one of its buffers."""

    name: str
    buffers: dict[str, Tensor | None]
    """Those of the module that has it."""
    leaf: str
    """Its name there."""
    persistent: bool

    @property
    def tensor(self) -> Tensor | None:
        return self.buffers[self.leaf]


def copy_non_persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers that are no part of the module's state, by their names."""
    found = [(place.name, place.tensor) for place in _places(module) if not place.persistent]
    return {name: tensor.detach().clone() for name, tensor in found if tensor is not None}


class ModuleBuffers:
    """Keeps the buffers of one network where they belong."""

    def __init__(self, module: nn.Module, layout: Layout, fresh: Mapping[str, Tensor], device: torch.device) -> None:
        names = {name for entry in layout.entries if entry.kind is not TensorKind.PARAMETER for name in entry.names}
        self._in_rows = [place for place in _places(module) if place.name in names]
        self._aside = _held(place for place in _places(module) if place.name in fresh)
        self._fresh = [fresh[place.name].to(device) for place, _ in self._aside]
        self._held = self._aside

    def hold(self) -> None:
        """The network was bound to a row: this is where its buffers belong from now on."""
        self._held = _held(self._in_rows) + self._aside

    @torch.no_grad()
    def gather(self) -> None:
        """Put what the network has put in the place of its buffers into them."""
        for place, held in self._held:
            written = place.tensor
            if written is held:
                continue
            if written is not None and written.shape == held.shape:
                held.copy_(written.detach())
            elif not place.persistent:
                continue  # what it makes anew for inputs of another length, say
            else:
                now = "none" if written is None else f"one of shape {tuple(written.shape)}"
                has = f"its buffer {place.name}, which has shape {tuple(held.shape)}"
                raise FedloomError(f"the network put {now} in the place of {has}; buffers keep their shape.")
            place.buffers[place.leaf] = held

    def forget(self) -> None:
        """Let the network look where its buffers belong: what it has put in their place is another client's."""
        for place, held in self._held:
            place.buffers[place.leaf] = held

    def renew(self) -> None:
        """Let the buffers that are no part of the state be as the network was built."""
        for (place, held), fresh in zip(self._aside, self._fresh, strict=True):
            place.buffers[place.leaf] = held.copy_(fresh)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Inside, the network computes as it was built; what it puts in the place of a buffer there is forgotten."""
        kept = [(place, place.tensor, held.clone()) for place, held in self._aside]
        self.renew()
        try:
            yield
        finally:
            for place, held in self._held:
                place.buffers[place.leaf] = held
            for (place, tensor, value), (_, held) in zip(kept, self._aside, strict=True):
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
