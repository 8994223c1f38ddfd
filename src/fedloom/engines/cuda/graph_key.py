"""What a recorded step depends on: things on the host, told by their values, and tensors, told by their addresses.

Host values on a slot's bench: which of them a step reads is noted, for a recording keeps the values they had.
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
"""What every `Local` has and never changes."""

NUMBERS = (int, float, str)

USUAL = frozenset(vars(nn.Module()))
"""What every network has, by the names of its attributes; what of it matters is seen elsewhere."""


MOST_NESTED = 8
"""Containers in each other that are looked into: one may hold itself."""


def tensor_graph_key(tensor: Tensor) -> Hashable:
    try:
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    except RuntimeError:  # it lies in several places, as sparse ones do
        return _ObjectIdentity(tensor)


class GraphKeyStep(NamedTuple):
    """A step, taken apart."""

    function: Any
    """What is called in the end: a function, or an object that can be called."""
    owner: Any
    """Whose method it is; None for a plain function."""
    given: list[Any]
    """Arguments that it has got already."""

    @property
    def kind(self) -> "_StepIdentity":
        """The step itself, and not another one that came to lie in its place."""
        return _StepIdentity(_ObjectIdentity(self.function), _ObjectIdentity(self.owner))

    @property
    def enclosed(self) -> list[Any]:
        """What it has now from where it was made: such arguments, and variables of the function around it."""
        return self.given + _closure_values(self.function)

    @property
    def attributes(self) -> dict[str, Any]:
        """What its owner has, beside what never changes."""
        owner = self.function if self.owner is None else self.owner
        return {name: value for name, value in _object_attributes(owner).items() if name not in FIXED}


def inspect_graph_key_step(step: Step) -> GraphKeyStep:
    """What a step is made of."""
    given, found = list[Any](), step
    while isinstance(found, partial):
        given += [found.args, found.keywords]
        found = found.func
    return GraphKeyStep(getattr(found, "__func__", found), getattr(found, "__self__", None), given)


def _closure_values(function: Any) -> list[Any]:
    """What a function that was made in another one has from there, and what it takes where it is given nothing."""
    function = getattr(function, "__func__", function)
    cells = getattr(function, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in cells if cell != CellType()]
    return [*inside, getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)]


def _object_attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object."""
    names = ["__dict__"]
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__")]
    held = dict[str, Any]()
    for name in names:
        with suppress(Exception):  # there is none; or a `__getattr__` of one's own says so in its own way
            found = getattr(value, name)
            held |= found if name == "__dict__" else {name: found}
    return held


def graph_key_tensors(value: Any, deep: int = 2, nested: int = MOST_NESTED) -> list[Tensor]:
    """All tensors in a `Local`'s own things, looked for as far as `summary_of` looks."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | deque):
        return [tensor for item in value if nested for tensor in graph_key_tensors(item, deep, nested - 1)]
    if not deep or isinstance(value, LocalTrainer | Samples | type):
        return []
    return graph_key_tensors(_inside(value), deep - 1, nested)


class _ObjectIdentity:
    """An object that is itself alone, and not another that came to lie in its place once it was gone."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        self._held: Any = None
        self._get: weakref.ref[Any] | None = None
        try:
            self._get = weakref.ref(value)  # no more than that: it may hold much memory
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
    """Which step it is."""

    function: _ObjectIdentity
    owner: _ObjectIdentity

    @property
    def gone(self) -> bool:
        """Whether there will never be such a step again."""
        return self.function.gone or self.owner.gone


def build_graph_key(value: Any, deep: int = 2, nested: int = MOST_NESTED) -> Hashable:
    """What of a `Local`'s own things a recording depends on: addresses of tensors, values of the rest.

    Objects are themselves and what they hold, so many levels `deep`.
    """
    if isinstance(value, Tensor):
        return tensor_graph_key(value)
    if isinstance(value, int | float | str | bool | None):
        return value
    if isinstance(value, Samples):
        return tensor_graph_key(value.x), tensor_graph_key(value.y)
    if isinstance(value, Mapping | list | tuple | deque | set | frozenset) and not nested:
        return _ObjectIdentity(value)
    if isinstance(value, Mapping):
        return tuple((key, build_graph_key(item, deep, nested - 1)) for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        return tuple(build_graph_key(item, deep, nested - 1) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(build_graph_key(item, deep, nested - 1) for item in value)
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype, value.shape, sha256(value.tobytes()).digest()  # itself may take much memory
    if isinstance(value, np.random.Generator):
        return _ObjectIdentity(value), repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return _ObjectIdentity(value), value.getstate()
    if isinstance(value, torch.Generator):  # those of a GPU are known to recordings, or break them
        return _ObjectIdentity(value), value.get_state().numpy().tobytes() if value.device.type == "cpu" else None
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return object()  # nobody can see how far it has come, so it is never the same
    if not deep or isinstance(value, LocalTrainer | type):
        return _ObjectIdentity(value)
    if isinstance(value, nn.Module):
        return _ObjectIdentity(value), modules_graph_key(value.modules(), deep - 1)
    return _ObjectIdentity(value), build_graph_key(_inside(value), deep - 1, nested)


def _inside(value: Any) -> Any:
    """What an object holds."""
    if isinstance(value, FunctionType | MethodType):
        return _closure_values(value), getattr(value, "__self__", None)
    return {} if isinstance(value, BuiltinFunctionType) else _object_attributes(value)


def modules_graph_key(network: Iterable[nn.Module], deep: int = 1) -> Hashable:
    """What these modules have on the host beside weights and buffers: numbers, and those of one's own all else too."""
    found = list[Hashable]()
    seen = dict[int, Hashable]()  # settings that all layers share, say
    for module in network:
        own = not type(module).__module__.startswith("torch.")
        for name, value in vars(module).items():
            if isinstance(value, NUMBERS):
                found.append(value)
            elif own and name not in USUAL:
                if id(value) not in seen:
                    seen[id(value)] = build_graph_key(value, deep)
                found.append(seen[id(value)])
    return tuple(found)


ALWAYS_READ = ("batch_size", "clip")
"""Settings that every step reads: recordings depend on them anyhow."""


class GraphKeyAttribute:
    """A host value on the bench. A recorded step would keep the value it had, so reading it is noted."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, bench: "CudaSlot | None", owner: type) -> Any:
        if bench is None:
            return self
        if bench.listening is not None:
            bench.listening.add(self.name)
        return bench.host[self.name]

    def __set__(self, bench: "CudaSlot", value: Any) -> None:
        bench.host[self.name] = value


class GraphKeyConfig:
    """The settings of a client's training, whose names are noted as they are read."""

    def __init__(self, training: TrainingConfig, noted: set[str]) -> None:
        self._training, self._noted = training, noted

    def __getattr__(self, name: str) -> Any:
        if name not in ALWAYS_READ:
            self._noted.add(f"training.{name}")
        return getattr(self._training, name)
