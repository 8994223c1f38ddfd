"""CUDA graphs on the CPU: operations repeated with the same tensors and numbers."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fedloom.devices.cuda_graphs import GraphRunner, StaticGraphOwner, _CapturedGraph, _GraphOwner


def alias(tensor: Tensor) -> Tensor:
    """The same memory in the shape it now has: operations may change the shape of a tensor in place."""
    return tensor.detach()


class Operations(TorchDispatchMode):
    """Notes every operation that is carried out."""

    def __init__(self, owner: _GraphOwner) -> None:
        super().__init__()
        self.owner = owner
        self.noted: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(Tensor, alias, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.noted.append((func, *given, tree_map_only(Tensor, alias, result)))
        return result

    def replay(self) -> None:
        """Do them again: new results go where the old ones lie."""
        with torch.no_grad(), self.owner.rng_scope():
            for func, args, kwargs, result in self.noted:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class FakeGraphTape(GraphRunner):
    """Records every step but the first of its kind, and replays it where the key allows."""

    def capture(self, body: Callable[[], None], owner: _GraphOwner) -> Operations:
        # A graph is not carried out while it is recorded. This is, so what it does is taken back.
        memory, drawn = owner.memory(), torch.get_rng_state()
        states = [generator.get_state() for generator in self._generators]
        before = [tensor.detach().clone() for tensor in memory]
        with Operations(owner) as operations:
            body()
        with torch.no_grad():
            for tensor, old in zip(memory, before, strict=True):
                tensor.copy_(old)
        torch.set_rng_state(drawn)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        return operations

    def _check(self, kind: Hashable, recording: _CapturedGraph, body: Callable[[], None], owner: _GraphOwner) -> None:
        super()._check(kind, TakenBack(recording, owner), body, owner)


class TakenBack:
    """A replay whose draws from the host's generator are taken back: those of a GPU come from the tape's own."""

    def __init__(self, recording: _CapturedGraph, owner: _GraphOwner) -> None:
        self._recording, self._owner = recording, owner

    def replay(self) -> None:
        if isinstance(self._owner, StaticGraphOwner):  # it draws nothing on the host
            self._recording.replay()
            return
        drawn = vars(self._owner)["_host_state"]
        self._recording.replay()
        vars(self._owner)["_host_state"] = drawn


def fake_tape(device: torch.device, generators: tuple[torch.Generator, ...] = (), urgency: int = 0) -> FakeGraphTape:
    """In the place of `make_tape`."""
    return FakeGraphTape(generators)
