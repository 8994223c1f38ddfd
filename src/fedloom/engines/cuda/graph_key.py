"""Graph keys: what a captured step depends on.

Host objects count by value, tensors by address.

A graph keeps the host values of its capture, so a slot tracks which of its values a step reads.
"""

import io
import random
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.config import TrainingConfig
from fedloom.data import Samples
from fedloom.training.context import Step
from fedloom.training.trainer import LocalTrainer

if TYPE_CHECKING:
    from fedloom.engines.cuda.slot import CudaSlot


FIXED = {"context", "options"}
"""Attributes that every `Client` has and never changes."""

NUMBERS = (int, float, str)

USUAL = frozenset(vars(nn.Module()))
"""Names of the attributes that every module has; those that matter enter the key elsewhere."""


MOST_NESTED = 8
"""Levels of nested containers to look into: a container may hold itself."""


def tensor_graph_key(tensor: Tensor) -> Hashable:
    try:
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    except RuntimeError:  # it has several addresses, like sparse tensors
        return _ObjectIdentity(tensor)


class GraphKeyStep(NamedTuple):
    """A step, taken apart."""

    function: Any
    """The function or callable object that is called in the end."""
    owner: Any
    """The object whose method it is; None for a plain function."""
    bound_arguments: list[Any]
    """Arguments that `partial` has bound."""

    @property
    def kind(self) -> "_StepIdentity":
        """Return the identity of the step. A new step at the same address is not equal to it."""
        return _StepIdentity(_ObjectIdentity(self.function), _ObjectIdentity(self.owner))

    @property
    def closure_values(self) -> list[Any]:
        """Return the present bound arguments, closure variables and defaults."""
        return self.bound_arguments + _closure_values(self.function)

    @property
    def attributes(self) -> dict[str, Any]:
        """Return the attributes of its owner without those that never change."""
        owner = self.function if self.owner is None else self.owner
        return {name: value for name, value in _object_attributes(owner).items() if name not in FIXED}


def inspect_graph_key_step(step: Step) -> GraphKeyStep:
    """Take a step apart."""
    bound_arguments, found = list[Any](), step
    while isinstance(found, partial):
        bound_arguments += [found.args, found.keywords]
        found = found.func
    return GraphKeyStep(getattr(found, "__func__", found), getattr(found, "__self__", None), bound_arguments)


def _closure_values(function: Any) -> list[Any]:
    """Return the closure variables of a function, and its defaults."""
    function = getattr(function, "__func__", function)
    cells = getattr(function, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in cells if cell != CellType()]
    return [*inside, getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)]


def _object_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object."""
    names = ["__dict__"]
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__")]
    held = dict[str, Any]()
    for name in names:
        with suppress(Exception):  # it is missing, or a custom `__getattr__` raises
            found = getattr(value, name)
            held |= found if name == "__dict__" else {name: found}
    return held


def graph_key_tensors(value: Any, depth: int = 2, max_nesting: int = MOST_NESTED) -> list[Tensor]:
    """Return all tensors in a client's own objects, as deep as `build_graph_key` looks."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | deque):
        return [tensor for item in value if max_nesting for tensor in graph_key_tensors(item, depth, max_nesting - 1)]
    if not depth or isinstance(value, LocalTrainer | Samples | type):
        return []
    return graph_key_tensors(_inside(value), depth - 1, max_nesting)


class _ObjectIdentity:
    """The identity of an object. A new object at its address, once it is gone, is not equal."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        self._held: Any = None
        self._get: weakref.ref[Any] | None = None
        try:
            self._get = weakref.ref(value)  # weak: the object may hold much memory
        except TypeError:
            self._held = value

    @property
    def gone(self) -> bool:
        return self._get is not None and self._get() is None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ObjectIdentity) and self._id == other._id and not self.gone and not other.gone

    def __hash__(self) -> int:
        return hash(self._id)

    def __str__(self) -> str:
        value = self._held if self._get is None else self._get()
        return str(getattr(value, "__qualname__", type(value).__qualname__))


class _StepIdentity(NamedTuple):
    """The identity of a step."""

    function: _ObjectIdentity
    owner: _ObjectIdentity

    @property
    def gone(self) -> bool:
        """Return whether this step can never come again."""
        return self.function.gone or self.owner.gone


def build_graph_key(value: Any, depth: int = 2, max_nesting: int = MOST_NESTED) -> Hashable:
    """Return what a graph depends on in a client's own objects: addresses of tensors, values of the rest.

    Objects count by identity and by their content, `depth` levels deep.
    """
    if isinstance(value, Tensor):
        return tensor_graph_key(value)
    if isinstance(value, int | float | str | bool | None):
        return value
    if isinstance(value, Samples):
        return tensor_graph_key(value.x), tensor_graph_key(value.y)
    if isinstance(value, Mapping | list | tuple | deque | set | frozenset) and not max_nesting:
        return _ObjectIdentity(value)
    if isinstance(value, Mapping):
        return tuple((key, build_graph_key(item, depth, max_nesting - 1)) for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        return tuple(build_graph_key(item, depth, max_nesting - 1) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(build_graph_key(item, depth, max_nesting - 1) for item in value)
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape, sha256(value.tobytes()).digest()  # the array may take much memory
    if isinstance(value, np.random.Generator):
        return _ObjectIdentity(value), repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return _ObjectIdentity(value), value.getstate()
    if isinstance(value, torch.Generator):  # GPU generators are registered, or capture fails
        return _ObjectIdentity(value), value.get_state().numpy().tobytes() if value.device.type == "cpu" else None
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return object()  # its position is unknown, so it never matches
    if not depth or isinstance(value, LocalTrainer | type):
        return _ObjectIdentity(value)
    if isinstance(value, nn.Module):
        return _ObjectIdentity(value), modules_graph_key(value.modules(), depth - 1)
    return _ObjectIdentity(value), build_graph_key(_inside(value), depth - 1, max_nesting)


def _inside(value: Any) -> Any:
    """Return what an object holds."""
    if isinstance(value, FunctionType | MethodType):
        return _closure_values(value), getattr(value, "__self__", None)
    return {} if isinstance(value, BuiltinFunctionType) else _object_attributes(value)


def modules_graph_key(modules: Iterable[nn.Module], depth: int = 1) -> Hashable:
    """Return the host state of modules: numbers, and all other attributes of custom modules too."""
    found = list[Hashable]()
    seen = dict[int, Hashable]()  # for settings that all layers share
    for module in modules:
        is_custom = not type(module).__module__.startswith("torch.")
        for name, value in vars(module).items():
            if isinstance(value, NUMBERS):
                found.append(value)
            elif is_custom and name not in USUAL:
                if id(value) not in seen:
                    seen[id(value)] = build_graph_key(value, depth)
                found.append(seen[id(value)])
    return tuple(found)


ALWAYS_READ = ("batch_size", "clip")
"""Settings that every step reads, so all graphs depend on them."""


class GraphKeyAttribute:
    """A host value of a slot. Reads are tracked, because a graph keeps the value of its capture."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, slot: "CudaSlot | None", owner: type) -> Any:
        if slot is None:
            return self
        if slot.tracked_reads is not None:
            slot.tracked_reads.add(self.name)
        return slot.host[self.name]

    def __set__(self, slot: "CudaSlot", value: Any) -> None:
        slot.host[self.name] = value


class GraphKeyConfig:
    """The settings of a client's training. It tracks the names that are read."""

    def __init__(self, config: TrainingConfig, names_read: set[str]) -> None:
        self._config, self._names_read = config, names_read

    def __getattr__(self, name: str) -> Any:
        if name not in ALWAYS_READ:
            self._names_read.add(f"config.{name}")
        return getattr(self._config, name)
