"""What a recorded step depends on: things on the host, told by their values, and tensors, told by their addresses."""

import random
import weakref
from collections.abc import Hashable, Mapping
from types import CellType
from typing import Any

import numpy as np
from torch import Tensor

from fedloom.bench import Step
from fedloom.data import Samples


def address_of(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a `Local`'s own things."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, list | tuple) else []


def enclosed_in(step: Step) -> list[Any]:
    """What a function that was made in another one has from there."""
    cells = getattr(getattr(step, "__func__", step), "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if cell != CellType()]


class Same:
    """An object that is itself alone, and not another that came to lie in its place once it was gone."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        self._held: Any = None
        self._get: weakref.ref[Any] | None = None
        try:
            self._get = weakref.ref(value)  # no more than that: it may hold much memory
        except TypeError:
            self._held = value

    def _lives(self) -> bool:
        return self._get is None or self._get() is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._id == other._id and self._lives() and other._lives()

    def __hash__(self) -> int:
        return hash(self._id)


def summary_of(value: Any, deep: int = 2) -> Hashable:
    """What of a `Local`'s own things a recording depends on: addresses of tensors, values of the rest.

    Objects are themselves and what they hold, so many levels `deep`.
    """
    if isinstance(value, Tensor):
        return address_of(value)
    if isinstance(value, Samples):
        return address_of(value.x), address_of(value.y)
    if isinstance(value, Mapping):
        return tuple((key, summary_of(item, deep)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(summary_of(item, deep) for item in value)
    if isinstance(value, int | float | str | bool | None):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, np.random.Generator):
        return Same(value), repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return Same(value), value.getstate()
    held = getattr(value, "__dict__", None) if deep and not callable(value) else None
    return Same(value), summary_of(held, deep - 1)
