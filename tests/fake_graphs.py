"""CUDA graphs as a CPU can have them: operations with the tensors and numbers they were given, done again."""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fedloom.tapes import Player, Tape


def alias(tensor: Tensor) -> Tensor:
    """The same memory in the shape it now has: operations may change the shape of a tensor in place."""
    return tensor.detach()


class Operations(TorchDispatchMode):
    """Notes every operation that is carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(Tensor, alias, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.noted.append((func, *given, tree_map_only(Tensor, alias, result)))
        return result

    def replay(self) -> None:
        """Do them again: new results go where the old ones lie."""
        for func, args, kwargs, result in self.noted:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class FakeGraphTape(Tape):
    """Records every step but the first of its kind, and replays it where the key allows."""

    def __init__(self) -> None:
        super().__init__()
        self.warm = set[Hashable]()
        self.reads: dict[Hashable, frozenset[str]] = {}
        self.graphs: dict[Hashable, Operations] = {}
        self.refused = set[Hashable]()

    def refuse(self, kind: Hashable, reason: str) -> None:
        self.refused.add(kind)

    def play(self, kind: Hashable, key: Hashable, body: Callable[[], None], player: Player) -> None:
        names = self.reads.get(key)
        graph = self.graphs.get((key, player.values(names))) if names is not None else None
        if graph is not None:
            self.replayed += 1
            with torch.no_grad(), player.randomness():
                graph.replay()
        elif kind not in self.warm or kind in self.refused:
            self.warm.add(kind)
            super().play(kind, key, body, player)
        else:
            operations = Operations()
            with player.randomness(), player.listen() as reads, operations:
                body()
            if "steps" in reads:
                self.refuse(kind, "")
                return
            self.recorded += 1
            names = self.reads[key] = self.reads.get(key, frozenset()) | reads
            self.graphs[key, player.values(names)] = operations
