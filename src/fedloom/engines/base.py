"""What an engine does: it trains clients and scores models, and does not know methods."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.banks import Bank
from fedloom.bench import Bench, Pass, Score, Workshop
from fedloom.data import Federation
from fedloom.exchange import Job, Lost, Shapes, Update

Train = Callable[[Bench], Iterator[Pass]]
"""A `Local`'s train."""


HOME_MEMORY = 4 << 30
"""Bytes on a GPU for what clients keep; what is more is kept by the host."""


class Homes:
    """What clients keep between rounds. Only clients that have been seen take up memory."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        self.shapes = shapes
        self.dtype = dtype
        self.device = torch.device("cpu")
        """Where it is kept, as long as there is little of it."""
        numbers = sum(torch.Size(shape).numel() for shape in shapes.values())
        self._most = HOME_MEMORY // max(1, numbers * dtype.itemsize)
        self._kept: dict[int, dict[str, Tensor]] = {}
        self.changed: set[int] = set()
        """Clients whose state changed since it was last saved."""

    def __contains__(self, client: int) -> bool:
        return client in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def clients(self) -> list[int]:
        """Those that keep something, in order."""
        return sorted(self._kept)

    def get(self, client: int) -> Mapping[str, Tensor]:
        """What `client` keeps; empty when it has not been seen (then it starts from zeros)."""
        return self._kept.get(client, {})

    def keep(self, client: int, values: Mapping[str, Tensor]) -> None:
        """Copy `values` into the client's state."""
        if not self.shapes:
            return
        mine = self._kept.setdefault(client, {})
        for name, value in values.items():
            if name in mine:
                mine[name].copy_(value)
            else:
                mine[name] = value.detach().to(self.device if len(self._kept) <= self._most else "cpu", copy=True)
        self.changed.add(client)


@dataclass(frozen=True)
class Shop:
    """Everything an engine needs to train clients: the benches' workshop, the samples, the method's `train`."""

    workshop: Workshop
    federation: Federation
    train: Train
    homes: Homes


class Engine(ABC):
    """Runs clients. Used as a context manager, so that processes and memory are given back."""

    name: str
    device: torch.device = torch.device("cpu")

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.homes = shop.homes

    @abstractmethod
    def train(self, round: int, jobs: Sequence[Job]) -> Iterator[Update | Lost]:
        """Train the clients of these jobs; answers come in the order of the jobs, each lent until the next."""

    @abstractmethod
    def score(self, row: Tensor) -> Score | None:
        """How a model does on the test set; None when there is none."""

    @staticmethod
    def make_bank(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Bank:
        """A bank of rows where this engine reads them without copying."""
        return Bank.memory(count, width, dtype, device)

    def accept(self, update: Update) -> None:
        """The server took this update: what its client wanted to keep is now kept."""
        self.homes.keep(update.client, update.home)

    def close(self) -> None:
        """Give back what the engine holds."""
        return

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def train_client(
    bench: Bench,
    shop: Shop,
    round: int,
    client: int,
    row: Tensor,
    received: Tensor,
    extras: Mapping[str, Tensor],
    home: dict[str, Tensor],
    uploads: dict[str, Tensor],
    first_visit: bool,
) -> tuple[int, float, int]:
    """One client's work from begin to end, alike in every engine: (samples, loss, steps)."""
    samples = shop.federation.client(client)
    places = {"home": dict(home), "uploads": dict(uploads)}
    with shop.workshop.streams.globally("noise", round, client, bench.device):
        bench.begin(round, client, samples, row, received, extras, home, uploads, first_visit)
        for piece in shop.train(bench):
            bench.run(piece)
        bench.finish()
    conclude(bench, row, places)
    return bench.samples, bench.mean_loss, bench.steps


def conclude(bench: Bench, row: Tensor, places: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Bring a client's results to where they belong, in case the method put other tensors on the bench."""
    _fill("row", row, bench.row)
    for group, now in (("home", bench.home), ("uploads", bench.uploads)):
        if places[group].keys() != now.keys():
            raise ValueError(f"{group} holds {sorted(now)}, but {sorted(places[group])} was declared")
        for name, place in places[group].items():
            _fill(f"{group}[{name!r}]", place, now[name])


def _fill(name: str, place: Tensor, value: Tensor) -> None:
    if value is place:
        return
    if value.shape != place.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but {tuple(place.shape)} was expected")
    place.copy_(value)


def reason_of(error: BaseException) -> str:
    """A client's failure in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
